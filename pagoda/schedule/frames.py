"""Frames for runs of different lengths, without external fragmentation, at a logarithmic cost."""

from bisect import bisect_left, insort

from pagoda.memory.page import PageRun
from pagoda.memory.pool import PagePool, Window


class Frames:
    """The frames [0, count), divided into slabs at least as long as the longest run. The last slab may be shorter.

    Invariant: no run crosses a border of slabs. So if the runs in use touch k slabs, all other slabs are completely
    free. With one slab more than can be in use at once, there is always room for one more run.
    """

    def __init__(self, count: int, slab: int) -> None:
        self._slab = slab = slab or 1
        self._slabs = [PagePool(min(slab, count - first), first) for first in range(0, count, slab)]
        self.slabs = len(self._slabs)
        self._by_room = sorted((pool.largest_free, index) for index, pool in enumerate(self._slabs))
        """(longest free run, slab), sorted."""
        self.in_use = 0
        self.peak = 0
        """The most frames in use at once so far."""

    def alloc(self, count: int) -> PageRun | None:
        """Allocate `count` adjacent frames in the slab whose longest free run fits tightest. Returns None if no slab
        fits."""
        at = bisect_left(self._by_room, (count, -1))
        if at == len(self._by_room):
            return None
        _, index = self._by_room[at]
        run = self._slabs[index].alloc(count)
        self._moved(at, index)
        self.in_use += count
        self.peak = max(self.peak, self.in_use)
        return run

    def free(self, run: PageRun) -> None:
        """Give a run back."""
        index = self.slab_of(run)
        at = bisect_left(self._by_room, (self._slabs[index].largest_free, index))
        self._slabs[index].free(run)
        self._moved(at, index)
        self.in_use -= run.count

    def slab_of(self, run: PageRun) -> int:
        """The number of the slab that contains a run."""
        return run.start // self._slab

    def window(self, slab: int, count: int) -> Window:
        """The choice of which runs of a slab to free to get `count` adjacent frames, which no slab has now."""
        return Window(self._slabs[slab], count)

    def _moved(self, at: int, index: int) -> None:
        """Update the entry at index `at` of `_by_room`: the longest free run of its slab has changed."""
        del self._by_room[at]
        insort(self._by_room, (self._slabs[index].largest_free, index))
