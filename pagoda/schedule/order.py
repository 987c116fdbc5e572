"""When each unit is used next, by the trace of earlier steps and by the latest choices of routers."""

from collections.abc import Sequence
from math import inf

from pagoda.plan.trace import STEP, Access, Cursor, NextUse, Phase, Trace
from pagoda.schedule.experts import Chosen, ExpertHistory


class Order:
    """Follows the accesses of a step along a cyclic trace, and replaces the trace when steps have changed.

    Time is counted in ticks of the trace since the first step. It never decreases: if the step jumps back in the trace,
    time continues in the next cycle. Experts are in the trace only if all steps use them equally. A router's choice
    takes precedence over the trace.
    """

    def __init__(self, trace: Trace, units: int, routed: frozenset[int]) -> None:
        """`units`: number of all units. `routed`: the units of experts."""
        self._units = units
        self._start = 0
        """Time of tick 0 of this cycle."""
        self._accesses: list[Access] = []
        """The accesses of this step so far. Consecutive uses of the same unit in one phase count once."""
        self._previous: Trace | None = None
        """The last step, without experts."""
        self._experts = ExpertHistory(routed)
        self._chosen = Chosen()
        self._follow(self._experts.without_unsteady(trace))
        self._start = -len(self.trace.accesses)

    def _follow(self, trace: Trace) -> None:
        self.trace = trace
        self._cursor = Cursor(trace)
        self._uses = NextUse(trace)
        self._next_uses = [-inf] * self._units
        """By unit, the time of its next use in the trace when it was last computed. Once that time has passed, it is
        computed again."""
        unsteady = self._experts.unsteady
        self._stand_in = [*range(self._units)]
        """unit -> the unit whose uses stand for its own. An expert that is not in the trace is used at about the same
        time as the unit before it."""
        before: int | None = None
        for unit in range(self._units):
            if unit not in unsteady:
                before = unit
            elif before is not None:
                self._stand_in[unit] = before

    @property
    def now(self) -> int:
        """The time of the latest access or `step()`."""
        return self._start + self._cursor.position

    @property
    def step(self) -> int:
        """The time of the next `step()`."""
        last = self._uses.period - 1
        return self._start + last + (self._uses.period if self._cursor.position == last else 0)

    def access(self, access: Access, recorded: bool) -> Sequence[int]:
        """Compute uses a unit: time advances to this access, or stays if the access is not in the trace. `recorded`:
        the access becomes part of the next trace. Returns the units that are expected next, if this access announces
        them."""
        if recorded and self._accesses[-1:] != [access]:
            self._accesses.append(access)
        announces = self._chosen.used(access.unit, backward=access.phase is Phase.BACKWARD)
        before = self._cursor.position
        if self._cursor.advance(access) is not None and self._cursor.position < before:
            self._start += self._uses.period
        return self._chosen.coming if announces else ()

    def expect(self, units: Sequence[int]) -> None:
        """A router has chosen the units that are used next, in this order."""
        self._chosen.announce(units)

    def end_step(self) -> bool:
        """`step()` was called: time is at the end of the cycle. Returns whether the trace was replaced.

        A step that differs from the trace replaces it if the previous step was the same, or if the trace was only
        assumed. Steps without accesses do not count. Experts do not count either: `ExpertHistory` decides which of them
        are in the trace.
        """
        recorded, self._accesses = Trace((*self._accesses, STEP)), []
        replaced = len(recorded.accesses) > 1 and self._replaces(recorded)
        now = self.now
        if replaced:
            self._follow(self._experts.without_unsteady(recorded))
            self._start = now + 1
        elif self._cursor.position == self._uses.period - 1:
            self._start += self._uses.period
        self._cursor.position = self._uses.period - 1
        return replaced

    def _replaces(self, recorded: Trace) -> bool:
        decided = self._experts.observe(recorded)
        dense = self._experts.without_experts(recorded)
        known = dense.accesses == self._experts.without_experts(self.trace).accesses
        persists = self._previous is not None and dense.accesses == self._previous.accesses
        self._previous = dense
        return decided or (not known and (persists or self.trace.assumed))

    @property
    def position(self) -> int:
        """The number of accesses of the trace that the step has passed."""
        return (self._cursor.position + 1) % self._uses.period

    def next_use(self, unit: int) -> float:
        """The time of the next access of a unit. Infinite if no use is expected."""
        now = self._start + self._cursor.position
        if place := self._chosen.place(unit):
            return now + place / (self._units + 1)
        use = self._next_uses[unit]
        if use <= now:
            use = self._next_uses[unit] = now + self._uses.after(self._stand_in[unit], self._cursor.position)
        return use

    def is_expected(self, unit: int) -> bool:
        """Whether a unit is expected to be used. Experts that the last step did not use are not."""
        return self._chosen.place(unit) > 0 or self._experts.is_expected(unit)
