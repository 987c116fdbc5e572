"""When each lease is fetched and which one makes room: prefetching and caching as one problem.

The rule is the "aggressive" strategy of Cao, Felten, Karlin and Li, "A study of integrated prefetching and
caching strategies" (SIGMETRICS 1995): at every tick fetch the next missing unit as early as frames allow,
evicting the unit whose next use is furthest away, but never one that is needed before the unit it makes room
for. Eviction by furthest next use is Belady's rule, and what PatrickStar's chunk manager does; as the trace is
cyclic it leaves a static resident subset where not everything fits.
"""

from bisect import bisect_right
from collections.abc import Mapping
from math import inf

from pagoda.memory.page import Run
from pagoda.memory.slabs import SlabPool
from pagoda.plan.ops import Kind, Op
from pagoda.plan.trace import STEP, Trace

_CYCLES = 3
"""Cycles simulated; leases of one step seed the next, and the last cycle is the steady state."""


class NextUse:
    """For each unit, the ticks at which a cyclic trace uses it."""

    def __init__(self, trace: Trace) -> None:
        self.period = len(trace.accesses)
        self._ticks: dict[int, list[int]] = {}
        for tick, access in enumerate(trace.accesses):
            if access != STEP:
                self._ticks.setdefault(access.unit, []).append(tick)

    def after(self, unit: int, tick: int) -> float:
        """Ticks from `tick` to the next use of `unit`, at least 1; infinite if the trace never uses it."""
        ticks = self._ticks.get(unit)
        if not ticks:
            return inf
        later = bisect_right(ticks, tick)
        return (ticks[later] if later < len(ticks) else ticks[0] + self.period) - tick


def schedule_leases(
    trace: Trace,
    pages: Mapping[int, int],
    lanes: Mapping[int, str],
    updated: frozenset[int],
    enclosing: Mapping[int, frozenset[int]],
    capacity: int,
    slab: int,
    page_bytes: int,
) -> tuple[Op, ...]:
    """FETCH and EVICT ops of one step.

    `pages` maps each unit that needs leases to its frames, `lanes` to the lane that fetches it; units in
    `updated` lose their lease when the step updates their weights, so nothing is fetched for them across STEP.
    `enclosing` maps a unit to those that stay in use, and are never evicted, while it is accessed.
    """
    if not pages:
        return ()
    rehearsal = _Rehearsal(trace, pages, updated, enclosing, SlabPool(capacity, slab))
    for _ in range(_CYCLES):
        moves = rehearsal.cycle()
    return tuple(
        Op(kind, unit, lanes[unit], pages[unit] * page_bytes if kind is Kind.FETCH else 0, tick)
        for kind, unit, tick in moves
    )


class _Rehearsal:
    """Plays a trace against the frames there are; the leases of one cycle are there when the next begins."""

    def __init__(
        self,
        trace: Trace,
        pages: Mapping[int, int],
        updated: frozenset[int],
        enclosing: Mapping[int, frozenset[int]],
        pool: SlabPool,
    ) -> None:
        self._accesses = trace.accesses
        self._uses = NextUse(trace)
        self._pages = pages
        self._updated = updated
        self._enclosing = enclosing
        self._pool = pool
        self._held: dict[int, Run] = {}
        self._owner: dict[int, int] = {}
        """First frame of a lease -> its unit."""
        self._useful_at: dict[int, float] = {}
        """Leased unit -> when its lease next serves an access, in ticks of all cycles; infinite if an update ends it
        before."""
        self._moves: list[tuple[Kind, int, int]] = []
        self._tick = 0
        self._played = 0
        """Ticks of the cycles before this one."""

    def cycle(self) -> list[tuple[Kind, int, int]]:
        """Play one step; returns its moves as (kind, unit, tick)."""
        self._moves = []
        for tick, access in enumerate(self._accesses):
            self._tick = tick
            if access == STEP:
                self._drop_updated()
            elif self._missing(access.unit):
                self._fetch(access.unit, 0)
            elif access.unit in self._held:
                self._look_ahead(access.unit)
            self._prefetch()
        self._played += len(self._accesses)
        return self._moves

    def _prefetch(self) -> None:
        """Fetch what is missing, in the order of its use, until frames run out or STEP is in between."""
        period = len(self._accesses)
        for ahead in range(1, period):
            upcoming = self._accesses[(self._tick + ahead) % period]
            if upcoming == STEP or (self._missing(upcoming.unit) and not self._fetch(upcoming.unit, ahead)):
                return

    def _missing(self, unit: int) -> bool:
        return unit in self._pages and unit not in self._held

    def _fetch(self, unit: int, wanted_in: int) -> bool:
        """Lease a unit that is needed in so many ticks; False when that takes frames of units needed before."""
        run = self._pool.alloc(self._pages[unit])
        if run is None:
            if max(self._useful_at.values(), default=0) <= self._played + self._tick + wanted_in:
                return False  # no victim, so no window of them: found out fast, as it is the usual case
            victims = self._pool.cheapest_window(self._pages[unit], lambda other: self._price(other, wanted_in))
            if victims is None:
                return False
            for victim in victims:
                self._evict(self._owner[victim.start])
            run = self._pool.alloc(self._pages[unit])
            assert run is not None, "the window that was freed is contiguous"
        self._held[unit] = run
        self._owner[run.start] = unit
        self._look_ahead(unit)
        self._moves.append((Kind.FETCH, unit, self._tick))
        return True

    def _price(self, run: Run, wanted_in: int) -> float | None:
        """What evicting a lease costs; None forbids it."""
        unit = self._owner[run.start]
        ahead = self._useful_at[unit] - self._played - self._tick
        return None if self._pinned(unit) or ahead <= wanted_in else -ahead

    def _pinned(self, unit: int) -> bool:
        accessed = self._accesses[self._tick].unit
        return unit == accessed or unit in self._enclosing.get(accessed, ())

    def _look_ahead(self, unit: int) -> None:
        """Note when the lease of a unit serves next, seen from this tick."""
        ahead = self._uses.after(unit, self._tick)
        last = len(self._accesses) - 1
        ends = unit in self._updated and self._tick < last < self._tick + ahead
        self._useful_at[unit] = inf if ends else self._played + self._tick + ahead

    def _evict(self, unit: int) -> None:
        self._drop(unit)
        self._moves.append((Kind.EVICT, unit, self._tick))

    def _drop_updated(self) -> None:
        for unit in self._updated & self._held.keys():
            self._drop(unit)

    def _drop(self, unit: int) -> None:
        run = self._held.pop(unit)
        del self._useful_at[unit]
        del self._owner[run.start]
        self._pool.free(run)
