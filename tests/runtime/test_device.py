"""Units that are updated on the device or at home there: the bits of the CPU, and every byte in the device's ledger."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pairwise import each_once
from zoo import PAGE, RESIDENT, UNIT_LIMIT, Outcome, Recipe, batch, loss_of, train

import pagoda
from pagoda.construction.construct import describe
from pagoda.memory.sizes import parse_bytes
from pagoda.optim.adamw import AdamW
from pagoda.optim.rule import kept_dtype
from pagoda.plan.device_updates import slot_count, slot_pages
from pagoda.plan.layout import GRAD, Layout
from pagoda.plan.options import Options
from pagoda.plan.placement import Budgets
from pagoda.plan.planner import Plan, make_plan

PLAIN = Recipe("plain", layers=6)


def layout_of(recipe: Recipe) -> Layout:
    numbers = recipe.numbers
    states = (recipe.rule or AdamW(moments=recipe.moments)).states(numbers.precision)
    options = Options(PAGE, parse_bytes(UNIT_LIMIT), gradients=kept_dtype(numbers.gradients))
    return make_plan(describe(recipe.build()), states, Budgets(1 << 40), options).layout


def device_bytes(recipe: Recipe, homes: float, ring: bool) -> int:
    """Bytes of leases, of a ring if there is one, and of `homes` of all states and gradients."""
    layout = layout_of(recipe)
    pages = layout.lease_pages(ahead=2 if homes else 1) + slot_count(layout) * slot_pages(layout) * ring
    return pages * PAGE + int(homes * states_of(recipe))


def states_of(recipe: Recipe, gradients: bool = True) -> int:
    """Bytes of all states, and of gradients."""
    layout = layout_of(recipe)
    return sum(layout.total_pages(name) for name in (*(s.name for s in layout.states), *[GRAD] * gradients)) * PAGE


def memory(
    recipe: Recipe, update_share: float, homes: float = 0.0, host: int = 64 << 20, ssd: Path | None = None
) -> pagoda.Memory:
    """A device with room for leases, a ring if something is updated there, and `homes` of all states and gradients."""
    return pagoda.Memory(
        device=f"cpu:{device_bytes(recipe, homes, ring=update_share > 0)}",
        host=host,
        ssd=None if ssd is None else f"{ssd}:1GiB",
        page_size=PAGE,
        unit_limit=UNIT_LIMIT,
        split=pagoda.Split(device_home_share=float(homes > 0), device_update_share=update_share),
    )


def trained_like_in_ram(recipe: Recipe, where: pagoda.Memory) -> tuple[Outcome, Plan]:
    outcome = train(recipe, where)
    outcome.assert_same_bits(train(recipe, RESIDENT))
    assert outcome.plan is not None
    return outcome, outcome.plan


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


def assert_at_home(outcome: Outcome) -> None:
    """Some units live on the device, and neither their states nor their gradients took any link."""
    plan = outcome.plan
    assert plan is not None
    lives, layout = plan.placement.resident, plan.layout
    assert 0 < len(lives) < len(plan.units)
    for state in (*(s.name for s in layout.states), GRAD):
        there = sum(layout.pages(plan.units[index], state) for index in lives) * PAGE
        assert plan.bytes["device"].get(state, 0) == there
    others = [u for u in plan.units if u.index not in lives]
    gradients = sum(u.trainable_numel for u in others) * layout.itemsize(GRAD)
    passing = [u for u in plan.units if u.index in plan.placement.updated_on_device]
    states = sum(s.nbytes(u.trainable_numel) for u in passing for s in layout.states)
    assert not set(lives) & set(plan.placement.updated_on_device)
    for step in outcome.moved:
        assert step["d2h"] <= 2 * (gradients + states) + states


def test_units_on_ssd_are_updated_by_the_cpu_and_others_on_the_device(tmp_path: Path) -> None:
    host = int(states_of(PLAIN, gradients=False) * 0.8)
    outcome, plan = trained_like_in_ram(PLAIN, memory(PLAIN, 1.0, host=host, ssd=tmp_path))
    passing = plan.placement.updated_on_device
    streamed = {unit for (unit, state), tier in plan.placement.homes.items() if tier == "ssd" and state != GRAD}
    assert passing
    assert streamed
    assert passing.isdisjoint(streamed)
    assert sum(step["update"] for step in outcome.moved) > 0
    assert sum(step["device_update"] for step in outcome.moved) > 0
    assert_updated_on_device(trained_like_in_ram(PLAIN, memory(PLAIN, 0.5))[0], 0.5)


def test_device_ram_and_ssd_are_home_to_one_model_whose_updates_run_everywhere(tmp_path: Path) -> None:
    recipe = replace(PLAIN, accumulation=2)
    host = int(states_of(recipe, gradients=False) * 0.8)
    outcome, plan = trained_like_in_ram(recipe, memory(recipe, 1.0, homes=0.3, host=host, ssd=tmp_path))
    assert_at_home(outcome)
    tiers = {tier for (_, state), tier in plan.placement.homes.items() if state != GRAD}
    assert tiers == {"device", "host", "ssd"}
    assert plan.placement.updated_on_device


def test_a_device_without_room_for_the_ring_is_refused() -> None:
    roomy = memory(PLAIN, 1.0)
    assert roomy.device is not None
    tight = replace(roomy, device=f"cpu:{int(roomy.device[4:]) - PAGE}")
    with pytest.raises(pagoda.BudgetError, match=r"split\.device_update_share") as refused:
        pagoda.wrap(PLAIN.build(), pagoda.AdamW(), memory=tight)
    assert refused.value.tier == "device"
    assert refused.value.needed_bytes == int(roomy.device[4:])


def test_a_model_that_ram_alone_cannot_hold_fits_ram_and_the_device() -> None:
    with_homes = memory(PLAIN, 0.0, homes=0.6, host=int(states_of(PLAIN) * 0.7))
    with pytest.raises(pagoda.BudgetError):
        train(PLAIN, replace(with_homes, split=pagoda.Split()))
    for split in (with_homes.split, None):
        assert_at_home(trained_like_in_ram(PLAIN, replace(with_homes, split=split))[0])


@pytest.mark.parametrize(("update_share", "homes"), [(0.5, 0.0), (0.0, 0.5)], ids=["updates", "homes"])
def test_a_checkpoint_that_is_written_while_training_goes_on_resumes_in_ram(
    update_share: float, homes: float, tmp_path: Path
) -> None:
    """It is taken while the updates of its step are under way, and the next step's come before it is written."""

    def losses(where: pagoda.Memory, resume: Path | None, save: Path | None) -> list[float]:
        model, optimizer = pagoda.wrap(PLAIN.build(), pagoda.AdamW(lr=1e-2), memory=where)
        generator = torch.Generator().manual_seed(1)
        batches = [batch("plain", generator) for _ in range(4)]
        if resume is not None:
            optimizer.load_checkpoint(resume)
        found = []
        for index in range(0 if resume is None else 2, 4):
            torch.manual_seed(index)
            loss = loss_of(model(**batches[index]))
            loss.backward()
            optimizer.step()
            found.append(loss.item())
            if save is not None and index == 1:
                optimizer.save_checkpoint(save, wait=False)
        optimizer.close()
        return found

    on_device = memory(PLAIN, update_share, homes)
    whole = losses(on_device, None, tmp_path / "saved")
    assert losses(RESIDENT, tmp_path / "saved", None) == whole[2:]
    assert losses(on_device, tmp_path / "saved", None) == whole[2:]


# --- rules that take parameters whole --------------------------------------------------------------------------

WHOLE = {
    "adafactor": pagoda.Adafactor(lr=1e-2, beta1=0.9),
    "muon": pagoda.Muon(lr=1e-2),
    "nadam": pagoda.Optim(torch.optim.NAdam, lr=1e-3),
}
MUON = replace(PLAIN, rule=WHOLE["muon"], steps=3)


@each_once(name=[*WHOLE], homes=[0.0, 0.6, 0.3], precision=["bf16", "fp32", "fp16"])
def test_parameters_that_are_taken_whole_are_all_updated_on_the_device(name: str, homes: float, precision: str) -> None:
    recipe = replace(MUON, rule=WHOLE[name], precision=precision, frozen=homes > 0, accumulation=2)
    outcome, plan = trained_like_in_ram(recipe, memory(recipe, 1.0, homes))
    trained = {unit.index for unit in plan.units if unit.trainable_numel}
    assert bool(plan.placement.resident) == (homes > 0)
    assert plan.placement.on_device >= trained
    assert not any(step["update"] for step in outcome.moved)
    assert outcome.moved[-1]["device_update"] > 0


def test_budgets_that_would_update_some_of_them_on_the_cpu_are_refused(tmp_path: Path) -> None:
    """On a GPU their bits are others. RAM has all of what the device is no home to."""

    def wrap(where: pagoda.Memory) -> None:
        pagoda.wrap(MUON.build(), MUON.rule, memory=where)

    for update_share, homes in ((0.5, 0.0), (0.0, 1.0), (0.9, 0.5)):
        with pytest.raises(pagoda.ConfigError, match=r"another order on a GPU.* set split\.device_update_share to 1"):
            wrap(memory(MUON, update_share, homes))
    with pytest.raises(pagoda.BudgetError):  # a plan by itself never moves them to the device
        wrap(replace(memory(MUON, 1.0, homes=0.6, host=int(states_of(MUON) * 0.7)), split=None))
    tight = memory(MUON, 1.0, host=int(states_of(MUON) * 0.8), ssd=tmp_path)
    with pytest.raises(pagoda.BudgetError, match="needs all states in RAM") as refused:
        wrap(tight)
    assert refused.value.tier == "host"
    trained_like_in_ram(MUON, replace(tight, host=refused.value.needed_bytes))
