"""Experts: which of their units all steps use, and which units a router has just chosen."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from pagoda.plan.trace import Access, Trace

_FIRST_DECISION, _LONGEST_WAIT = 4, 1000
"""Steps until the first decision about which experts are steady, and the most steps between two decisions."""


class ExpertHistory:
    """Which units of experts are steady: all steps use them equally, so they are in the trace and are fetched ahead.

    At first, no unit is steady. The first decision comes after 4 steps, and each later one after twice as many steps as
    the one before, or after 1000 more. The steady units are those that every step since the previous decision has used
    equally often. So routing rarely causes a new trace. A steady unit that the last step did not use is not fetched
    ahead.
    """

    def __init__(self, routed: frozenset[int]) -> None:
        self._routed = routed
        self.steady: frozenset[int] = frozenset()
        """Units in the trace, by the last decision."""
        self._alike = routed
        """Units that every step since the last decision has used equally often."""
        self._uses: Counter[int] | None = None
        """unit -> its uses in the last step."""
        self._steps = 0
        self._decide_at = _FIRST_DECISION

    @property
    def unsteady(self) -> frozenset[int]:
        """Units that are fetched only once a router has chosen them."""
        return self._routed - self.steady

    def observe(self, trace: Trace) -> bool:
        """A step has ended. Returns whether other units are steady from now on."""
        if not self._routed:
            return False
        uses = Counter(access.unit for access in trace.accesses if access.unit in self._routed)
        before = uses if self._uses is None else self._uses
        self._alike = frozenset(unit for unit in self._alike if 0 < uses[unit] == before[unit])
        self._uses = uses
        self._steps += 1
        if self._steps < self._decide_at:
            return False
        changed = self.steady != self._alike
        self.steady, self._alike = self._alike, self._routed
        self._decide_at += min(self._decide_at, _LONGEST_WAIT)
        return changed

    def is_expected(self, unit: int) -> bool:
        """Whether a unit is expected to be used. Experts that the last step did not use are not."""
        return unit not in self._routed or (unit in self.steady and bool(self._uses and self._uses[unit]))

    def without_unsteady(self, trace: Trace) -> Trace:
        """The trace without experts that are not steady."""
        return _without(trace, self.unsteady)

    def without_experts(self, trace: Trace) -> Trace:
        """The trace without experts."""
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
    """Units of the experts that a router has just chosen, in the order in which they will be used.

    Backward uses them in reverse order, so its first use of one of them announces the rest.
    """

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        """unit -> its place among the chosen units, starting at 1, in the order of their uses."""
        self._passed = 0
        """The place of the unit that was used last. The units after it are coming."""
        self._together: dict[int, Sequence[int]] = {}
        """unit -> the units that were chosen together with it when it was last chosen, including itself."""
        self._using: int | None = None

    def announce(self, units: Sequence[int]) -> None:
        """A router has chosen units."""
        self._expect(units)
        self._together.update((unit, units) for unit in units)

    def place(self, unit: int) -> int:
        """A unit's place among the coming units, starting at 1. 0 if it is not one of them."""
        return max(0, self._places.get(unit, 0) - self._passed) if self._places else 0

    @property
    def coming(self) -> list[int]:
        """The coming units, in the order of their uses."""
        return [*self._places][self._passed :]

    def used(self, unit: int, backward: bool) -> bool:
        """Compute uses a unit. If the unit was expected, the units after it are coming; otherwise none are. Returns
        whether this use announces units that were not expected before."""
        if unit == self._using or not self._together:
            return False
        self._using = unit
        if self.place(unit):
            self._passed = self._places[unit]
        elif backward and (chosen := self._together.get(unit)) is not None:
            self._expect(chosen[: chosen.index(unit)][::-1])
            return True
        else:
            self._expect(())
        return False

    def _expect(self, units: Sequence[int]) -> None:
        self._places, self._passed = {unit: at for at, unit in enumerate(dict.fromkeys(units), start=1)}, 0
