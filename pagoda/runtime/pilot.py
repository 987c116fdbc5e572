"""The pilot: keeps the live step on the plan, serves what the plan did not foresee, and plans anew when that lasts."""

import gc
from collections.abc import Callable, Sequence
from math import inf

from pagoda.errors import BudgetError
from pagoda.plan.ops import Kind
from pagoda.plan.planner import Plan
from pagoda.plan.schedule import NextUse
from pagoda.plan.trace import Access, Cursor, Phase, Recorder, Trace
from pagoda.runtime.lanes import Handle
from pagoda.runtime.leases import Lease, Leases
from pagoda.runtime.routed import Coming, Steadiness
from pagoda.runtime.stats import Found, Meter
from pagoda.runtime.unit import LiveUnit

_NEVER = 1e9
"""Ticks to the next use of a unit the plan never uses: such a unit is the first to make room."""


class Pilot:
    """Turns accesses into leases, issuing the plan's ops as their ticks come."""

    def __init__(
        self,
        plan: Plan,
        units: list[LiveUnit],
        leases: Leases,
        meter: Meter,
        wait: Callable[[Handle], None],
        may_fetch: Callable[[LiveUnit], bool],
    ) -> None:
        self._units = units
        self._leases = leases
        self._meter = meter
        self._wait = wait
        self._may_fetch = may_fetch
        """Whether a unit's weights can be fetched before they are needed."""
        self._recorder = Recorder()
        self._previous: Trace | None = None
        """The last step, without experts."""
        self._steadiness = Steadiness(plan.layout.expert_units)
        self._coming = Coming()
        counted_on = self._steadiness.counted_on(plan.trace)
        self._stand_in: dict[int, int] = {}
        self._follow(plan if counted_on is plan.trace else plan.retraced(counted_on))

    def lease(self, unit: LiveUnit, phase: Phase, recorded: bool) -> Lease:
        """The unit's lease, ready or on its way. An access that is `recorded` is part of what a plan is made for."""
        access = Access(unit.index, phase)
        if recorded:
            self._recorder.note(access)
        self._coming.used(unit, backward=phase is Phase.BACKWARD)
        before = self._cursor.position
        tick = self._cursor.advance(access)
        lease = self._leases.get(unit)
        if tick is None or tick != before:
            self._meter.accesses[_found(lease)] += 1
        if lease is None:
            lease = self._fetch_now(unit)
        unit.active += 1  # nobody holds this lease yet: pin it while others make room
        try:
            if tick is not None and tick != before:
                self._issue(tick)
            if self._coming.units:
                self._fetch_coming()
        finally:
            unit.active -= 1
        return lease

    def expect(self, units: Sequence[LiveUnit]) -> None:
        """Units that a router has chosen are used next, in this order: fetch them as far as frames allow."""
        self._coming.announce(units)
        self._fetch_coming()

    def urgency(self, unit: LiveUnit) -> float:
        """Ticks from `step()` to the unit's first use."""
        return self._urgency[unit.index]

    def end_of_step(self) -> bool:
        """Close the trace; returns whether the plan was replaced.

        A step that departed from the plan replaces it when the one before was the same, or when the plan was only
        a guess at what a step would be. Steps without accesses are none. Experts do not count: which of them a plan
        fetches ahead is decided now and then.
        """
        recorded = self._recorder.finish()
        if len(recorded.accesses) == 1:
            return False
        decided = self._steadiness.observe(recorded)
        dense = self._steadiness.dense(recorded)
        known = dense.accesses == self._steadiness.dense(self.plan.trace).accesses
        persists = self._previous is not None and dense.accesses == self._previous.accesses
        self._previous = dense
        replace = decided or (not known and (persists or self.plan.trace.assumed))
        if replace:
            self._follow(self.plan.retraced(self._steadiness.counted_on(recorded)))
        self._cursor.position = len(self.plan.trace.accesses) - 1
        self._issue(self._cursor.position)
        return replace

    def _follow(self, plan: Plan) -> None:
        self.plan = plan
        self._cursor = Cursor(plan.trace)
        self._uses = NextUse(plan.trace)
        last = len(plan.trace.accesses) - 1
        before, unsteady = None, self._steadiness.unsteady
        for unit in self._units:
            if unit.index not in unsteady:
                before = unit
            self._stand_in[unit.index] = (before or unit).index
        self._urgency = [self._ahead(unit, last) for unit in self._units]

    def _ahead(self, unit: LiveUnit, tick: int) -> float:
        """Ticks from one to a unit's next use. If the plan does not count on the unit, that may be the next use of the
        one before it, which is then a part of the same block."""
        return self._uses.after(self._stand_in[unit.index], tick)

    def _issue(self, tick: int) -> None:
        for op in self.plan.ops_at.get(tick, ()):
            unit = self._units[op.unit]
            if op.kind is Kind.EVICT:
                if unit not in self._coming.units:
                    self._leases.evict(unit)
            elif op.unit not in self._steadiness.idle and self._leases.get(unit) is None and self._may_fetch(unit):
                self._leases.fetch(unit, self._later_than(unit))

    def _later_than(self, wanted: LiveUnit) -> Callable[[LiveUnit], float]:
        """Prices for a prefetch: never evict a unit that is needed before the wanted one."""
        position = self._cursor.position
        due = self._ahead(wanted, position)

        def price(other: LiveUnit) -> float:
            ahead = self._ahead(other, position)
            return inf if ahead <= due or other in self._coming.units else -min(ahead, _NEVER)

        return price

    def _fetch_coming(self) -> None:
        """Fetch what a router has chosen, in the order of its use, until frames run out."""
        for unit in self._coming.units:
            wanted = self._leases.get(unit) is None and self._may_fetch(unit)
            if wanted and self._leases.fetch(unit, self._furthest_first(coming=inf)) is None:
                return

    def _furthest_first(self, coming: float) -> Callable[[LiveUnit], float]:
        """Prices for what is needed now: what is needed last makes room. `coming` is the price of what is coming."""
        position = self._cursor.position

        def price(other: LiveUnit) -> float:
            return coming if other in self._coming.units else -min(self._ahead(other, position), _NEVER)

        return price

    def _fetch_now(self, unit: LiveUnit) -> Lease:
        """Serve an access on demand: make room by furthest next use, waiting for frames in flight if need be."""
        price = self._furthest_first(coming=0.0)
        lease = self._leases.fetch(unit, price)
        if lease is None:
            for fetch in self._leases.fetches():
                self._wait(fetch)
            lease = self._leases.fetch(unit, price)
        if lease is None:
            gc.collect()  # reference cycles may keep views of leases alive
            lease = self._leases.fetch(unit, price)
        if lease is None:
            tier = self.plan.lease_tier
            raise BudgetError(
                f"No room on {tier} for the weights of unit {unit.spec.name!r}: in use at once are "
                f"{', '.join(repr(n) for n in self._leases.holders())}. Raise memory.{tier}, or lower "
                "memory.unit_limit; with gradient checkpointing, everything inside one checkpoint is in use at once.",
                tier=tier,
            )
        return lease


def _found(lease: Lease | None) -> Found:
    """What an access to a unit with this lease finds, before it waits for anything."""
    if lease is None:
        return Found.FAULT
    if lease.run is None or lease.ready is None:
        return Found.IN_PLACE
    return Found.ARRIVED if lease.ready.done else Found.LATE
