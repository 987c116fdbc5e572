"""A trained parameter shares memory with nothing else of its model, or the model is refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from zoo import RESIDENT

import pagoda
from pagoda.prepare.shared_memory import check_memory_is_apart


def views(*of: Callable[[torch.Tensor], torch.Tensor]) -> nn.ParameterDict:
    """Parameters that are views of one tensor."""
    whole = torch.arange(64.0).view(8, 8)
    return nn.ParameterDict({f"p{index}": nn.Parameter(view(whole)) for index, view in enumerate(of)})


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def with_frozen(frozen: int, model: nn.ParameterDict) -> nn.ParameterDict:
    for index in range(frozen):
        model[f"p{index}"].requires_grad_(False)
    return model


def linear_with(attach: Callable[[nn.Module, torch.Tensor], object]) -> nn.Module:
    model = nn.Linear(8, 8)
    attach(model, model.weight.detach())
    return model


def on_meta() -> nn.Module:
    with pagoda.deferred_init():
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        model[1].weight = nn.Parameter(model[0].weight.t())
    return model


SHARED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "transposed": (lambda: views(whole, torch.Tensor.t), "'p0' and 'p1' are two parameters in the same memory"),
    "a row of it": (lambda: views(torch.Tensor.t, lambda w: w[3]), "'p0' and 'p1'"),
    "every second row": (lambda: views(lambda w: w[::2], lambda w: w[1::2]), "'p0' and 'p1'"),
    "columns": (lambda: views(lambda w: w[:, :5], lambda w: w[:, 4:]), "'p0' and 'p1'"),
    "another dtype": (lambda: views(lambda w: w.view(torch.bfloat16)[5], lambda w: w[5:7]), "'p0' and 'p1'"),
    "behind a frozen part": (lambda: with_frozen(2, views(whole, lambda w: w[1:2], lambda w: w[4:6])), "'p0' and 'p2'"),
    "by NumPy": (
        lambda: nn.ParameterList([torch.from_numpy(a)[i:] for i, a in enumerate([torch.ones(4).numpy()] * 2)]),
        "'0' and '1'",
    ),
    "on meta": (on_meta, r"'0\.weight' and '1\.weight'"),
    "a buffer": (
        lambda: linear_with(lambda m, w: m.register_buffer("turned", w.t())),
        "buffer 'turned' lies in the memory of the parameter 'weight'",
    ),
    "an attribute": (lambda: linear_with(lambda m, w: setattr(m, "kept", w[2])), "attribute 'kept' lies in the memory"),
    "of one element": (lambda: views(lambda w: w[0, 0].expand(8, 8)), "'p0' is an expanded tensor"),
}


@pytest.mark.parametrize("case", SHARED)
def test_a_trained_parameter_whose_memory_is_shared_is_refused_by_name(case: str) -> None:
    build, message = SHARED[case]
    with pytest.raises(pagoda.ConfigError, match=message):
        pagoda.wrap(build(), pagoda.AdamW(), memory=RESIDENT, precision="fp32")


@pytest.mark.parametrize(
    "build",
    [
        lambda: views(lambda w: w[:4], lambda w: w[4:]),
        lambda: with_frozen(2, views(whole, torch.Tensor.t)),
        lambda: torch.nn.utils.spectral_norm(nn.Linear(8, 8)),
    ],
    ids=["rows", "frozen", "computed anew"],
)
def test_views_without_a_common_element_are_trained(build: Callable[[], Any]) -> None:
    model = build()
    check_memory_is_apart(model, {name for name, param in model.named_parameters() if param.requires_grad})


def test_frozen_views_that_may_be_trained_later_are_refused() -> None:
    model = with_frozen(2, views(whole, torch.Tensor.t))
    with pytest.raises(pagoda.ConfigError, match="'p0' and 'p1'"):
        pagoda.wrap(model, pagoda.AdamW(), param_groups=list(model.parameters()), memory=RESIDENT, precision="bf16")
