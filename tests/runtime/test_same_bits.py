"""Where training state lives never changes a bit: every placement against the same run with all of it in RAM."""

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from zoo import (
    ALL_ON_SSD,
    ARENA,
    ARENA_ALL_ON_SSD,
    PAGE,
    PLACEMENTS,
    RESIDENT,
    UNIT_LIMIT,
    Outcome,
    Recipe,
    assert_placed,
    least,
    run,
    squeeze,
    take_step,
    train,
)

import pagoda
from pagoda.config.training import ActivationMode, Precision
from pagoda.plan.placement import BOUNCE_ELEMENTS
from pagoda.plan.trace import Phase

from .loops import CASES, WIDTH, Nested, built


@cache
def resident_case(name: str) -> Outcome:
    return run(built(name), RESIDENT, CASES[name].loop, clip_grad_norm=0.5)


def unusual_loops() -> list[object]:
    """Each loop where weights are read from SSD, or copied to another memory; the others by `make test-all`.

    Nowhere both: these models are so small that their weights take less RAM than what would stream them from SSD.
    A gradient of a gradient needs the weights of all layers at once.
    """
    cases = []
    placements = [placement for placement in PLACEMENTS if placement != ARENA_ALL_ON_SSD]
    names = [name for name in CASES if name != "gradient_penalty"]
    for (number, name), placement in itertools.product(enumerate(names), placements):
        marks = [] if placement == (ALL_ON_SSD, ARENA)[number % 2] else [pytest.mark.slow]
        activations = {"backward_twice": "recompute", "two_graphs_at_once": "offload"}.get(name, "keep")
        cases.append(pytest.param(name, placement, activations, marks=marks, id=f"{name}-{placement}"))
    return cases


@pytest.mark.parametrize(("name", "placement", "activations"), unusual_loops())
def test_unusual_loops_do_not_depend_on_placement(
    name: str, placement: str, activations: ActivationMode, tmp_path: Path
) -> None:
    case = CASES[name]
    model = built(name)
    memory = squeeze(model, placement, tmp_path, activations=activations)
    outcome = run(model, memory, case.loop, clip_grad_norm=0.5, activations=activations)
    assert "weight" in outcome.plan.bytes["ssd" if "ssd" in placement else "host"]  # type: ignore[union-attr]
    outcome.assert_same_bits(resident_case(name))


@pytest.mark.parametrize(
    ("recipe", "share"),
    [
        (Recipe("llama"), 0.3),
        (Recipe("t5", clip=None, announced=True), 0.4),
    ],
    ids=lambda value: value.model if isinstance(value, Recipe) else value,
)
def test_any_budget_between_least_and_all_gives_the_same_bits(recipe: Recipe, share: float, tmp_path: Path) -> None:
    lowest = least(recipe, ALL_ON_SSD, tmp_path).host
    resident = train(recipe, RESIDENT)
    most = resident.plan.peak_bytes["host"]  # type: ignore[union-attr]
    assert isinstance(lowest, int)
    host = int(lowest + share * (most - lowest))
    memory = pagoda.Memory(host=host, ssd=f"{tmp_path}:1GiB", unit_limit=UNIT_LIMIT, page_size=PAGE)
    outcome = train(recipe, memory)
    outcome.assert_same_bits(resident)
    assert outcome.peak_bytes["host"] <= host


def test_several_threads_do_not_change_a_bit(tmp_path: Path) -> None:
    """Blocks of one unit are updated at once; torch's own results may depend on the threads it computes with."""
    recipe = Recipe("conv", accumulation=2, steps=3)
    memory = least(recipe, ARENA_ALL_ON_SSD, tmp_path)
    torch.set_num_threads(2)
    reference = train(recipe, RESIDENT)
    train(recipe, memory).assert_same_bits(reference)


@pytest.mark.usefixtures("lanes_keep_up")
@pytest.mark.parametrize(
    ("recipe", "placement"),
    [
        (Recipe("llama", steps=3, layers=6), ARENA_ALL_ON_SSD),
        (Recipe("gpt2", steps=3, checkpointing=True), ALL_ON_SSD),
        (Recipe("qwen3", steps=3, checkpointing=True, layers=6), ARENA_ALL_ON_SSD),
        (Recipe("conv", steps=3), ALL_ON_SSD),  # a module that holds a parameter
    ],
    ids=lambda value: value.model if isinstance(value, Recipe) else value,
)
def test_only_the_first_step_has_faults(recipe: Recipe, placement: str, tmp_path: Path) -> None:
    outcome = train(recipe, least(recipe, placement, tmp_path))
    assert_placed(outcome, placement)
    assert outcome.faults[1:] == [0] * 2


@pytest.mark.usefixtures("lanes_keep_up")
def test_a_trace_has_all_micro_batches_of_a_step_in_the_order_of_their_forwards_and_backwards(tmp_path: Path) -> None:
    """The loop has F F B F B F B B in three steps, and F F F F B B B B in the last two, which makes that the plan."""
    name = "several_forwards_before_their_backwards"
    outcome = run(built(name), squeeze(built(name), ALL_ON_SSD, tmp_path), CASES[name].loop, clip_grad_norm=0.5)
    assert outcome.faults[1:3] == [0, 0]
    assert outcome.plan is not None
    phases = [access.phase for access in outcome.plan.trace.accesses if access.unit == len(outcome.plan.units) // 2]
    assert phases == [Phase.FORWARD] * 4 + [Phase.BACKWARD] * 4


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_gradient_of_several_pieces_does_not_change_a_bit_on_its_way_from_a_device(precision: Precision) -> None:
    """Its pieces take turns in two buffers; the norm is summed piece by piece wherever it comes from."""

    def build() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Linear(BOUNCE_ELEMENTS // 512, 1300)

    def loop(model: torch.nn.Module, optimizer: Any, outcome: Outcome) -> None:
        x = torch.randn(3, BOUNCE_ELEMENTS // 512, generator=torch.Generator().manual_seed(1))
        for backwards in (1, 2, 3):
            for _ in range(backwards):
                model(x.to(model.weight.dtype)).float().square().mean().backward()
            take_step(optimizer, outcome)

    arena = pagoda.Memory(device="cpu:64MiB", host="256MiB")
    outcome = run(build(), arena, loop, precision=precision, clip_grad_norm=0.5)
    outcome.assert_same_bits(run(build(), pagoda.Memory(host="256MiB"), loop, precision=precision, clip_grad_norm=0.5))


@pytest.mark.usefixtures("lanes_keep_up")
def test_a_departure_from_the_trace_faults_and_a_new_habit_is_planned(tmp_path: Path) -> None:
    """Two steps of another order make that order the plan; one does not."""
    model = built("layers_skipped_at_random")
    replanned, faults = [], []
    usual, other = [0, 1, 2, 3, 4, 5, 6, 7], [4, 1, 7, 6, 3, 0, 5, 2]

    def loop(model: torch.nn.Module, optimizer: object, _: Outcome) -> None:
        for picked in (usual, usual, other, other, other):
            model(torch.ones(2, WIDTH), picked).backward()
            optimizer.step()  # type: ignore[attr-defined]
            replanned.append(optimizer.stats.replanned)  # type: ignore[attr-defined]
            faults.append(optimizer.stats.faults)  # type: ignore[attr-defined]

    run(model, squeeze(model, ALL_ON_SSD, tmp_path), loop, clip_grad_norm=1.0)
    assert not replanned[1]
    assert replanned[3]
    assert not replanned[4]
    assert faults[2] > 0
    assert faults[4] < faults[2]


@pytest.mark.parametrize("placement", [ALL_ON_SSD, ARENA])
def test_a_plan_that_is_accepted_has_room_for_parameters_held_by_enclosing_modules(
    placement: str, tmp_path: Path
) -> None:
    def build() -> torch.nn.Module:
        torch.manual_seed(0)
        return Nested(5)

    def loop(model: torch.nn.Module, optimizer: object, outcome: Outcome) -> None:
        for _ in range(2):
            loss = model(torch.ones(2, WIDTH)).float().square().mean()
            loss.backward()
            optimizer.step()  # type: ignore[attr-defined]
            outcome.losses.append(loss.item())

    try:
        memory = squeeze(build(), placement, tmp_path, unit_limit="64KiB")
        outcome = run(build(), memory, loop)
    except pagoda.BudgetError as refused:
        assert refused.needed_bytes is not None, "refused while training, not by the plan"  # noqa: PT017
        return
    outcome.assert_same_bits(run(build(), RESIDENT, loop))
