"""Experts: which of their units a plan can count on, and which ones a router has just chosen."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace

from pagoda.plan.trace import Access, Trace
from pagoda.runtime.unit import LiveUnit

_FIRST_DECISION, _LONGEST_WAIT = 4, 1000
"""Steps until it is first decided which experts a plan counts on, and the most from one decision to the next."""


class Steadiness:
    """Which units of experts the steps use alike, so that a plan may fetch them ahead. At first it is none.

    That is decided after 4 steps, and again whenever twice as many have passed: it is those that every step since the
    decision before has used equally often. So routing has little say in how often the pilot plans anew. One that a plan
    counts on, but the last step did not use, is not fetched ahead either.
    """

    def __init__(self, routed: frozenset[int]) -> None:
        self._routed = routed
        self.steady: frozenset[int] = frozenset()
        """Units that plans count on."""
        self.idle = routed
        """Units that the last step did not use."""
        self._alike = routed
        self._uses: Counter[int] | None = None
        self._steps = 0
        self._decide_at = _FIRST_DECISION

    @property
    def unsteady(self) -> frozenset[int]:
        """Units that are fetched when a router has chosen them."""
        return self._routed - self.steady

    def observe(self, trace: Trace) -> bool:
        """A step has ended; returns whether plans count on others from now on."""
        if not self._routed:
            return False
        uses = Counter(access.unit for access in trace.accesses if access.unit in self._routed)
        before = uses if self._uses is None else self._uses
        self._alike = frozenset(unit for unit in self._alike if 0 < uses[unit] == before[unit])
        self.idle = self._routed - uses.keys()
        self._uses = uses
        self._steps += 1
        if self._steps < self._decide_at:
            return False
        changed = self.steady != self._alike
        self.steady, self._alike = self._alike, self._routed
        self._decide_at += min(self._decide_at, _LONGEST_WAIT)
        return changed

    def counted_on(self, trace: Trace) -> Trace:
        """What of a trace a plan may count on."""
        return _without(trace, self.unsteady)

    def dense(self, trace: Trace) -> Trace:
        """What of a trace is none of experts."""
        return _without(trace, self._routed)


def _without(trace: Trace, units: frozenset[int]) -> Trace:
    if not units:
        return trace
    kept: list[Access] = []
    for access in trace.accesses:
        if access.unit not in units and (not kept or kept[-1] != access):
            kept.append(access)
    return replace(trace, accesses=tuple(kept))


class Coming:
    """Units that are about to be used, in this order: those of the experts that a router has chosen.

    Backward uses them the other way round, so its first use of one announces the rest.
    """

    def __init__(self) -> None:
        self.units: deque[LiveUnit] = deque()
        self._chosen: dict[int, Sequence[LiveUnit]] = {}
        """unit -> those that were chosen with it, it included, when it was last chosen."""
        self._using: LiveUnit | None = None

    def announce(self, units: Sequence[LiveUnit]) -> None:
        """A router has chosen."""
        self.units = deque(units)
        self._chosen.update((unit.index, units) for unit in units)

    def used(self, unit: LiveUnit, backward: bool) -> None:
        """A unit is being used: those after it are coming, and if it is none of them, no others are."""
        if unit is self._using:
            return
        self._using = unit
        if unit in self.units:
            while self.units.popleft() is not unit:
                pass
        elif backward and (chosen := self._chosen.get(unit.index)) is not None:
            self.units = deque(reversed(chosen[: chosen.index(unit)]))
        else:
            self.units.clear()
