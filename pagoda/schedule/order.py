"""When each unit is used next, by the trace of the steps before."""

from math import inf

from pagoda.plan.schedule import NextUse
from pagoda.plan.trace import Access, Cursor, Trace


class Order:
    """Follows the accesses of a live step along a cyclic trace.

    Time is counted in ticks of the trace since the first step. It never goes back: where the live step jumps back in
    the trace, time goes on in the next cycle.
    """

    def __init__(self, trace: Trace) -> None:
        self._cursor = Cursor(trace)
        self._uses = NextUse(trace)
        self._start = -len(trace.accesses)
        """Time of tick 0 of this cycle."""

    @property
    def now(self) -> int:
        return self._start + self._cursor.position

    @property
    def step(self) -> int:
        """Time of the next `step()`."""
        last = self._uses.period - 1
        position = self._cursor.position
        return self._start + last + (self._uses.period if position == last else 0)

    def access(self, access: Access) -> None:
        """An access that the trace does not have leaves time where it is."""
        before = self._cursor.position
        if self._cursor.advance(access) is not None and self._cursor.position < before:
            self._start += self._uses.period

    def end_step(self) -> None:
        """`step()` was called: time is at the end of the cycle."""
        last = self._uses.period - 1
        if self._cursor.position == last:
            self._start += self._uses.period
        self._cursor.position = last

    def next_use(self, unit: int) -> float:
        """Time of the next access of a unit; infinite if the trace never uses it."""
        ahead = self._uses.after(unit, self._cursor.position)
        return inf if ahead == inf else self.now + ahead
