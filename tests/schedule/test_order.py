"""Which gradient makes room and which update comes next, where several could."""

import sys
from itertools import groupby
from typing import Any

from hypothesis import given, strategies as st

from pagoda.plan.trace import STEP, Access, Phase, Trace
from pagoda.schedule.experts import Chosen
from pagoda.schedule.operations import Offload, Operation, SchedulePlan, Spill, UnitPlan, Update
from pagoda.schedule.order import Order
from pagoda.schedule.scheduler import Scheduler

from .at_once import end, end_all, units_of

UNITS = range(5)


def scheduler(buffer_pages: int = 0, **plan: bool) -> Scheduler:
    """Units that are used in their order and back; where their gradients share buffers, two have room."""
    uses = [Access(u, Phase.FORWARD) for u in UNITS] + [Access(u, Phase.BACKWARD) for u in reversed(UNITS)]
    units = [UnitPlan(buffer_pages=buffer_pages) for _ in UNITS]
    return Scheduler(SchedulePlan(units, Trace((*uses, STEP)), buffer_pool=2 * buffer_pages, **plan))


def make(scheduler: Scheduler, unit: int, complete: bool = True) -> list[Operation]:
    """Backward makes a gradient; returns what is done then, all of which has ended."""
    scheduler.gradient(unit, complete=complete, last=complete)
    return end_all(scheduler, updates=False)


def kinds(operations: list[Operation]) -> list[tuple[type[Operation], int]]:
    return [(type(op), op.unit) for op in operations]


def step(scheduler: Scheduler) -> list[Operation]:
    scheduler.end_step()
    return scheduler.take()


# --- gradients ---------------------------------------------------------------------------------------------


def test_a_complete_gradient_is_written_to_ssd_at_once_and_the_oldest_makes_room_first() -> None:
    of = scheduler(buffer_pages=1)
    runs = []
    for unit in (1, 0, 2, 3):
        assert kinds(make(of, unit)) == [(Offload, unit), (Spill, unit)]
        runs.append(record.run if (record := of.gradient_of(unit)) else None)
    assert runs[2:] == runs[:2]


def test_an_incomplete_gradient_is_written_to_ssd_only_when_its_buffer_is_needed() -> None:
    of = scheduler(buffer_pages=1)
    assert kinds(make(of, 4, complete=False)) == [(Offload, 4)]
    assert kinds(make(of, 3, complete=False)) == [(Offload, 3)]
    assert kinds(make(of, 2, complete=False)) == [(Spill, 4), (Offload, 2)]


def test_a_gradient_that_is_used_before_others_need_its_buffer_does_not_come_back_from_ssd() -> None:
    of = scheduler(buffer_pages=1)
    for unit in (1, 0):
        make(of, unit)
    assert kinds(step(of)) == [(Update, 0), (Update, 1)]


def test_without_ssd_a_gradient_waits_for_ever_where_no_buffer_is_complete() -> None:
    of = scheduler(buffer_pages=1, spills=False)
    for unit in (4, 3):
        make(of, unit, complete=False)
    assert make(of, 2, complete=False) == []
    assert of.gradients.buffer_awaited
    assert of.idle, "so the caller knows that it waits for ever"


# --- updates -----------------------------------------------------------------------------------------------


def test_updates_come_in_the_order_in_which_forward_needs_them() -> None:
    of = scheduler()
    for unit in reversed(UNITS):
        make(of, unit)
    first = step(of)
    assert units_of(Update, first) == [0, 1], "two at once, so that the ring of buffers never runs empty"
    for op in first:
        end(of, op)
    assert units_of(Update, end_all(of)) == [2, 3, 4]


def test_the_update_that_compute_waits_for_comes_next() -> None:
    of = scheduler()
    for unit in reversed(UNITS):
        make(of, unit)
    first, _ = step(of)
    of.access(Access(4, Phase.FORWARD))
    assert of.weights(4).await_update
    end(of, first)
    assert units_of(Update, of.take()) == [4]


def test_an_update_whose_gradient_has_not_arrived_does_not_hold_up_others() -> None:
    of = scheduler(during_backward=True)
    of.gradient(4, complete=True, last=True)
    question, offload = of.take()
    of.reclaimed(question, freed=True)
    assert units_of(Update, of.take()) == []
    assert units_of(Update, make(of, 3)) == [3]
    of.ended(offload)
    assert units_of(Update, of.take()) == [4]


# --- the trace ---------------------------------------------------------------------------------------------

accesses = st.builds(Access, st.sampled_from(UNITS), st.sampled_from([Phase.FORWARD, Phase.BACKWARD]))


@given(st.lists(st.lists(accesses, min_size=1, max_size=20), min_size=1, max_size=3))
def test_a_step_that_comes_twice_is_the_trace_with_repeats_in_a_row_counted_once(steps: list[list[Access]]) -> None:
    order = Order(Trace((STEP,)), len(UNITS), frozenset())
    for each in steps:
        for _ in range(2):
            for access in each:
                order.access(access, recorded=True)
            order.end_step()
        assert order.trace.accesses == (*(access for access, _ in groupby(each)), STEP)


class ChosenAnew:
    """`Chosen` as it is defined: at each use, the units that are left."""

    def __init__(self) -> None:
        self.coming: list[int] = []
        self.together: dict[int, list[int]] = {}
        self.using: int | None = None

    def announce(self, units: list[int]) -> None:
        self.coming = [*dict.fromkeys(units)]
        self.together |= dict.fromkeys(units, units)

    def used(self, unit: int, backward: bool) -> bool:
        if unit == self.using or not self.together:
            return False
        self.using = unit
        if unit in self.coming:
            self.coming = self.coming[self.coming.index(unit) + 1 :]
        elif backward and unit in self.together:
            chosen = self.together[unit]
            self.coming = [*dict.fromkeys(chosen[: chosen.index(unit)][::-1])]
            return True
        else:
            self.coming = []
        return False


@given(st.lists(st.lists(st.integers(0, 8), max_size=6) | st.tuples(st.integers(0, 8), st.booleans()), max_size=40))
def test_coming_experts_are_those_after_the_last_use(events: list[list[int] | tuple[int, bool]]) -> None:
    chosen, anew = Chosen(), ChosenAnew()
    for event in events:
        if isinstance(event, list):
            chosen.announce(event)
            anew.announce(event)
        else:
            assert chosen.used(*event) == anew.used(*event)
        assert chosen.coming == anew.coming
        assert [chosen.place(unit) for unit in anew.coming] == [*range(1, len(anew.coming) + 1)]
        assert not any(chosen.place(unit) for unit in range(9) if unit not in anew.coming)


def _lines_of_uses(experts: int) -> int:
    """Lines of Python for each use of an expert, of so many that a router has chosen."""
    chosen, lines = Chosen(), 0
    chosen.announce([*range(experts)])

    def count(_frame: object, what: str, _argument: object) -> Any:
        nonlocal lines
        lines += what == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        for unit in range(experts):
            chosen.used(unit, backward=False)
    finally:
        sys.settrace(before)
    return lines // experts


def test_a_use_of_an_expert_costs_the_same_whatever_their_number() -> None:
    assert _lines_of_uses(512) == _lines_of_uses(64)
