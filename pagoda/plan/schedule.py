"""When each lease is fetched and which one makes room: prefetching and caching as one problem.

The rule is the "aggressive" strategy of Cao, Felten, Karlin and Li, "A study of integrated prefetching and
caching strategies" (SIGMETRICS 1995): at every tick fetch the next missing unit as early as frames allow,
evicting the unit whose next use is furthest away, but never one that is needed before the unit it makes room
for. Eviction by furthest next use is Belady's rule, and what PatrickStar's chunk manager does; as the trace is
cyclic it leaves a static resident subset where not everything fits.
"""

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
        later = next((t for t in ticks if t > tick), None)
        return (ticks[0] + self.period if later is None else later) - tick


def schedule_leases(
    trace: Trace,
    pages: Mapping[int, int],
    lanes: Mapping[int, str],
    updated: frozenset[int],
    capacity: int,
    slab: int,
    page_bytes: int,
) -> tuple[Op, ...]:
    """FETCH and EVICT ops of one step.

    `pages` maps each unit that needs leases to its frames, `lanes` to the lane that fetches it; units in
    `updated` lose their lease when the step updates their weights, so nothing is fetched for them across STEP.
    """
    if not pages:
        return ()
    uses = NextUse(trace)
    period = uses.period
    last = period - 1
    pool = SlabPool(capacity, slab)
    held: dict[int, Run] = {}
    owner: dict[int, int] = {}
    ops: list[Op] = []

    def usefulness(unit: int, tick: int) -> float:
        ahead = uses.after(unit, tick)
        return inf if unit in updated and tick < last < tick + ahead else ahead

    def evict(unit: int, tick: int) -> None:
        run = held.pop(unit)
        del owner[run.start]
        pool.free(run)
        ops.append(Op(Kind.EVICT, unit, lanes[unit], 0, tick))

    def fetch(unit: int, tick: int, wanted_in: float, pinned: int) -> bool:
        def price(run: Run) -> float | None:
            other = owner[run.start]
            ahead = usefulness(other, tick)
            return None if other == pinned or ahead <= wanted_in else -ahead

        run = pool.alloc(pages[unit])
        if run is None:
            victims = pool.cheapest_window(pages[unit], price)
            if victims is None:
                return False
            for victim in victims:
                evict(owner[victim.start], tick)
            run = pool.alloc(pages[unit])
            assert run is not None, "the window that was freed is contiguous"
        held[unit] = run
        owner[run.start] = unit
        ops.append(Op(Kind.FETCH, unit, lanes[unit], pages[unit] * page_bytes, tick))
        return True

    for _ in range(_CYCLES):
        ops.clear()
        for tick, access in enumerate(trace.accesses):
            if access == STEP:
                for unit in [u for u in held if u in updated]:
                    run = held.pop(unit)
                    del owner[run.start]
                    pool.free(run)
            elif access.unit in pages and access.unit not in held:
                fetch(access.unit, tick, 0, access.unit)
            for ahead in range(1, period):
                upcoming = trace.accesses[(tick + ahead) % period]
                if upcoming == STEP:
                    break
                if upcoming.unit in pages and upcoming.unit not in held:
                    crosses = tick != last and tick + ahead > last and upcoming.unit in updated
                    if crosses or not fetch(upcoming.unit, tick, ahead, access.unit):
                        break
    return tuple(ops)
