"""Experts: which of their units the trace can count on, and which ones a router has just chosen."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from pagoda.plan.trace import Access, Trace

_FIRST_DECISION, _LONGEST_WAIT = 4, 1000
"""Steps until it is first decided which experts a plan counts on, and the most from one decision to the next."""


class ExpertHistory:
    """Which units of experts the steps use alike, so that they can be fetched ahead by the trace. At first it is none.

    That is decided after 4 steps, and again whenever twice as many have passed: it is those that every step since the
    decision before has used equally often. So routing has little say in how often the trace is replaced. One that the
    trace counts on, but the last step did not use, is not fetched ahead either.
    """

    def __init__(self, routed: frozenset[int]) -> None:
        self._routed = routed
        self.steady: frozenset[int] = frozenset()
        """Units that the trace counts on."""
        self._idle = routed
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
        """A step has ended; returns whether the trace counts on others from now on."""
        if not self._routed:
            return False
        uses = Counter(access.unit for access in trace.accesses if access.unit in self._routed)
        before = uses if self._uses is None else self._uses
        self._alike = frozenset(unit for unit in self._alike if 0 < uses[unit] == before[unit])
        self._idle = self._routed - uses.keys()
        self._uses = uses
        self._steps += 1
        if self._steps < self._decide_at:
            return False
        changed = self.steady != self._alike
        self.steady, self._alike = self._alike, self._routed
        self._decide_at += min(self._decide_at, _LONGEST_WAIT)
        return changed

    def counts_on(self, unit: int) -> bool:
        """Whether a unit will be used, as far as is known; of experts that the last step did not use, it is not."""
        return unit not in self._routed or (unit in self.steady and unit not in self._idle)

    def counted_on(self, trace: Trace) -> Trace:
        """What of a trace can be counted on."""
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


class Chosen:
    """Units that are about to be used, in this order: those of the experts that a router has just chosen.

    Backward uses them the other way round, so its first use of one announces the rest.
    """

    def __init__(self) -> None:
        self.coming: dict[int, int] = {}
        """unit -> its place among those that are coming, from 1 on."""
        self._with: dict[int, Sequence[int]] = {}
        """unit -> those that were chosen with it, it included, when it was last chosen."""
        self._using: int | None = None

    def announce(self, units: Sequence[int]) -> None:
        """A router has chosen."""
        self.coming = _places(units)
        self._with.update((unit, units) for unit in units)

    def used(self, unit: int, backward: bool) -> bool:
        """A unit is being used: those after it are coming, and if it is none of them, no others are. Returns whether it
        announces units that were not coming before."""
        if unit == self._using or not self._with:
            return False
        self._using = unit
        if unit in self.coming:
            units = [*self.coming]
            self.coming = _places(units[units.index(unit) + 1 :])
        elif backward and (chosen := self._with.get(unit)) is not None:
            self.coming = _places(chosen[: chosen.index(unit)][::-1])
            return True
        else:
            self.coming = {}
        return False

    def units(self) -> Sequence[int]:
        """Those that are coming, in order."""
        return [*self.coming]


def _places(units: Sequence[int]) -> dict[int, int]:
    return {unit: place for place, unit in enumerate(dict.fromkeys(units), start=1)}
