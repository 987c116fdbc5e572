"""Every module and every optimizer in the lists that torch tests itself with trains in pages: `make test-all`."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from math import isfinite
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.common_optimizers import optim_db
from torch.utils._pytree import tree_leaves
from zoo import losses_of

import pagoda
from nightly.in_pages import assert_same_weights, in_pages

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
MOST_CASES = 20
"""Of a module: some have hundreds."""


def trained(model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> list[float]:
    def loss_of(_step: int) -> torch.Tensor:
        out = model(*deepcopy(args), **deepcopy(kwargs))
        return torch.stack([t.float().square().mean() for t in tree_leaves(out) if t.is_floating_point()]).sum()

    torch.manual_seed(2)
    return losses_of(loss_of, optimizer)


@pytest.mark.parametrize("info", module_db, ids=lambda info: info.name)
def test_a_module_trains_with_the_bits_of_plain_pytorch(info: Any) -> None:
    given = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=False, training=True)
    trained_cases = 0
    for case in given[:: -(-len(given) // MOST_CASES)]:

        def make(case: Any = case) -> nn.Module:
            torch.manual_seed(0)
            made: nn.Module = info.module_cls(*case.constructor_input.args, **case.constructor_input.kwargs)
            if info.is_lazy:  # takes its shape from its first input
                made(*deepcopy(case.forward_input.args))
            return made

        plain = make()
        if not any(param.numel() for param in plain.parameters()):
            continue
        args, kwargs = case.forward_input.args, case.forward_input.kwargs
        losses = trained(plain, torch.optim.SGD(plain.parameters(), lr=0.01), *args, **kwargs)
        if not all(map(isfinite, losses)):  # inputs without an element
            continue
        trained_cases += 1
        model, optimizer = in_pages(make, pagoda.Optim(torch.optim.SGD, lr=0.01))
        with optimizer:
            assert trained(model, optimizer, *args, **kwargs) == losses, case.desc
            assert_same_weights(model, plain)
    if not trained_cases:
        pytest.skip("has nothing to train")


OTHERWISE: dict[type, Callable[[], Any]] = {
    torch.optim.LBFGS: lambda: pytest.raises(pagoda.ConfigError, match="LBFGS"),
    torch.optim.SparseAdam: lambda: pytest.raises(pagoda.ConfigError, match="SparseAdam"),
}
"""Refused, in words."""


def network(biases: bool) -> nn.Module:
    torch.manual_seed(0)
    first, second, last = nn.Linear(12, 40, biases), nn.Linear(40, 24, bias=False), nn.Linear(24, 6, biases)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), last)


@pytest.mark.parametrize("info", optim_db, ids=lambda info: info.optim_cls.__name__)
def test_an_optimizer_has_its_own_bits_in_pages(info: Any) -> None:
    x = torch.randn(4, 12, generator=torch.Generator().manual_seed(1))
    for case in info.optim_inputs_func(device="cpu"):
        make = partial(network, biases=info.optim_cls is not torch.optim.Muon)
        if info.optim_cls in OTHERWISE:
            with OTHERWISE[info.optim_cls]():
                in_pages(make, pagoda.Optim(info.optim_cls, **case.kwargs))
            continue
        plain = make()
        losses = trained(plain, info.optim_cls(plain.parameters(), **case.kwargs), x)
        model, optimizer = in_pages(make, pagoda.Optim(info.optim_cls, **case.kwargs))
        with optimizer:
            assert trained(model, optimizer, x) == losses, case.desc
            assert_same_weights(model, plain)
