"""Units that are updated on the device or at home there: the bits of the CPU, and every byte in the device's ledger."""

from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path

import pytest
import torch
from pairwise import each_once
from zoo import PAGE, RESIDENT, UNIT_LIMIT, Outcome, Recipe, batch, loss_of, train

import pagoda
from pagoda.memory.sizes import parse_bytes
from pagoda.optim.adamw import AdamW
from pagoda.optim.rule import DTYPES, PRECISIONS
from pagoda.plan.device_updates import slot_count, slot_pages
from pagoda.plan.layout import GRAD, WEIGHT, Layout
from pagoda.plan.options import Options
from pagoda.plan.planner import make_plan
from pagoda.plan.tiers import Budgets
from pagoda.plan.traffic import traffic_of
from pagoda.prepare.construct import describe
from pagoda.runtime.device import Device


@cache
def resident(recipe: Recipe) -> Outcome:
    return train(recipe, RESIDENT)


def layout_of(recipe: Recipe) -> Layout:
    numbers, model = recipe.numbers, recipe.build()
    of_dtype: Counter[torch.dtype] = Counter()
    for param in model.parameters():
        of_dtype[param.dtype] += param.numel()
    own = of_dtype.most_common(1)[0][0]
    weight = DTYPES[numbers.precision] if numbers.precision else own
    states = (recipe.rule or AdamW(moments=recipe.moments)).states(PRECISIONS[weight])
    options = Options(PAGE, parse_bytes(UNIT_LIMIT), gradients=DTYPES[numbers.gradients] if numbers.gradients else None)
    root = describe(model, weight=weight, dtype_of=None if numbers.precision else lambda param: param.dtype)
    return make_plan(root, states, Budgets(1 << 40), options).layout


def ring_bytes(layout: Layout) -> int:
    return slot_count(layout) * slot_pages(layout) * PAGE


def device_bytes(recipe: Recipe, homes: float, ring: bool) -> int:
    """Bytes of leases, of a ring if there is one, and of `homes` of all states and gradients."""
    layout = layout_of(recipe)
    leases = layout.lease_pages(ahead=2 if homes else 1) * PAGE
    return leases + ring_bytes(layout) * ring + int(homes * states_of(recipe))


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


def assert_updated_on_device(outcome: Outcome, share: float) -> None:
    """The share of the parameters that was asked for passed the device, and the others did not."""
    plan = outcome.plan
    passing = [plan.units[index] for index in plan.placement.passing]
    assert passing
    assert sum(unit.trainable_numel for unit in passing) <= share * sum(unit.trainable_numel for unit in plan.units)
    assert (len(passing) == len([u for u in plan.units if u.trainable_numel])) == (share == 1)
    states = sum(state.nbytes(unit.trainable_numel) for unit in passing for state in plan.layout.states)
    grads = sum(unit.trainable_numel * plan.layout.itemsize(unit, GRAD) for unit in passing)
    steps = len(outcome.moved)
    updated = [step["device_update"] for step in outcome.moved]
    # An update may run on into the next step, so only sums over steps are sure.
    assert (steps - 1) * (2 * states + grads) <= sum(updated) <= steps * (2 * states + grads)
    assert sum(step["d2h"] for step in outcome.moved) >= (steps - 1) * states
    if share == 1:
        assert not any(step["update"] for step in outcome.moved)


def test_states_on_ssd_come_to_the_device_and_go_back(tmp_path: Path) -> None:
    """Some units have states in RAM, some have states on SSD; the device updates units of both kinds."""
    recipe = Recipe("qwen3")
    host = int(states_of(recipe, gradients=False) * 0.8)
    outcome = train(recipe, memory(recipe, 1.0, host=host, ssd=tmp_path))
    outcome.assert_same_bits(resident(recipe))
    assert_updated_on_device(outcome, 1.0)
    placement = outcome.plan.placement
    streamed = {unit for (unit, state), tier in placement.homes.items() if tier == "ssd" and state != GRAD}
    assert streamed & placement.on_device
    assert placement.on_device - streamed


def test_a_device_without_room_for_the_ring_is_refused() -> None:
    recipe = Recipe("llama")
    roomy = memory(recipe, 1.0)
    tight = replace(roomy, device=f"cpu:{int(roomy.device[4:]) - PAGE}")
    with pytest.raises(pagoda.BudgetError, match=r"split\.device_update_share") as refused:
        pagoda.wrap(recipe.build(), pagoda.AdamW(), memory=tight, precision="bf16")
    assert refused.value.tier == "device"
    assert refused.value.needed_bytes == int(roomy.device[4:])


def assert_at_home(outcome: Outcome) -> None:
    """Some units live on the device, and neither their states nor their gradients took any link."""
    plan = outcome.plan
    lives = plan.placement.resident
    assert 0 < len(lives) < len(plan.units)
    assert not plan.placement.passing & plan.placement.units_with("device", ["weight", GRAD])
    layout = plan.layout
    for state in (*(s.name for s in layout.states), GRAD):
        there = sum(layout.pages(plan.units[index], state) for index in lives) * PAGE
        assert plan.bytes["device"].get(state, 0) == there
    others = [u for u in plan.units if u.index not in lives]
    gradients = sum(u.trainable_numel * layout.itemsize(u, GRAD) for u in others)
    passing = [u for u in plan.units if u.index in plan.placement.passing]
    states = sum(s.nbytes(u.trainable_numel) for u in passing for s in layout.states)
    assert outcome.peak_bytes["device"] <= plan.peak_bytes["device"]
    for step in outcome.moved:
        assert step["d2h"] <= 2 * (gradients + states) + states


def test_device_ram_and_ssd_are_home_to_one_model_whose_updates_run_everywhere(tmp_path: Path) -> None:
    recipe = Recipe("llama", accumulation=2, layers=6)
    states = states_of(recipe, gradients=False)
    outcome = train(recipe, memory(recipe, 1.0, homes=0.3, host=int(states * 0.8), ssd=tmp_path))
    outcome.assert_same_bits(resident(recipe))
    assert_at_home(outcome)
    assert {tier for (_, state), tier in outcome.plan.placement.homes.items() if state != GRAD} == {
        "device",
        "host",
        "ssd",
    }
    assert outcome.plan.placement.passing


ROOM = {"weights": 0.1, "weights and gradients": 0.3, "moments of some units": 0.7}
"""What the device is home to, as a share of the states and gradients of all units that it updates."""


@each_once(homes=[*ROOM], share=[1.0, 0.6], mode=["clipped", "during backward", "fp32 gradients"])
def test_the_device_is_home_to_weights_then_gradients_then_moments(homes: str, share: float, mode: str) -> None:
    """Of the units that it updates: they take no link, and their other states do."""
    early, precision = mode == "during backward", "bf16+fp32" if mode == "fp32 gradients" else "bf16"
    recipe = Recipe(
        "llama", clip=None if early else 0.5, accumulation=2, announced=early, precision=precision, layers=6
    )
    outcome = train(recipe, memory(recipe, share, share * ROOM[homes]))
    outcome.assert_same_bits(resident(recipe))
    plan = outcome.plan
    peak = plan.peak_bytes["device"]
    assert peak - plan.bytes["device"]["leases"] < outcome.peak_bytes["device"] <= peak
    placement, traffic = plan.placement, traffic_of(plan)
    weights, gradients, *others = (
        placement.units_with("device", [state]) for state in (WEIGHT, GRAD, "weight_low", "exp_avg", "exp_avg_sq")
    )
    assert placement.passing
    assert weights >= gradients >= others[0] == others[1] == others[2]
    updated = {unit.index for unit in plan.units[:-1]} & placement.on_device
    assert weights
    if homes == "weights":
        assert not others[0]
    else:
        assert weights == updated
        assert gradients
    assert others[0] or homes != "moments of some units"
    for unit in plan.units:
        made, there = 2 * (unit.index not in gradients), unit.index in placement.on_device
        states = sum(s.nbytes(unit.trainable_numel) for s in placement.streamed(unit.index, plan.layout.states))
        assert traffic[unit.index].offloaded * 2 == made * unit.trainable_numel * plan.layout.offloaded_itemsize(unit)
        assert traffic[unit.index].passed == states * there
        assert bool(traffic[unit.index].fetched) == (unit.index not in weights)
        assert bool(traffic[unit.index].brought) == (there and unit.index not in gradients)
    steps, passed = len(outcome.moved), sum(of.passed for of in traffic)
    offloaded = 2 * sum(of.offloaded for of in traffic)
    moved = sum(step["d2h"] for step in outcome.moved)
    # An update may run on into the next step, and gradients have no padding, so only sums over steps are bounded.
    assert (steps - 1) * passed <= moved <= steps * (passed + offloaded)


def test_a_unit_at_home_is_updated_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, launches, pipe = Recipe("llama"), count(), Device.pipe
    monkeypatch.setattr(Device, "pipe", lambda *args: (next(launches), pipe(*args))[1])
    outcome = train(recipe, memory(recipe, 0.0, homes=2.0))
    outcome.assert_same_bits(resident(recipe))
    plan = outcome.plan
    assert plan.placement.resident >= {unit.index for unit in plan.units[:-1]}
    assert next(launches) == len(outcome.moved) * len(plan.placement.resident)
    assert max(unit.trainable_numel for unit in plan.units) > plan.layout.block_elements


def test_a_model_that_ram_alone_cannot_hold_fits_ram_and_the_device() -> None:
    recipe = Recipe("llama")
    with_homes = memory(recipe, 0.0, homes=0.6, host=int(states_of(recipe) * 0.7))
    outcome = train(recipe, with_homes)
    outcome.assert_same_bits(resident(recipe))
    with pytest.raises(pagoda.BudgetError):
        train(recipe, replace(with_homes, split=pagoda.Split()))
    chosen = train(recipe, replace(with_homes, split=None))
    chosen.assert_same_bits(resident(recipe))
    assert_at_home(chosen)


def test_a_checkpoint_that_is_written_while_training_goes_on_resumes_in_ram(tmp_path: Path) -> None:
    """It is taken while updates of its step, on the device and at home there, are under way, and the next step's come
    before it is written."""
    recipe = Recipe("llama")

    def losses(where: pagoda.Memory, resume: Path | None, save: Path | None) -> list[float]:
        model, optimizer = pagoda.wrap(recipe.build(), pagoda.AdamW(lr=1e-2), memory=where, precision="bf16")
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
                optimizer.save_checkpoint(save, wait=False)
        optimizer.close()
        return found

    on_device = memory(recipe, 0.8, homes=0.3)
    whole = losses(on_device, None, tmp_path / "saved")
    assert losses(RESIDENT, tmp_path / "saved", None) == whole[3:]
    assert losses(on_device, tmp_path / "saved", None) == whole[3:]


WHOLE = {
    "adafactor": pagoda.Adafactor(lr=1e-2, beta1=0.9),
    "muon": pagoda.Muon(lr=1e-2),
    "nadam": pagoda.Optim(torch.optim.NAdam, lr=1e-3),
}
COPIED = ("muon", "nadam")
"""Those that compute on copies."""


@pytest.mark.parametrize(
    ("name", "homes", "on_ssd"),
    [("muon", 0.6, False), ("adafactor", 0.0, True), pytest.param("nadam", 0.3, False, marks=pytest.mark.slow)],
)
def test_parameters_that_are_taken_whole_are_all_updated_on_the_device(
    name: str, homes: float, on_ssd: bool, tmp_path: Path
) -> None:
    """Wherever their states live."""
    recipe = Recipe("llama", rule=WHOLE[name], frozen=homes > 0, accumulation=2)
    host = int(states_of(recipe) * 0.8) if on_ssd else 64 << 20
    outcome = train(recipe, memory(recipe, 1.0, homes, host, ssd=tmp_path if on_ssd else None))
    outcome.assert_same_bits(train(recipe, RESIDENT))
    placement = outcome.plan.placement
    trained = {unit.index for unit in outcome.plan.units if unit.trainable_numel}
    assert bool(placement.units_with("device", [WEIGHT])) == (homes > 0)
    assert any(tier == "ssd" and state != GRAD for (_, state), tier in placement.homes.items()) == on_ssd
    assert placement.on_device >= trained
    assert not any(step["update"] for step in outcome.moved)
    assert outcome.moved[-1]["device_update"] > 0


def test_a_plan_by_itself_never_moves_them_to_the_device() -> None:
    """On a GPU their bits would be others."""
    recipe = Recipe("llama", rule=WHOLE["muon"])
    small = replace(memory(recipe, 1.0, homes=0.6, host=int(states_of(recipe) * 0.7)), split=None)
    with pytest.raises(pagoda.BudgetError):
        pagoda.wrap(recipe.build(), recipe.rule, memory=small, precision="bf16")


def test_layers_of_which_a_small_part_is_trained_live_on_a_device_that_cannot_lease_all() -> None:
    recipe = Recipe("llama", frozen="matrices", layers=12)
    layout = layout_of(recipe)
    device = (layout.lease_pages() + layout.total_pages(WEIGHT)) // 2 * PAGE
    outcome = train(recipe, replace(memory(recipe, 0.0), device=f"cpu:{device}", split=None))
    outcome.assert_same_bits(resident(recipe))
    assert layout.total_pages(WEIGHT) * PAGE > device
    assert outcome.plan.placement.resident
