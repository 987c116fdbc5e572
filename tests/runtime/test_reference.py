"""Pagoda against plain torch: an fp32 master, a bf16 copy for compute, and torch.optim.AdamW on the master.

Both round the same values in other places (the master to bf16 with ties away from zero or to even, the update in
one kernel or in several), so results agree within rounding. An element whose gradient is rounding noise may still
step the other way, since Adam normalises it; hence a bound on the mean and one on the share of such elements.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from zoo import RESIDENT, Loop, Outcome, Recipe, run, usual_loop

from .loops import CASES, built

LR = 1e-3
BF16_SHARE = 0.25
"""Distance of elements that differ by more than a rounding to bf16, as a share of how far training moved the tensor."""


class Reference:
    """The same methods as Pagoda's optimizer, in plain torch."""

    def __init__(self, model: nn.Module, precision: str, clip: float | None) -> None:
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.masters = [p.detach().clone().requires_grad_() for p in self.params]
        self.clip = clip
        self.adamw = torch.optim.AdamW(self.masters, lr=LR, weight_decay=0.1)
        self.stats = SimpleNamespace(grad_norm=None, faults=0, bytes_moved={})
        if precision == "bf16":
            for param in model.parameters():
                param.data = param.data.bfloat16()

    def step(self) -> None:
        for param, master in zip(self.params, self.masters, strict=True):
            master.grad = None if param.grad is None else param.grad.float()
        graded = [master for master in self.masters if master.grad is not None]
        self.stats.grad_norm = nn.utils.clip_grad_norm_(graded, self.clip or float("inf")).item() if graded else None
        self.adamw.step()
        with torch.no_grad():
            for param, master in zip(self.params, self.masters, strict=True):
                param.copy_(master)

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None


def reference(model: nn.Module, loop: Loop, precision: str, clip: float | None) -> Outcome:
    outcome = Outcome()
    optimizer = Reference(model, precision, clip)
    torch.manual_seed(2)
    loop(model, optimizer, outcome)
    outcome.weights = model.state_dict()
    states = optimizer.adamw.state_dict()["state"]
    outcome.optimizer = {"state": states}
    return outcome


def both(build: Any, loop: Loop, precision: str, clip: float | None) -> tuple[Outcome, Outcome]:
    paged = run(build(), RESIDENT, loop, lr=LR, precision=precision, clip_grad_norm=clip)
    return paged, reference(build(), loop, precision, clip)


def assert_close(paged: Outcome, plain: Outcome, precision: str, start: dict[str, torch.Tensor] | None = None) -> None:
    relative = 2e-3 if precision == "bf16" else 2e-6
    assert paged.losses == pytest.approx(plain.losses, rel=relative)
    assert len(paged.norms) == len(plain.norms)
    for mine, other in zip(paged.norms, plain.norms, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            assert mine == pytest.approx(other, rel=10 * relative)
    assert paged.weights.keys() == plain.weights.keys()
    for name, weight in paged.weights.items():
        other = plain.weights[name]
        assert weight.dtype == other.dtype, name
        apart = (weight.double() - other.double()).abs()
        if precision == "fp32":
            # 5% of a step where gradients are rounding noise (the bias of attention keys), far less elsewhere.
            assert apart.mean() <= 2e-7, name
            assert apart.max() <= 0.05 * LR, name
            continue
        assert start is not None
        ulp = torch.maximum(weight.double().abs(), other.double().abs()) * 2**-7
        beyond = torch.where(apart > ulp, apart, 0.0)
        assert beyond.norm() <= BF16_SHARE * (other.double() - start[name].double()).norm(), name
    # A parameter that never got a gradient has no state in either.
    assert paged.optimizer["state"].keys() == plain.optimizer["state"].keys()  # type: ignore[attr-defined]
    for index, state in plain.optimizer["state"].items():  # type: ignore[attr-defined]
        assert paged.optimizer["state"][index]["step"] == state["step"]  # type: ignore[index]


RECIPES = [
    Recipe("llama", frozen=True, checkpointing=True),
    Recipe("conv"),
    Recipe("conv", clip=None, accumulation=4),
]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(
    "recipe", RECIPES, ids=lambda r: f"{r.model}-{r.accumulation}-clip-{r.clip}{'-frozen' if r.frozen else ''}"
)
def test_training_agrees_with_plain_torch_within_rounding(recipe: Recipe, precision: str) -> None:
    paged, plain = both(recipe.build, usual_loop(recipe), precision, recipe.clip)
    start = {name: value.bfloat16() for name, value in recipe.build().state_dict().items()}
    assert_close(paged, plain, precision, start)
    assert len(set(plain.losses)) == len(plain.losses)


@pytest.mark.parametrize("name", CASES)
def test_unusual_loops_agree_with_plain_torch_within_rounding(name: str) -> None:
    """In fp32, where nothing but a true difference exceeds the bound."""
    paged, plain = both(lambda: built(name), CASES[name].loop, "fp32", 0.5)
    assert_close(paged, plain, "fp32")
