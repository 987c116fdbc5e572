"""A priority queue of units whose times may change."""

from heapq import heapify, heappop, heappush
from math import inf

_MOST_STALE = 4
"""If the heap has more entries per unit than this, it is rebuilt without its outdated entries."""


class Agenda:
    """Units, each with one time. Changing a time costs as much as adding a unit."""

    def __init__(self) -> None:
        self._times: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []
        """(time, unit). An entry is outdated if `_times` has another time for its unit, or none."""

    def put(self, unit: int, time: float) -> None:
        """Set the time of a unit."""
        if self._times.get(unit) == time:
            return
        self._times[unit] = time
        heappush(self._heap, (time, unit))
        if len(self._heap) > _MOST_STALE * len(self._times):
            self._heap = [(time, unit) for unit, time in self._times.items()]
            heapify(self._heap)

    def first(self) -> tuple[float, int] | None:
        """The least time and its unit; None if there are no units."""
        while self._heap:
            time, unit = self._heap[0]
            if self._times.get(unit) == time:
                return self._heap[0]
            heappop(self._heap)
        return None

    def time(self, unit: int) -> float:
        """The time of a unit. Infinite if it has none."""
        return self._times.get(unit, inf)

    def remove(self, unit: int) -> None:
        """Remove a unit and its time."""
        del self._times[unit]
