"""Updates on the device give the bits of the CPU's, beside those, through a ring that the ledger knows."""

from functools import cache
from pathlib import Path

import pytest
from zoo import PAGE, RESIDENT, UNIT_LIMIT, Outcome, Recipe, train

import pagoda
from pagoda.construction.construct import describe
from pagoda.memory.sizes import parse_bytes
from pagoda.optim.adamw import AdamW
from pagoda.plan.device_updates import DEVICE_SLOTS, UPDATE_RING, slot_pages
from pagoda.plan.layout import GRAD, Layout
from pagoda.plan.options import Options
from pagoda.plan.placement import Budgets
from pagoda.plan.planner import make_plan


@cache
def resident(recipe: Recipe) -> Outcome:
    return train(recipe, RESIDENT)


def layout_of(recipe: Recipe) -> Layout:
    states = AdamW(moments=recipe.moments).states(recipe.precision)  # type: ignore[arg-type]
    options = Options(PAGE, parse_bytes(UNIT_LIMIT))
    return make_plan(describe(recipe.build()), states, Budgets(1 << 40), options).layout


def ring_bytes(layout: Layout) -> int:
    return DEVICE_SLOTS * slot_pages(layout.states, layout.block_elements, PAGE) * PAGE


def memory(recipe: Recipe, share: float, host: str = "64MiB", ssd: Path | None = None) -> pagoda.Memory:
    """The smallest device in which a model trains with some of its updates there."""
    layout = layout_of(recipe)
    device = layout.lease_pages(ahead=1) * PAGE + ring_bytes(layout)
    return pagoda.Memory(
        device=f"cpu:{device}",
        host=host,
        ssd=None if ssd is None else f"{ssd}:1GiB",
        page_size=PAGE,
        unit_limit=UNIT_LIMIT,
        split=pagoda.Split(device_update_share=share),
    )


def assert_updated_on_device(outcome: Outcome, share: float) -> None:
    """The share of the parameters that was asked for passed the device, and the others did not."""
    plan = outcome.plan
    assert plan is not None
    passing = [plan.units[index] for index in plan.placement.updated_on_device]
    assert passing
    assert sum(unit.trainable_numel for unit in passing) <= share * sum(unit.trainable_numel for unit in plan.units)
    assert (len(passing) == len([u for u in plan.units if u.trainable_numel])) == (share == 1)
    states = sum(state.nbytes(unit.trainable_numel) for unit in passing for state in plan.layout.states)
    grads = sum(unit.trainable_numel for unit in passing) * plan.layout.itemsize(GRAD)
    steps = len(outcome.moved)
    updated = [step["device_update"] for step in outcome.moved]
    # An update may run on into the next step, so only sums over steps are sure.
    assert (steps - 1) * (2 * states + grads) <= sum(updated) <= steps * (2 * states + grads)
    assert sum(step["d2h"] for step in outcome.moved) >= (steps - 1) * states
    if share == 1:
        assert not any(step["update"] for step in outcome.moved)


def test_units_on_ssd_are_updated_by_the_cpu_and_others_on_the_device(tmp_path: Path) -> None:
    recipe = Recipe("qwen3")
    layout = layout_of(recipe)
    states = sum(layout.total_pages(state.name) for state in layout.states) * PAGE
    outcome = train(recipe, memory(recipe, 1.0, str(int(states * 0.8)), tmp_path))
    outcome.assert_same_bits(resident(recipe))
    assert outcome.plan is not None
    homes = outcome.plan.placement.homes
    passing = outcome.plan.placement.updated_on_device
    streamed = {unit for (unit, state), tier in homes.items() if tier == "ssd" and state != GRAD}
    assert passing
    assert streamed
    assert passing.isdisjoint(streamed)
    assert sum(step["update"] for step in outcome.moved) > 0
    assert sum(step["device_update"] for step in outcome.moved) > 0


def test_the_ring_is_a_line_of_the_devices_ledger_and_peak_memory_is_what_the_plan_said() -> None:
    recipe = Recipe("llama")
    outcome = train(recipe, memory(recipe, 1.0))
    assert outcome.plan is not None
    lines = outcome.plan.bytes["device"]
    assert lines[UPDATE_RING] == ring_bytes(outcome.plan.layout)
    assert outcome.plan.peak_bytes["device"] == outcome.plan.budgets.device
    assert lines[UPDATE_RING] < outcome.peak_bytes["device"] <= outcome.plan.peak_bytes["device"]


def test_a_device_without_room_for_the_ring_is_refused() -> None:
    recipe = Recipe("llama")
    roomy = memory(recipe, 1.0)
    assert roomy.device is not None
    tight = pagoda.Memory(
        device=f"cpu:{int(roomy.device[4:]) - PAGE}",
        host="64MiB",
        page_size=PAGE,
        unit_limit=UNIT_LIMIT,
        split=pagoda.Split(device_update_share=1.0),
    )
    with pytest.raises(pagoda.BudgetError, match=r"split\.device_update_share") as refused:
        pagoda.wrap(recipe.build(), pagoda.AdamW(), memory=tight)
    assert refused.value.tier == "device"
    assert refused.value.needed_bytes == int(roomy.device[4:])


def test_a_checkpoint_is_the_last_step_while_updates_pass_the_device(tmp_path: Path) -> None:
    """Each is taken while the updates of its step are under way, and the next step's come before it is written."""
    recipe = Recipe("llama")

    def losses(resume: Path | None, save: Path | None) -> list[float]:
        import torch
        from zoo import batch, loss_of

        model, optimizer = pagoda.wrap(recipe.build(), pagoda.AdamW(lr=1e-2), memory=memory(recipe, 0.5))
        generator = torch.Generator().manual_seed(1)
        batches = [batch(recipe.model, generator) for _ in range(6)]
        if resume is not None:
            optimizer.load_checkpoint(resume)
        found = []
        for index, inputs in enumerate(batches[3:] if resume is not None else batches):
            loss = loss_of(model(**inputs))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
            if save is not None and index == 2:
                optimizer.save_checkpoint(save)
        optimizer.close()
        return found

    whole = losses(None, tmp_path / "saved")
    assert losses(tmp_path / "saved", None) == whole[3:]
