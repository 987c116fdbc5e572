"""What the sweeps share: a model in pages that do not hold all of it, and the comparison with one in RAM."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import pagoda
from pagoda.config.training import ActivationMode


def in_pages(make: Callable[[], nn.Module], rule: Any, activations: ActivationMode = "keep") -> Any:
    """A model in fp32 and its optimizer, computing in an arena that holds a part of its weights."""
    model = make()
    share = max(sum(param.nbytes for param in model.parameters()) // 2, 4096)
    for _ in range(6):
        memory = pagoda.Memory(device=f"cpu:{share >> 10}KiB", host="256MiB", page_size=4096, unit_limit="16KiB")
        try:
            return pagoda.wrap(model, rule, memory=memory, precision="fp32", activations=activations)
        except pagoda.BudgetError as refused:
            share = max(refused.needed_bytes or 0, share) + (64 << 10)
    raise AssertionError("no arena was large enough")


def assert_same_weights(model: nn.Module, expected: nn.Module) -> None:
    """The same bits, or NaN."""
    found = model.state_dict()
    for name, value in expected.state_dict().items():
        assert torch.equal(found[name], value) or bool(value.isnan().any()), name
