"""Updates in two parts: same bits, wherever the second part is interrupted, and more traffic in exchange."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from zoo import HOST_WEIGHTS, PAGE, RESIDENT, Outcome, Recipe, batch, least, loss_of, take_step, train, usual_loop

import pagoda
from pagoda.errors import StorageError
from pagoda.memory.page import Run
from pagoda.memory.ssd.tier import SSDTier
from pagoda.optim.rule import Rule
from pagoda.plan.layout import MASTER, WEIGHT
from pagoda.plan.tiers import SSD
from pagoda.plan.traffic import traffic_of

from .loops import learn

CLIP = 0.05
"""Every step is clipped."""
RECIPE = Recipe("llama", clip=CLIP)


def memory_of(recipe: Recipe, directory: Path, **split: float) -> pagoda.Memory:
    """Moments on SSD, gradients in RAM."""
    memory = least(recipe, HOST_WEIGHTS, directory)
    return replace(memory, host=memory.host + 64 * PAGE, split=pagoda.Split(**split))


def in_two(recipe: Recipe, directory: Path, loop: Any = None, **split: float) -> Outcome:
    outcome = train(recipe, memory_of(recipe, directory, **{"two_part_share": 1.0, **split}), loop)
    assert outcome.plan.placement.in_two
    return outcome


@pytest.mark.parametrize("settings", [{"moments": "bf16", "accumulation": 2}, {"announced": True, "frozen": True}])
def test_weights_on_ssd_have_the_bits_of_those_in_ram(settings: dict[str, Any], tmp_path: Path) -> None:
    """tests/test_matrix.py has them in RAM."""
    recipe = replace(RECIPE, **settings)
    outcome = in_two(recipe, tmp_path, weight_share=0.0)
    assert outcome.plan.placement.units_with(SSD, (WEIGHT,))
    outcome.assert_same_bits(train(recipe, RESIDENT))


def test_moments_are_read_twice_and_everything_is_written_once(tmp_path: Path) -> None:
    recipe = replace(RECIPE, steps=4)

    def drained(model: nn.Module, optimizer: Any, outcome: Outcome) -> None:
        generator = torch.Generator().manual_seed(1)
        for _ in range(recipe.steps):
            loss_of(model(**batch("llama", generator))).backward()
            optimizer.step()
            optimizer.drain()
            optimizer.zero_grad()
            outcome.moved.append(optimizer.stats.bytes_moved)

    parts = in_two(recipe, tmp_path, drained, two_part_share=0.5)
    whole = train(recipe, memory_of(recipe, tmp_path), drained)
    plan = parts.plan
    units = [plan.units[index] for index in plan.placement.in_two]
    moments = [state for state in plan.layout.states if state.name not in MASTER]
    again = sum(plan.layout.updated_bytes(unit, state) for unit in units for state in moments)
    assert again
    assert 0 < len(units) < len(plan.units)
    once = sum(traffic.streamed for traffic in traffic_of(whole.plan))
    rounding = len(plan.units) * len(plan.layout.moments) * PAGE
    for mine, other in zip(parts.moved[1:], whole.moved[1:], strict=True):
        assert mine["ssd_write"] == other["ssd_write"] == pytest.approx(once, abs=rounding)
        assert other["ssd_read"] == pytest.approx(once, abs=rounding)
        assert mine["ssd_read"] - other["ssd_read"] == pytest.approx(again, abs=len(units) * len(moments) * PAGE)


@pytest.mark.parametrize("after", ["step", "forward"])
def test_a_checkpoint_between_the_parts_has_the_state_after_the_step(tmp_path: Path, after: str) -> None:
    def loop(model: nn.Module, optimizer: Any, outcome: Outcome, first: int) -> None:
        generator = torch.Generator().manual_seed(1)
        batches = [batch("llama", generator) for _ in range(RECIPE.steps)]
        if first:
            optimizer.load_checkpoint(tmp_path / "saved")
        for step in range(first, RECIPE.steps):
            loss = loss_of(model(**batches[step]))
            if (step, after, first) == (3, "forward", 0):
                optimizer.save_checkpoint(tmp_path / "saved")
            learn(loss, outcome)
            take_step(optimizer, outcome)
            if (step, after) == (2, "step"):
                optimizer.save_checkpoint(tmp_path / "saved")

    usual = train(RECIPE, RESIDENT)
    in_two(RECIPE, tmp_path, partial(loop, first=0)).assert_same_bits(usual)
    second = in_two(RECIPE, tmp_path, partial(loop, first=3))
    second.losses, second.norms = usual.losses[:3] + second.losses, usual.norms[:3] + second.norms
    second.assert_same_bits(usual)


def test_speculative_updates_stay_whole_and_those_that_are_clipped_have_two_parts(tmp_path: Path) -> None:
    recipe = replace(RECIPE, clip=0.5, announced=True, steps=8)
    memory = memory_of(recipe, tmp_path, two_part_share=1.0)
    outcome = train(recipe, replace(memory, host=memory.host + (256 << 10)))
    placement = outcome.plan.placement
    assert placement.in_two & placement.speculated
    outcome.assert_same_bits(train(recipe, RESIDENT))


@pytest.mark.parametrize("verb", ["load", "store"])
def test_a_second_part_that_fails_is_said_until_every_state_is_replaced(
    tmp_path: Path, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(model: nn.Module, optimizer: Any, outcome: Outcome) -> None:
        optimizer.save_checkpoint(tmp_path / "saved")
        loss_of(model(**batch("llama", torch.Generator().manual_seed(3)))).backward()
        real, plan = getattr(SSDTier, verb), pagoda.plan_of(model)
        broken, calls = optimizer._engine.store.run(max(plan.placement.in_two), "exp_avg"), 0

        def fail(ssd: SSDTier, run: Run, offset: int, view: memoryview) -> None:
            nonlocal calls
            calls += run == broken
            if run == broken and calls == (2 if verb == "load" else 1):  # the first part reads, and does not write
                raise StorageError("the disk is gone")
            real(ssd, run, offset, view)

        monkeypatch.setattr(SSDTier, verb, fail)
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(StorageError, match="the disk is gone"):
            optimizer.drain()
        monkeypatch.undo()
        with pytest.raises(StorageError, match="damaged"):
            loss_of(model(**batch("llama", torch.Generator().manual_seed(3))))
        optimizer.load_checkpoint(tmp_path / "saved")
        usual_loop(RECIPE)(model, optimizer, outcome)

    in_two(RECIPE, tmp_path, failing).assert_same_bits(train(RECIPE, RESIDENT))


@pytest.mark.parametrize(
    "rule", [pagoda.SGD(lr=1e-2, momentum=0.9), pagoda.AdamW(moments="8bit")], ids=["needs weights", "floors in RAM"]
)
def test_rules_whose_moments_cannot_be_computed_apart_are_updated_whole(rule: Rule, tmp_path: Path) -> None:
    recipe = replace(RECIPE, rule=rule, steps=1)
    outcome = train(recipe, memory_of(recipe, tmp_path, two_part_share=1.0))
    assert not outcome.plan.placement.in_two
