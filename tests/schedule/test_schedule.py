"""The scheduler in random worlds: whatever the order of events, no wrong bit, no lost gradient, no endless wait."""

import pytest

from pagoda.plan.trace import STEP, Access, Phase, Trace
from pagoda.schedule.operations import Kind, Operation, SchedulePlan, UnitPlan
from pagoda.schedule.scheduler import Scheduler

from . import worlds
from .mutants import MUTANTS, Mutant, noticed

BATCH = 50


@pytest.mark.parametrize("first", range(0, 500, BATCH))
def test_random_worlds_hold(first: int) -> None:
    assert [wrong for seed in range(first, first + BATCH) if (wrong := worlds.run(seed))] == []


@pytest.mark.slow
@pytest.mark.parametrize("first", range(500, 20_000, 500))
def test_more_random_worlds_hold(first: int) -> None:
    assert [wrong for seed in range(first, first + 500) if (wrong := worlds.run(seed))] == []


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.breaks)
def test_random_worlds_notice_a_broken_rule(mutant: Mutant) -> None:
    assert noticed(mutant, 5000) is not None


@pytest.mark.parametrize("mutant", MUTANTS[:3], ids=lambda mutant: mutant.breaks)
def test_random_worlds_soon_notice_a_rule_of_leases_that_is_broken(mutant: Mutant) -> None:
    assert noticed(mutant, 500) is not None


def test_the_same_events_give_the_same_operations() -> None:
    """Nothing depends on addresses, clocks or the order of sets."""

    def told(seed: int) -> list[str]:
        world = worlds.World(seed, log=True)
        world.run()
        return world.log or []

    assert [told(seed) for seed in range(20)] == [told(seed) for seed in range(20)]


def plan(frames: int, sizes: tuple[int, ...] = (1, 1, 1, 1)) -> SchedulePlan:
    units = range(len(sizes))
    uses = [Access(u, Phase.FORWARD) for u in units] + [Access(u, Phase.BACKWARD) for u in reversed(units)]
    return SchedulePlan([UnitPlan(frames=size) for size in sizes], Trace((*uses, STEP)), frames=frames)


def fetched(operations: list[Operation]) -> list[int]:
    return [op.unit for op in operations if op.kind is Kind.FETCH]


def test_units_are_fetched_in_the_order_of_their_use_before_they_are_asked_for() -> None:
    scheduler = Scheduler(plan(frames=4))
    scheduler.access(Access(0, Phase.FORWARD))
    begun = scheduler.take()
    assert fetched(begun) == [0, 1]
    scheduler.ended(begun[0])
    assert scheduler.ready(0)
    assert fetched(scheduler.take()) == [2]


def test_the_unit_that_is_used_last_makes_room() -> None:
    """Forward is at unit 3, and backward begins there: unit 0 is what backward needs last."""
    scheduler = Scheduler(plan(frames=3))
    evicted = []
    for unit in (0, 1, 2, 3):
        scheduler.access(Access(unit, Phase.FORWARD))
        while not scheduler.ready(unit):
            for op in scheduler.take():
                if op.kind is Kind.RECLAIM:
                    evicted.append(op.unit)
                    scheduler.reclaimed(op, freed=True)
                else:
                    scheduler.ended(op)
        scheduler.release(unit)
    assert evicted == [0]
