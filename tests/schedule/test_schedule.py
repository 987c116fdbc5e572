"""The scheduler in random worlds: whatever the order of events, no wrong bit, no lost gradient, no endless wait."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pagoda.plan.trace import STEP, Access, Phase, Trace
from pagoda.schedule.operations import Kind, Operation, SchedulePlan, UnitPlan
from pagoda.schedule.scheduler import Scheduler

from . import worlds
from .at_once import end_all, units_of
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
    assert noticed(mutant) is not None


@pytest.mark.parametrize("mutant", MUTANTS[:3], ids=lambda mutant: mutant.breaks)
def test_random_worlds_soon_notice_a_rule_of_leases_that_is_broken(mutant: Mutant) -> None:
    assert noticed(replace(mutant, worlds=500)) is not None


def test_the_same_events_give_the_same_operations() -> None:
    """Nothing depends on addresses, clocks or the order of sets."""

    def told(seed: int) -> list[str]:
        world = worlds.World(seed, log=True)
        world.run()
        return world.log or []

    assert [told(seed) for seed in range(20)] == [told(seed) for seed in range(20)]


def plan(frames: int, **unit: Any) -> SchedulePlan:
    units = range(4)
    uses = [Access(u, Phase.FORWARD) for u in units] + [Access(u, Phase.BACKWARD) for u in reversed(units)]
    return SchedulePlan([UnitPlan(lease_frames=1, **unit) for _ in units], Trace((*uses, STEP)), frame_pool=frames)


def a_step(scheduler: Scheduler, units: Sequence[int] = range(4), experts: Sequence[int] = ()) -> list[Operation]:
    """Units are used in this order and back, and `experts` are announced with the first."""
    for phase, order in ((Phase.FORWARD, units), (Phase.BACKWARD, units[::-1])):
        for unit in order:
            scheduler.access(Access(unit, phase))
            end_all(scheduler)
            if phase is Phase.BACKWARD:
                scheduler.gradient(unit, complete=True, last=True)
            elif unit == 0:
                scheduler.expect(experts)
            scheduler.release(unit)
            end_all(scheduler)
    scheduler.end_step()
    return end_all(scheduler)


def test_after_speculative_updates_that_stand_the_next_forward_is_fetched_ahead() -> None:
    scheduler = Scheduler(plan(frames=4, speculated=True))
    assert units_of(Kind.FETCH, a_step(scheduler)) == [0, 1, 2, 3]


def test_a_prefetch_that_fails_is_not_tried_until_compute_waits_for_it() -> None:
    scheduler = Scheduler(plan(frames=4))
    failing, second = scheduler.take() or run_first(scheduler)
    scheduler.failed(second)
    scheduler.ended(failing)
    assert second.unit not in units_of(Kind.FETCH, end_all(scheduler))
    scheduler.release(0)
    scheduler.access(Access(second.unit, Phase.FORWARD))
    assert second.unit in units_of(Kind.FETCH, end_all(scheduler))
    assert scheduler.ready(second.unit)


def test_no_fetch_starts_when_another_rank_has_a_gradient_since_each_rank_hears_of_it_at_another_point() -> None:
    scheduler = Scheduler(replace(plan(frames=4), ranks_fetch_alike=True))
    scheduler.reduce(0, here=False)
    assert [op.kind for op in scheduler.take()] == [Kind.OFFLOAD]


def test_gradients_that_ranks_have_yet_to_add_up_leave_room_for_those_of_other_ranks_that_come_before() -> None:
    units = [UnitPlan(buffer_pages=1) for _ in range(4)]
    scheduler = Scheduler(SchedulePlan(units, plan(frames=0).trace, buffer_pool=2, ranks_fetch_alike=True))
    scheduler.gradient(3, complete=True, last=True, reduced=True)
    scheduler.gradient(2, complete=True, last=True, reduced=True)
    offloaded = []
    for unit, here in ((1, False), (0, False), (3, True), (2, True)):
        scheduler.reduce(unit, here)
        assert not scheduler.buffers_exhausted
        offloaded += units_of(Kind.OFFLOAD, end_all(scheduler))
    assert offloaded == [1, 0, 3, 2]
    scheduler.end_step()
    assert units_of(Kind.UPDATE, end_all(scheduler)) == [0, 1, 2, 3]


def run_first(scheduler: Scheduler) -> list[Operation]:
    scheduler.access(Access(0, Phase.FORWARD))
    return scheduler.take()


def with_experts() -> Scheduler:
    """Unit 0 is followed by two of the experts 1 to 3. Frames are for four units."""
    units = [UnitPlan(lease_frames=1, routed=unit > 0) for unit in range(4)]
    return Scheduler(SchedulePlan(units, plan(frames=4).trace, frame_pool=4))


def test_experts_are_fetched_when_a_router_has_chosen_them() -> None:
    scheduler = with_experts()
    scheduler.access(Access(0, Phase.FORWARD))
    (first,) = scheduler.take()
    scheduler.ended(first)
    assert scheduler.take() == []
    scheduler.expect([3, 1])
    assert units_of(Kind.FETCH, scheduler.take()) == [3, 1]


def test_experts_that_every_step_uses_alike_are_fetched_ahead_of_their_router() -> None:
    scheduler = with_experts()
    for _ in range(4):
        ahead = units_of(Kind.FETCH, a_step(scheduler, units=(0, 1, 2), experts=(1, 2)))
    assert ahead == [0, 1, 2]


def test_nothing_is_speculated_on_while_updates_are_drained() -> None:
    scheduler = Scheduler(plan(frames=4, speculated=True))
    (first, _) = run_first(scheduler)
    scheduler.ended(first)
    scheduler.gradient(0, complete=True, last=True)
    scheduler.release(0)
    scheduler.drain(True)
    assert Kind.UPDATE not in {op.kind for op in end_all(scheduler)}
    assert scheduler.updates.drained


def test_an_update_that_is_called_off_and_then_refused_counts_once_as_undone() -> None:
    scheduler = Scheduler(plan(frames=4, speculated=True))
    scheduler.gradient(0, complete=True, last=True)
    end_all(scheduler, updates=False)
    update = scheduler.weights(0).update
    scheduler.drop_gradients()
    assert update is not None
    scheduler.refused(Operation(Kind.UPDATE, 0, about=update))
    assert scheduler.usage.undone == 1


def begun_checkpoint() -> tuple[Scheduler, list[Operation], Operation]:
    """Of four units that are updated during backward; the reserve has room for one. Two SAVEs are under way, and an
    UPDATE of another unit, which has begun to keep its old states there."""
    units = [UnitPlan(old_state_pages=1) for _ in range(4)]
    scheduler = Scheduler(replace(plan(frames=0), units=units, reserve_pages=1, during_backward=True))
    scheduler.prepare_checkpoint()
    assert scheduler.updates.prepared
    scheduler.begin_checkpoint()
    saves = [op for op in scheduler.take() if op.kind is Kind.SAVE]
    update = updated(scheduler, min({*range(4)} - {op.unit for op in saves}))
    assert update.run is not None
    return scheduler, saves, update


def saved(scheduler: Scheduler, saves: list[Operation]) -> list[tuple[int, Any]]:
    """What is saved once these SAVEs have ended: units, and where the reserve has kept their states."""
    for op in saves:
        scheduler.ended(op)
    return [(op.unit, op.run) for op in scheduler.take() if op.kind is Kind.SAVE]


def updated(scheduler: Scheduler, unit: int) -> Operation:
    """The UPDATE of a unit, once its gradient has come and nothing refers to it."""
    scheduler.gradient(unit, complete=True, last=True)
    (update,) = (op for op in end_all(scheduler, updates=False) if op.kind is Kind.UPDATE and op.unit == unit)
    return update


def test_states_that_were_not_overwritten_after_all_are_saved_from_their_home() -> None:
    scheduler, saves, update = begun_checkpoint()
    scheduler.refused(update)
    assert (update.unit, None) in saved(scheduler, saves)


def test_a_refused_update_leaves_what_another_has_kept() -> None:
    """Of two updates of a unit, the first has kept what a checkpoint has yet to read, and the second is refused."""
    scheduler, saves, update = begun_checkpoint()
    scheduler.old_states_kept(update)
    scheduler.gradient_used(update)
    scheduler.weights_written(update)
    scheduler.ended(update)
    scheduler.end_step()
    second = updated(scheduler, update.unit)
    assert second.run is None
    scheduler.refused(second)
    assert (update.unit, update.run) in saved(scheduler, saves)


def test_a_checkpoint_is_lost_with_an_update_that_fails() -> None:
    """Even if it has kept the old states: it may have failed while it copied them."""
    scheduler, _, update = begun_checkpoint()
    assert not scheduler.checkpoint.lost
    scheduler.failed(update)
    assert scheduler.checkpoint.lost


def test_no_later_update_overtakes_one_that_a_checkpoint_lacks() -> None:
    """It might wait, in the same lane, for room that only the complete checkpoint gives back."""
    scheduler = Scheduler(replace(plan(frames=0), units=[UnitPlan() for _ in range(4)]))

    def step_of(*units: int) -> list[int]:
        for unit in units:
            scheduler.gradient(unit, complete=True, last=True)
            end_all(scheduler)
        scheduler.end_step()
        return units_of(Kind.UPDATE, end_all(scheduler))

    scheduler.access(Access(1, Phase.FORWARD))
    assert step_of(0, 1) == [0]  # compute still uses the other one
    scheduler.prepare_checkpoint()
    scheduler.begin_checkpoint()
    end_all(scheduler)
    assert step_of(0) == []
    scheduler.release(1)
    assert units_of(Kind.UPDATE, end_all(scheduler)) == [1, 0]


def test_an_update_does_not_write_over_what_other_ranks_still_collect() -> None:
    scheduler = Scheduler(replace(plan(frames=0), units=[UnitPlan(shared=True)]))

    def request_update() -> list[Operation]:
        """With a gradient that only other ranks have made."""
        scheduler.reduce(0, here=False)
        (offload,) = scheduler.take()
        scheduler.ended(offload)
        scheduler.end_step()
        return scheduler.take()

    first = {operation.kind: operation for operation in request_update()}
    assert first.keys() == {Kind.SHARE, Kind.UPDATE}
    scheduler.gradient_used(first[Kind.UPDATE])
    scheduler.weights_written(first[Kind.UPDATE])
    scheduler.ended(first[Kind.UPDATE])
    assert [operation.kind for operation in request_update()] == [Kind.SHARE]
    scheduler.ended(first[Kind.SHARE])
    assert [operation.kind for operation in scheduler.take()] == [Kind.UPDATE]
