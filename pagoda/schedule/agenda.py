"""Which unit comes first, where the time of each may change."""

from heapq import heapify, heappop, heappush
from math import inf

_MOST_STALE = 4
"""Entries for each unit, on average, above which a heap is made anew without those that are out of date."""


class Agenda:
    """Units, each with one time. A unit that has another time costs as much as a new one."""

    def __init__(self) -> None:
        self._times: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []
        """(time, unit), some of them out of date: not as `_times` has it."""

    def put(self, unit: int, time: float) -> None:
        """From now on a unit has this time, and no other."""
        if self._times.get(unit) == time:
            return
        self._times[unit] = time
        heappush(self._heap, (time, unit))
        if len(self._heap) > _MOST_STALE * len(self._times):
            self._heap = [(time, unit) for unit, time in self._times.items()]
            heapify(self._heap)

    def first(self) -> tuple[float, int] | None:
        """The least time, and its unit."""
        while self._heap:
            time, unit = self._heap[0]
            if self._times.get(unit) == time:
                return self._heap[0]
            heappop(self._heap)
        return None

    def time(self, unit: int) -> float:
        """The time of a unit; infinite if it has none."""
        return self._times.get(unit, inf)

    def remove(self, unit: int) -> None:
        """A unit has no time any more."""
        del self._times[unit]
