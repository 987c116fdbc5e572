"""Compressed moments: what seeds, plans and state dicts say of them."""

import pytest
import torch
from zoo import RESIDENT, Recipe

import pagoda
from pagoda.construction.construct import describe
from pagoda.optim import Moments
from pagoda.plan.options import Options
from pagoda.plan.placement import Budgets
from pagoda.plan.planner import make_plan

RECIPE = Recipe("llama", clip=0.5, steps=4)
codecs = pytest.mark.parametrize("moments", ["bf16", "8bit"])


def test_the_seed_is_that_of_the_rounding() -> None:
    def weights(seed: int) -> torch.Tensor:
        rule = pagoda.AdamW(lr=1e-2, moments="bf16", seed=seed)
        torch.manual_seed(0)
        model, optimizer = pagoda.wrap(torch.nn.Linear(64, 64), rule, memory=RESIDENT)
        for _ in range(3):
            model(torch.ones(1, 64, dtype=torch.bfloat16)).float().square().sum().backward()
            optimizer.step()
        state = optimizer.state_dict()["state"][0]["exp_avg_sq"]
        optimizer.close()
        return state

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


@codecs
def test_a_state_dict_is_fp32_and_loads_without_a_changed_bit(moments: Moments) -> None:
    def wrapped(of: Moments) -> tuple[torch.nn.Module, pagoda.optimizer.PagedOptimizer]:
        torch.manual_seed(0)
        return pagoda.wrap(torch.nn.Linear(100, 70), pagoda.AdamW(lr=1e-2, moments=of), memory=RESIDENT)

    def steps(model: torch.nn.Module, optimizer: pagoda.optimizer.PagedOptimizer) -> None:
        for scale in (1.0, 0.5, 2.0):
            model(torch.full((1, 100), scale, dtype=torch.bfloat16)).float().square().sum().backward()
            optimizer.step()

    model, optimizer = wrapped(moments)
    steps(model, optimizer)
    state = optimizer.state_dict()
    assert {s.dtype for s in state["state"][0].values()} == {torch.float32}
    other_model, other = wrapped(moments)
    other.load_state_dict(state)
    other_model.load_state_dict(model.state_dict())
    reloaded = other.state_dict()["state"]
    assert all(torch.equal(v, reloaded[i][k]) for i, of in state["state"].items() for k, v in of.items())
    _, exact = wrapped("fp32")
    exact.load_state_dict(state)
    assert torch.equal(exact.state_dict()["state"][0]["exp_avg"], state["state"][0]["exp_avg"])
    for one in (optimizer, other, exact):
        one.close()


def test_the_plan_counts_what_each_codec_takes() -> None:
    root = describe(RECIPE.build())
    numel = sum(param.numel for param in root.walk())

    def beside(moments: Moments) -> dict[str, int]:
        states = pagoda.AdamW(moments=moments).states("bf16")
        plan = make_plan(root, states, Budgets(1 << 40), Options(page_bytes=256, unit_limit=1 << 30))
        lines = plan.bytes["host"]
        return {name: lines[name] for name in lines if name.startswith("exp_avg")}

    exact, half, eighth = beside("fp32"), beside("bf16"), beside("8bit")
    assert sum(exact.values()) == pytest.approx(8 * numel, rel=0.05)
    assert sum(half.values()) == sum(exact.values()) / 2
    assert eighth["exp_avg_8bit"] == exact["exp_avg"] / 4
    assert eighth["exp_avg_scale"] == eighth["exp_avg_sq_scale"]
    assert eighth["exp_avg_scale"] == pytest.approx(eighth["exp_avg_8bit"] / 64, abs=256)
