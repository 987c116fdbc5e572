"""What the scheduler decides where several ranks must fetch alike."""

import random
from dataclasses import replace
from typing import Any

import pytest

from pagoda.plan.trace import STEP, Access, Phase, Trace
from pagoda.schedule.operations import Ask, Fetch, Operation, Outdate, Request, SchedulePlan, Share, UnitPlan, Update
from pagoda.schedule.scheduler import Scheduler

from .at_once import end, end_all, units_of

UNITS = range(4)


def of_ranks(frames: int = 0, during_backward: bool = False, **unit: Any) -> Scheduler:
    """Units that are used in their order and back."""
    uses = [Access(u, Phase.FORWARD) for u in UNITS] + [Access(u, Phase.BACKWARD) for u in reversed(UNITS)]
    units = [UnitPlan(lease_frames=min(frames, 1), **unit) for _ in UNITS]
    plan = SchedulePlan(units, Trace((*uses, STEP)), frame_pool=frames, ranks_fetch_alike=True)
    return Scheduler(replace(plan, during_backward=during_backward))


def request_update(scheduler: Scheduler) -> dict[type[Operation], Operation]:
    """Of unit 0, in a step of its own; what is under way then."""
    scheduler.gradient(0, complete=True, last=True)
    end_all(scheduler, updates=False)
    scheduler.end_step()
    begun = {type(op): op for op in scheduler.take() if op.unit == 0}
    if (question := begun.get(Outdate)) is not None:  # of the old weights
        end(scheduler, question)
    return begun | {type(op): op for op in scheduler.take() if op.unit == 0}


def use(scheduler: Scheduler, unit: int) -> list[Operation]:
    scheduler.access(Access(unit, Phase.FORWARD))
    return scheduler.take()


def without_room_for_unit_0(**unit: Any) -> Scheduler:
    """Until compute leaves units 1 and 2."""
    scheduler = of_ranks(frames=2, **unit)
    for unit_in_use in (2, 1):
        scheduler.access(Access(unit_in_use, Phase.BACKWARD))
        end_all(scheduler)
    return scheduler


def fetch_of_unit_0(scheduler: Scheduler) -> Fetch:
    """Compute leaves the units that were in its way."""
    scheduler.release(2)
    operations = end_all(scheduler, but=Fetch)
    (fetch,) = (op for op in operations if isinstance(op, Fetch) and op.unit == 0)
    return fetch


def test_weights_that_another_rank_reads_are_not_updated() -> None:
    scheduler = of_ranks()
    scheduler.others_read(0, begin=True)
    assert Update not in request_update(scheduler)
    scheduler.others_read(0, begin=False)
    assert units_of(Update, scheduler.take()) == [0]


def test_another_rank_reads_the_weights_before_a_speculative_update() -> None:
    scheduler = of_ranks(speculated=True)
    scheduler.gradient(0, complete=True, last=True)
    assert units_of(Update, end_all(scheduler)) == [0]
    scheduler.others_read(0, begin=True)
    assert scheduler.usage.called_off == 1


def test_all_that_has_frames_is_fetched_whether_or_not_the_fetches_before_have_ended() -> None:
    assert units_of(Fetch, use(of_ranks(frames=4), 0)) == [0, 1, 2, 3]


def test_a_fetch_is_issued_before_the_update_that_it_waits_for_which_does_not_wait_for_it() -> None:
    scheduler = of_ranks(frames=4)
    scheduler.others_read(0, begin=True)
    fetch = request_update(scheduler)[Fetch]
    assert fetch.lease.version == 1
    assert fetch.awaited.unit == 0
    scheduler.others_read(0, begin=False)
    assert units_of(Update, scheduler.take()) == [0]


def test_a_fetch_waits_for_the_parts_of_an_update_that_other_ranks_make() -> None:
    scheduler = without_room_for_unit_0(shared=True)
    begun = request_update(scheduler)
    end(scheduler, begun[Update])
    assert fetch_of_unit_0(scheduler).awaited.unit == 0


def test_weights_in_their_home_are_not_read_before_other_ranks_parts_are_there() -> None:
    scheduler = of_ranks(shared=True)
    begun = request_update(scheduler)
    end(scheduler, begun[Update])
    use(scheduler, 0)
    assert not scheduler.ready(0)
    scheduler.ended(begun[Share])
    assert scheduler.ready(0)


def test_a_drain_waits_for_other_ranks_parts() -> None:
    scheduler = of_ranks(shared=True)
    begun = request_update(scheduler)
    end(scheduler, begun[Update])
    assert not scheduler.drained
    scheduler.ended(begun[Share])
    assert scheduler.drained


def test_an_update_is_final_whether_or_not_this_ranks_fetch_has_ended() -> None:
    scheduler = of_ranks(frames=4, during_backward=True)
    first, *_ = use(scheduler, 0)
    scheduler.issued(first)
    scheduler.release(0)
    scheduler.gradient(0, complete=True, last=True)
    (question,) = (op for op in scheduler.take() if isinstance(op, Ask))
    scheduler.reclaimed(question, freed=True)
    assert units_of(Request, scheduler.take()) == [0]


def test_a_fetch_calls_a_speculative_update_off_and_does_not_wait_for_it() -> None:
    scheduler = without_room_for_unit_0(speculated=True)
    scheduler.gradient(0, complete=True, last=True)
    end_all(scheduler)
    assert scheduler.weights(0).speculative is not None
    assert fetch_of_unit_0(scheduler).awaited is None
    assert scheduler.weights(0).speculative is None


@pytest.mark.parametrize("seed", range(20))
def test_ranks_fetch_and_evict_alike_however_fast_their_lanes_are(seed: int) -> None:
    """The fetches of one end at once, those of the other when compute waits for them. Uses are nested and come in any
    order."""

    def decided(at_once: bool) -> list[tuple[type[Operation], int]]:
        rng, scheduler, told = random.Random(seed), of_ranks(frames=3), []
        late: list[Operation] = []

        def collect() -> None:
            while new := scheduler.take():
                told.extend((type(op), op.unit) for op in new)
                late.extend(op for op in new if isinstance(op, Fetch))
                for op in new:
                    if not isinstance(op, Fetch):
                        end(scheduler, op)
                if at_once:
                    end_first(len(late))

        def end_first(count: int) -> None:
            for op in [late.pop(0) for _ in range(count)]:
                end(scheduler, op)

        for _ in range(40):
            nested = rng.sample(UNITS, rng.choice([1, 1, 2]))
            for unit in nested:
                scheduler.access(Access(unit, Phase.FORWARD))
                collect()
                while not scheduler.ready(unit):
                    end_first(1)
                    collect()
            for unit in nested:
                scheduler.release(unit)
                collect()
            if rng.random() < 0.1:
                scheduler.end_step()
                collect()
        return told

    assert decided(at_once=True) == decided(at_once=False)
