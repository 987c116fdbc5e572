"""A heap of units, by times that change without notice."""

from collections.abc import Callable, Generator
from heapq import heapify, heappop, heappush
from math import inf

_MOST_STALE = 4
"""If the heap has more entries per unit than this, it is rebuilt without its outdated entries."""


class Agenda:
    """Units, or slabs, each with one time. Of those with the same time, the least size is first, then the least number.

    Invariant: a unit that is returned has its true time. Until then its listed time may be another one: an entry is
    compared with `now` when it becomes the first, and corrected or removed. So a unit whose time has become earlier
    comes too late, unless it is `put` again. Changing a time costs as much as adding a unit.
    """

    def __init__(self, now: Callable[[int], tuple[float, int] | None]) -> None:
        """`now`: the true time of a unit and its size, which does not change. None if it does not belong here."""
        self._now = now
        self._entries: dict[int, tuple[float, int, int]] = {}
        """unit -> (time, size, unit)."""
        self._heap: list[tuple[float, int, int]] = []
        """Entries. One that is not in `_entries` is outdated."""

    def put(self, unit: int, time: float, size: int = 0) -> None:
        """Set the time and the size of a unit."""
        entry = (time, size, unit)
        if self._entries.get(unit) == entry:
            return
        self._entries[unit] = entry
        heappush(self._heap, entry)
        if len(self._heap) > _MOST_STALE * len(self._entries):
            self._heap = [*self._entries.values()]
            heapify(self._heap)

    def in_order(self) -> Generator[tuple[float, int]]:
        """Every time and its unit, the least first. Close the generator before anything else is put or asked."""
        taken: list[tuple[float, int, int]] = []
        try:
            while (first := self.first()) is not None:
                taken.append(heappop(self._heap))
                del self._entries[first[1]]
                yield first
        finally:
            for entry in taken:
                self._entries[entry[-1]] = entry
                heappush(self._heap, entry)

    def first(self) -> tuple[float, int] | None:
        """The least time and its unit; None if there are no units."""
        while self._heap:
            time, _, unit = entry = self._heap[0]
            if self._entries.get(unit) is not entry:
                heappop(self._heap)
            elif (now := self._now(unit)) is None:
                self.remove(unit)
            elif now[0] == time:
                return time, unit
            else:
                self.put(unit, *now)
        return None

    def time(self, unit: int) -> float:
        """The listed time of a unit. Infinite if it has none."""
        entry = self._entries.get(unit)
        return inf if entry is None else entry[0]

    def remove(self, unit: int) -> None:
        """Remove a unit and its time."""
        del self._entries[unit]
