"""Leases are scheduled within their frames, in time, and without needless traffic, whatever the trace."""

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from math import inf

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pagoda.plan.ops import Kind, Op
from pagoda.plan.schedule import NextUse, schedule_leases
from pagoda.plan.trace import STEP, Trace, assumed_trace

from .strategies import Draw, traces

PAGE = 4096


@dataclass(frozen=True)
class Problem:
    """What `schedule_leases` is asked."""

    trace: Trace
    pages: dict[int, int]
    updated: frozenset[int]
    capacity: int
    slab: int
    enclosing: dict[int, frozenset[int]] = field(default_factory=dict)

    def schedule(self) -> tuple[Op, ...]:
        lanes = {unit: "h2d" if unit % 2 else "ssd_read" for unit in self.pages}
        return schedule_leases(
            self.trace, self.pages, lanes, self.updated, self.enclosing, self.capacity, self.slab, PAGE
        )

    @property
    def last(self) -> int:
        return len(self.trace.accesses) - 1

    def next_use(self, unit: int, tick: int) -> float:
        """Ticks until this fetch of a unit serves an access; infinite if an update comes first or none comes."""
        for ahead in range(1, self.last + 2):
            access = self.trace.accesses[(tick + ahead) % (self.last + 1)]
            if access == STEP and unit in self.updated:
                return inf
            if access.unit == unit:
                return ahead
        return inf


@st.composite
def problems(draw: Draw, all_fit: bool = False, widest: int = 5) -> Problem:
    units = draw(st.integers(1, 6))
    trace = draw(traces(units))
    leased = draw(st.sets(st.integers(0, units - 1), min_size=1))
    pages = {unit: draw(st.integers(1, widest)) for unit in sorted(leased)}
    slab = max(pages.values())
    capacity = len(pages) * slab if all_fit else draw(st.integers(slab, 2 * sum(pages.values()) + slab))
    return Problem(trace, pages, frozenset(draw(st.sets(st.sampled_from(range(units))))), capacity, slab)


@st.composite
def nested_problems(draw: Draw) -> Problem:
    """Units in units, with frames for what is in use at once and one unit more."""
    problem = draw(problems())
    around: dict[int, frozenset[int]] = {}
    for unit in range(6):
        parent = draw(st.none() | st.integers(0, unit - 1)) if unit else None
        around[unit] = frozenset() if parent is None else around[parent] | {parent}
    in_use = 1 + max(len(units) for units in around.values())
    capacity = draw(st.integers((in_use + 1) * problem.slab, (in_use + 3) * problem.slab))
    return replace(problem, enclosing=around, capacity=capacity)


def held_at_the_start(problem: Problem, ops: tuple[Op, ...]) -> set[int]:
    """The leases a step finds: those it uses or evicts before it fetches them, and those it never mentions."""
    first: dict[int, Kind | None] = {}
    for tick, access in enumerate(problem.trace.accesses):
        for op in (op for op in ops if op.tick == tick):
            first.setdefault(op.unit, op.kind)
        first.setdefault(access.unit, None)
    return {unit for unit, kind in first.items() if unit in problem.pages and kind is not Kind.FETCH}


@given(problems() | nested_problems())
def test_every_access_has_its_lease_and_leases_never_pass_the_frames(problem: Problem) -> None:
    ops = problem.schedule()
    start = held = held_at_the_start(problem, ops)
    for tick, access in enumerate(problem.trace.accesses):
        if access == STEP:
            held = held - problem.updated
        for op in (op for op in ops if op.tick == tick):
            if op.kind is Kind.EVICT:
                assert op.unit in held
                assert op.unit != access.unit, "the unit in use is pinned"
                held = held - {op.unit}
            else:
                assert op.unit not in held
                held = held | {op.unit}
            assert sum(problem.pages[unit] for unit in held) <= problem.capacity
        assert access.unit in held or access.unit not in problem.pages
    assert held == start, "a step leaves the leases that the next one, which runs the same ops, starts with"


@given(nested_problems())
def test_what_is_around_the_unit_in_use_is_never_evicted(problem: Problem) -> None:
    for op in problem.schedule():
        if op.kind is Kind.EVICT:
            assert op.unit not in problem.enclosing.get(problem.trace.accesses[op.tick].unit, ())


@given(problems())
def test_nothing_is_fetched_for_use_after_the_step_that_updates_it(problem: Problem) -> None:
    for op in problem.schedule():
        if op.kind is Kind.FETCH:
            served = problem.trace.accesses[op.tick].unit == op.unit
            assert served or problem.next_use(op.unit, op.tick) < inf


TWO_UNITS_ONE_FRAME = Problem(assumed_trace(range(2)), {0: 1, 1: 1}, frozenset({0, 1}), 1, 1)


@example(TWO_UNITS_ONE_FRAME)
@given(problems())
def test_no_lease_makes_room_for_one_that_is_needed_later(problem: Problem) -> None:
    evicted: list[Op] = []
    for op in problem.schedule():
        if op.kind is Kind.EVICT:
            evicted.append(op)
            continue
        served = problem.trace.accesses[op.tick].unit == op.unit
        needed_in = 0 if served else problem.next_use(op.unit, op.tick)
        for victim in evicted:
            assert victim.tick == op.tick
            assert problem.next_use(victim.unit, op.tick) > needed_in
        evicted.clear()
    assert not evicted, "an eviction makes room for a fetch"


@given(problems(all_fit=True))
def test_where_every_lease_fits_each_is_fetched_once_a_step_at_most(problem: Problem) -> None:
    ops = problem.schedule()
    fetched = [op.unit for op in ops if op.kind is Kind.FETCH]
    used = {access.unit for access in problem.trace.accesses}
    assert len(fetched) == len(set(fetched))
    assert set(fetched) == problem.updated & used & set(problem.pages)
    assert all(op.kind is Kind.FETCH for op in ops)


@given(problems())
def test_ops_say_their_bytes_and_lane_in_the_order_of_their_ticks(problem: Problem) -> None:
    ops = problem.schedule()
    assert [op.tick for op in ops] == sorted(op.tick for op in ops)
    for op in ops:
        assert op.lane == ("h2d" if op.unit % 2 else "ssd_read")
        assert op.nbytes == (problem.pages[op.unit] * PAGE if op.kind is Kind.FETCH else 0)


def lru_fetches(problem: Problem) -> int:
    """Fetches of one cycle, on demand and by least recent use, of units of one page each."""
    cache: OrderedDict[int, None] = OrderedDict()
    for _ in range(4):
        fetches = 0
        for access in problem.trace.accesses:
            if access == STEP:
                for unit in problem.updated & cache.keys():
                    del cache[unit]
            elif access.unit in problem.pages:
                if access.unit not in cache:
                    fetches += 1
                    if len(cache) == problem.capacity:
                        cache.popitem(last=False)
                cache[access.unit] = None
                cache.move_to_end(access.unit)
    return fetches


@example(TWO_UNITS_ONE_FRAME)
@given(problems(widest=1))
def test_prefetching_never_costs_more_fetches_than_least_recent_use_would(problem: Problem) -> None:
    fetched = sum(op.kind is Kind.FETCH for op in problem.schedule())
    assert fetched <= lru_fetches(problem)


@given(traces(4), st.integers(0, 4), st.data())
def test_the_next_use_is_the_nearest_one_around_the_cycle(trace: Trace, unit: int, data: st.DataObject) -> None:
    tick = data.draw(st.integers(0, len(trace.accesses) - 1))
    twice = [access.unit for access in trace.accesses * 2]
    found = NextUse(trace).after(unit, tick)
    assert found == (twice.index(unit, tick + 1) - tick if unit in twice else inf)


def test_memory_below_the_largest_lease_is_refused() -> None:
    problem = Problem(assumed_trace(range(2)), {0: 1, 1: 3}, frozenset(), 2, 3)
    with pytest.raises(ValueError, match="2 frames cannot hold a slab of 3"):
        problem.schedule()


def test_nothing_is_scheduled_where_nothing_is_leased() -> None:
    assert Problem(assumed_trace(range(2)), {}, frozenset(), 0, 0).schedule() == ()
