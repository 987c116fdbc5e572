"""Leases are fetched in time and without needless traffic, whatever the trace, where every operation ends at once; and
each has frames in a row, where runs in use block only the slabs that they touch."""

import random
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

from pagoda.memory.page import PageRun
from pagoda.memory.pool import PagePool
from pagoda.plan.trace import STEP, NextUse, Trace, assumed_trace, gradients_of
from pagoda.schedule.frames import Frames
from pagoda.schedule.operations import Evict, Fetch, Operation, Outdate, SchedulePlan, UnitPlan, Update
from pagoda.schedule.scheduler import Scheduler
from tests.plan.strategies import Draw, traces

from .at_once import end, end_all, units_of

UNITS = 6
STEPS = 4
"""Steps played; the last is the steady state."""


@dataclass(frozen=True)
class Problem:
    """Leases that a scheduler has to make room for."""

    trace: Trace
    pages: dict[int, int]
    updated: frozenset[int]
    capacity: int

    def next_use(self, unit: int, tick: int) -> float:
        """Ticks until a lease of a unit serves an access after `tick`; infinite if an update comes first."""
        ahead = NextUse(self.trace).after(unit, tick)
        last = len(self.trace.accesses) - 1
        return inf if unit in self.updated and tick < last < tick + ahead else ahead


@st.composite
def problems(draw: Draw, all_fit: bool = False, widest: int = 5) -> Problem:
    units: Any = draw(st.integers(1, UNITS))
    trace: Any = draw(traces(units))
    leased: Any = draw(st.sets(st.integers(0, units - 1), min_size=1))
    pages: Any = {unit: draw(st.integers(1, widest)) for unit in sorted(leased)}
    slab = max(pages.values())
    capacity: Any = len(pages) * slab if all_fit else draw(st.integers(2 * slab, 2 * sum(pages.values()) + 2 * slab))
    updated: Any = draw(st.sets(st.sampled_from(range(units))))
    return Problem(trace, pages, frozenset(updated), capacity)


class Player:
    """Plays steps of a problem; every operation ends as soon as it is asked for."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        units = [
            UnitPlan(lease_frames=problem.pages.get(unit, 0), trained=unit in problem.updated) for unit in range(UNITS)
        ]
        self.scheduler = Scheduler(SchedulePlan(units, problem.trace, frame_pool=problem.capacity))
        self.moves: list[tuple[int, type[Operation], int]] = []
        """(tick, FETCH or EVICT, unit) of the last step; those of `step()` have the tick of STEP."""
        self.used: int | None = None
        """The unit in use."""
        self._tick = 0

    def step(self) -> None:
        self.moves = []
        gradients = gradients_of(self.problem.trace, self.problem.updated)
        for tick, access in enumerate(self.problem.trace.accesses[:-1]):
            self._tick = tick
            self._release()
            self.used = access.unit
            self.scheduler.access(access)
            self._execute()
            assert self.scheduler.ready(access.unit)
            for gradient in (gradient for gradient in gradients if gradient.tick == tick):
                self.scheduler.gradient(gradient.unit, complete=True, last=gradient.last)
                self._execute()
        self._release()
        self._tick += 1
        self.scheduler.end_step()
        self._execute()
        assert self.scheduler.idle

    def _release(self) -> None:
        if self.used is not None:
            self.scheduler.release(self.used)
            self._execute()
        self.used = None

    def _execute(self) -> None:
        for operation in end_all(self.scheduler):
            if type(operation) in (Fetch, Evict):
                self.moves.append((self._tick, type(operation), operation.unit))
            assert not isinstance(operation, Evict) or operation.unit != self.used
        assert self.scheduler.leases.frames.in_use <= self.problem.capacity


def played(problem: Problem) -> Player:
    player = Player(problem)
    for _ in range(STEPS):
        player.step()
    return player


def before_step(problem: Problem, player: Player) -> list[tuple[int, type[Operation], int]]:
    """What was moved before `step()` and its updates."""
    return [move for move in player.moves if move[0] < len(problem.trace.accesses) - 1]


@settings(deadline=None)
@given(problems())
def test_nothing_is_fetched_for_use_after_the_step_that_updates_it(problem: Problem) -> None:
    for tick, kind, unit in before_step(problem, played(problem)):
        if kind is Fetch:
            assert problem.trace.accesses[tick].unit == unit or problem.next_use(unit, tick) < inf


@settings(deadline=None)
@given(problems())
def test_no_lease_makes_room_for_one_that_is_needed_later(problem: Problem) -> None:
    evicted: list[int] = []
    for tick, kind, unit in before_step(problem, played(problem)):
        if kind is Evict:
            evicted.append(unit)
            continue
        needed_in = 0 if problem.trace.accesses[tick].unit == unit else problem.next_use(unit, tick)
        assert all(problem.next_use(victim, tick) > needed_in for victim in evicted)
        evicted.clear()
    assert not evicted, "an eviction makes room for a fetch"


def test_what_is_used_later_does_not_overtake_what_waits_for_its_update() -> None:
    """It would take the frames, and compute would find that nothing has been done for what it needs first."""
    problem = Problem(assumed_trace(range(2)), {0: 1, 1: 1}, frozenset({0, 1}), 2)
    scheduler = played(problem).scheduler
    for access in problem.trace.accesses[:-1]:
        scheduler.access(access)
        scheduler.release(access.unit)
    for unit in (1, 0):
        scheduler.gradient(unit, complete=True, last=True)
    for operation in scheduler.take():
        scheduler.ended(operation)
    scheduler.end_step()
    operations = scheduler.take()
    for operation in operations:
        if isinstance(operation, Outdate):
            scheduler.reclaimed(operation, freed=True)
    first, second = (operation for operation in operations if isinstance(operation, Update))
    assert (first.unit, second.unit) == (0, 1)
    fetched = []
    for update in (second, first):
        end(scheduler, update)
        fetched.append(units_of(Fetch, scheduler.take()))
    assert fetched == [[], [0, 1]]


@settings(deadline=None)
@given(problems(all_fit=True))
def test_where_every_lease_fits_each_is_fetched_once_after_its_update(problem: Problem) -> None:
    fetched = [unit for _, kind, unit in played(problem).moves if kind is Fetch]
    used = {access.unit for access in problem.trace.accesses}
    assert len(fetched) == len(set(fetched))
    assert set(fetched) == problem.updated & used & set(problem.pages)


def lru_fetches(problem: Problem) -> int:
    """Fetches of one step, on demand and by least recent use, of units of one page each."""
    cache: OrderedDict[int, None] = OrderedDict()
    for _ in range(STEPS):
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


@example(Problem(assumed_trace(range(3)), {0: 1, 1: 1, 2: 1}, frozenset({0, 1, 2}), 2))
@settings(deadline=None)
@given(problems(widest=1))
def test_prefetching_never_costs_more_fetches_than_least_recent_use_would(problem: Problem) -> None:
    fetched = sum(kind is Fetch for _, kind, _ in played(problem).moves)
    assert fetched <= lru_fetches(problem)


def test_room_for_a_small_lease_costs_the_same_however_many_share_its_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slab is as large as the largest unit, which may be as large as a hundred experts."""
    looked_at = 0
    tiles = PagePool.tiles

    def counted(pool: PagePool, start: int, stop: int) -> Iterator[tuple[PageRun, bool]]:
        nonlocal looked_at
        for tile in tiles(pool, start, stop):
            looked_at += 1
            yield tile

    monkeypatch.setattr(PagePool, "tiles", counted)
    small = 300
    pages = {0: 100, **dict.fromkeys(range(1, small + 1), 1)}
    units = [UnitPlan(lease_frames=frames) for frames in pages.values()]
    scheduler = Scheduler(SchedulePlan(units, assumed_trace(list(pages)), frame_pool=200))
    windows = 0
    for access in scheduler.trace.accesses[:-1]:
        if access.unit:
            scheduler.access(access)
            windows += len(units_of(Evict, end_all(scheduler)))
            scheduler.release(access.unit)
            end_all(scheduler)
    assert windows > 100
    assert looked_at <= 3 * windows


# --- frames --------------------------------------------------------------------------------------------------

SLAB, SLABS = 6, 4


@pytest.mark.parametrize("seed", range(20))
def test_runs_never_overlap_and_whatever_is_pinned_every_other_slab_can_be_made_free(seed: int) -> None:
    rng = random.Random(seed)
    frames = Frames(SLAB * SLABS + seed % SLAB, SLAB)
    runs: list[PageRun] = []
    peak = 0
    for _ in range(200):
        if runs and rng.random() < 0.4:
            frames.free(runs.pop(rng.randrange(len(runs))))
        elif (run := frames.alloc(rng.randint(1, SLAB))) is not None:
            assert run.start // SLAB == (run.stop - 1) // SLAB, "a run never straddles two slabs"
            assert all(run.stop <= other.start or other.stop <= run.start for other in runs)
            runs.append(run)
        in_use = sum(run.count for run in runs)
        peak = max(peak, in_use)
        assert (frames.in_use, frames.peak) == (in_use, peak)
        pinned = {run for run in runs if rng.random() < 0.3}
        touched = {run.start // SLAB for run in pinned}
        for slab in {frames.slab_of(run) for run in runs}:
            window = frames.window(slab, SLAB)
            offered = [run for run in runs if frames.slab_of(run) == slab and run not in pinned]
            assert any(map(window.offer, offered)) == (slab < SLABS and slab not in touched)


def test_the_slab_with_the_least_room_that_has_it_gives_a_run() -> None:
    frames = Frames(12, 6)
    first = frames.alloc(4)
    assert frames.alloc(2) == PageRun(first.stop, 2)
    assert frames.alloc(7) is None
