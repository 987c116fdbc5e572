"""Training has the bits of plain torch with the update's definition, and where training state lives never changes one.

Parameters are fp32 here. `test_experts.py` has the same of bf16 weights with their masters.
"""

import time
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn
from zoo import (
    ALL_ON_SSD,
    ARENA,
    ARENA_ALL_ON_SSD,
    PAGE,
    RESIDENT,
    UNIT_LIMIT,
    Outcome,
    Recipe,
    least,
    run,
    squeeze,
    take_step,
    train,
)

import pagoda
from pagoda.memory.ssd.tier import SSDTier
from pagoda.plan.buffers import BOUNCE_ELEMENTS
from pagoda.plan.trace import Phase

from .loops import CASES, WIDTH, Nested, assert_trained_alike, built, in_memory

# --- plain torch -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "placement"), [(name, (ALL_ON_SSD, ARENA)[number % 2]) for number, name in enumerate(CASES)]
)
def test_unusual_loops_have_the_bits_of_torch_and_do_not_depend_on_placement(
    name: str, placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are read from SSD, or copied to another memory: not both, as these weights take less RAM than what would
    stream them from SSD. One of the drives is slow: what is being written is read."""
    loop, fixed = CASES[name][1], {"lr": 1e-3, "precision": "fp32"}
    resident, by_torch = run(built(name), RESIDENT, loop, **fixed), in_memory(built(name), loop, lr=1e-3)
    assert_trained_alike(resident, by_torch)
    if name == "gradient_penalty":
        return  # needs the weights of all layers at once
    if name == "no_gradient_in_one_micro_batch":
        store = SSDTier.store
        monkeypatch.setattr(SSDTier, "store", lambda *args: (time.sleep(0.002), store(*args))[1])
    memory = squeeze(built(name), placement, tmp_path, precision="fp32", clipping=False)
    outcome = run(built(name), memory, loop, **fixed)
    assert "weight" in outcome.plan.bytes["ssd" if placement == ALL_ON_SSD else "host"]
    outcome.assert_same_bits(resident)


# --- budgets, threads, orders ------------------------------------------------------------------------------


def test_any_budget_between_least_and_all_gives_the_same_bits(tmp_path: Path) -> None:
    recipe = Recipe("t5", steps=3, layers=2, clip=None, announced=True)
    lowest = least(recipe, ALL_ON_SSD, tmp_path).host
    resident = train(recipe, RESIDENT)
    host = int(lowest + 0.4 * (resident.plan.peak_bytes["host"] - lowest))
    memory = pagoda.Memory(host=host, ssd=f"{tmp_path}:1GiB", unit_limit=UNIT_LIMIT, page_size=PAGE)
    outcome = train(recipe, memory)
    outcome.assert_same_bits(resident)
    assert outcome.peak_bytes["host"] <= host


def test_several_threads_do_not_change_a_bit(tmp_path: Path) -> None:
    """Blocks of one unit are updated at once; torch's own results may depend on the threads it computes with."""
    recipe = Recipe("conv", accumulation=2, steps=2)
    memory = least(recipe, ARENA_ALL_ON_SSD, tmp_path)
    torch.set_num_threads(2)
    train(recipe, memory).assert_same_bits(train(recipe, RESIDENT))


@pytest.mark.usefixtures("lanes_keep_up")
@pytest.mark.parametrize(
    ("recipe", "placement"),
    [
        (Recipe("llama", steps=3, layers=6), ARENA_ALL_ON_SSD),
        (Recipe("conv", steps=3, checkpointing=True), ALL_ON_SSD),  # a module that holds a parameter
    ],
    ids=lambda value: value.model if isinstance(value, Recipe) else value,
)
def test_only_the_first_step_has_faults(recipe: Recipe, placement: str, tmp_path: Path) -> None:
    outcome = train(recipe, least(recipe, placement, tmp_path))
    assert "weight" in outcome.plan.bytes["ssd"]
    assert all((moved["h2d"] > 0) == (placement == ARENA_ALL_ON_SSD) for moved in outcome.moved)
    assert outcome.faults[1:] == [0] * 2


@pytest.mark.usefixtures("lanes_keep_up")
def test_a_trace_has_all_micro_batches_of_a_step_in_the_order_of_their_forwards_and_backwards(tmp_path: Path) -> None:
    """The loop has F F B F B F B B in three steps, and F F F F B B B B in the last two, which makes that the plan."""
    name = "several_forwards_before_their_backwards"
    outcome = run(built(name), squeeze(built(name), ALL_ON_SSD, tmp_path), CASES[name][1], max_grad_norm=0.5)
    assert outcome.faults[1:3] == [0, 0]
    phases = [access.phase for access in outcome.plan.trace.accesses if access.unit == len(outcome.plan.units) // 2]
    assert phases == [Phase.FORWARD] * 4 + [Phase.BACKWARD] * 4


@pytest.mark.usefixtures("lanes_keep_up")
def test_a_departure_from_the_trace_faults_and_a_new_habit_is_planned(tmp_path: Path) -> None:
    """Two steps of another order make that order the plan; one does not."""
    model = built("layers_skipped_at_random")
    replanned, faults = [], []
    usual, other = [0, 1, 2, 3, 4, 5, 6, 7], [4, 1, 7, 6, 3, 0, 5, 2]

    def loop(model: nn.Module, optimizer: Any, _: Outcome) -> None:
        for picked in (usual, usual, other, other, other):
            model(torch.ones(2, WIDTH), picked).backward()
            optimizer.step()
            replanned.append(optimizer.stats.replanned)
            faults.append(optimizer.stats.faults)

    run(model, squeeze(model, ALL_ON_SSD, tmp_path), loop, max_grad_norm=1.0)
    assert (replanned[1], replanned[3], replanned[4]) == (False, True, False)
    assert faults[2] > 0
    assert faults[4] < faults[2]


@pytest.mark.parametrize("gradients", [None, "fp32"])
def test_a_gradient_of_several_pieces_does_not_change_a_bit_on_its_way_from_a_device(
    gradients: Literal["fp32"] | None,
) -> None:
    """Several threads add or widen its pieces; the norm is summed piece by piece wherever it comes from."""
    precision = pagoda.MixedPrecision("bf16", gradients)

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(BOUNCE_ELEMENTS // 512, 1300)

    def loop(model: Any, optimizer: Any, outcome: Outcome) -> None:
        x = torch.randn(3, BOUNCE_ELEMENTS // 512, generator=torch.Generator().manual_seed(1))
        for backwards in (1, 2, 3):
            for _ in range(backwards):
                model(x.to(model.weight.dtype)).float().square().mean().backward()
            take_step(optimizer, outcome)

    arena = pagoda.Memory(device="cpu:64MiB", host="256MiB")
    outcome = run(build(), arena, loop, precision=precision, max_grad_norm=0.5)
    outcome.assert_same_bits(run(build(), pagoda.Memory(host="256MiB"), loop, precision=precision, max_grad_norm=0.5))


@pytest.mark.parametrize("placement", [ALL_ON_SSD, ARENA])
def test_a_plan_has_room_for_parameters_that_enclosing_modules_hold(placement: str, tmp_path: Path) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return Nested(5)

    def loop(model: nn.Module, optimizer: Any, outcome: Outcome) -> None:
        for _ in range(2):
            loss = model(torch.ones(2, WIDTH)).float().square().mean()
            loss.backward()
            optimizer.step()
            outcome.losses.append(loss.item())

    try:
        memory = squeeze(build(), placement, tmp_path, unit_limit="64KiB")
        outcome = run(build(), memory, loop)
    except pagoda.BudgetError as refused:
        assert refused.needed_bytes is not None, "refused while training, not by the plan"  # noqa: PT017
        return
    outcome.assert_same_bits(run(build(), RESIDENT, loop))
