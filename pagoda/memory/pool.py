"""Which frames are free. Only bookkeeping, without bytes."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator

from pagoda.memory.page import PageRun


class PagePool:
    """The frames `[first, first + frames)`, each free or in exactly one allocated run.

    Invariants: allocated and free runs cover all frames; no two free runs are adjacent, because `free` merges them; the
    same calls in the same order give the same addresses on every machine.

    Cost: neighbors are found with boundary tags, and the free runs are one list sorted by (length, address). So `alloc`
    and `free` are a binary search over the free runs, whatever the number of frames.

    NOT thread-safe.
    """

    def __init__(self, frames: int, first: int = 0) -> None:
        """Raises ValueError if `frames` is below 1 or `first` is negative."""
        if frames < 1 or first < 0:
            raise ValueError(f"a pool needs at least one frame and a start of 0 or more, not {frames} at {first}")
        self.frames = frames
        self._allocated: dict[int, int] = {}  # start -> count
        # Three views of the same free runs. _add_free and _drop_free change them together.
        self._free_by_start: dict[int, int] = {}  # start -> count
        self._free_by_stop: dict[int, int] = {}  # stop -> count
        self._free_by_fit: list[tuple[int, int]] = []  # (count, start), sorted
        self._add_free(first, frames)

    @property
    def largest_free(self) -> int:
        """The length of the longest free run, which is the largest `count` that `alloc` can serve now."""
        return self._free_by_fit[-1][0] if self._free_by_fit else 0

    def alloc(self, count: int = 1) -> PageRun | None:
        """`count` adjacent frames from the shortest free run that holds them (the lowest address if tied).

        Returns None if no free run is long enough. Raises ValueError if `count` is below 1.
        """
        if count < 1:
            raise ValueError(f"cannot allocate {count} frames: the minimum is 1")
        index = bisect_left(self._free_by_fit, (count, -1))
        if index == len(self._free_by_fit):
            return None
        size, start = self._free_by_fit[index]
        self._drop_free(start, size)
        if size > count:
            self._add_free(start + count, size - count)
        self._allocated[start] = count
        return PageRun(start, count)

    def free(self, run: PageRun) -> None:
        """Free a run that `alloc` returned. Raises ValueError for any other run, and changes nothing then."""
        count = self._allocated.get(run.start)
        if count is None:
            raise ValueError(f"{run} is not allocated: no run starts at frame {run.start}")
        if count != run.count:
            raise ValueError(f"{run} is not allocated: the run at frame {run.start} has {count} frames")
        del self._allocated[run.start]
        start, count = run.start, run.count
        before = self._free_by_stop.get(start)
        if before is not None:
            self._drop_free(start - before, before)
            start, count = start - before, count + before
        after = self._free_by_start.get(run.stop)
        if after is not None:
            self._drop_free(run.stop, after)
            count += after
        self._add_free(start, count)

    def tiles(self, start: int, stop: int) -> Iterator[tuple[PageRun, bool]]:
        """Every run of [start, stop) in address order, and whether it is free. Runs begin at `start` and end at
        `stop`."""
        while start < stop:
            taken = self._allocated.get(start)
            run = PageRun(start, self._free_by_start[start] if taken is None else taken)
            yield run, taken is None
            start = run.stop

    def free_before(self, run: PageRun) -> int:
        """The number of free frames directly before a run."""
        return self._free_by_stop.get(run.start, 0)

    def free_after(self, run: PageRun) -> int:
        """The number of free frames directly after a run."""
        return self._free_by_start.get(run.stop, 0)

    def _add_free(self, start: int, count: int) -> None:
        self._free_by_start[start] = count
        self._free_by_stop[start + count] = count
        insort(self._free_by_fit, (count, start))

    def _drop_free(self, start: int, count: int) -> None:
        del self._free_by_start[start]
        del self._free_by_stop[start + count]
        del self._free_by_fit[bisect_left(self._free_by_fit, (count, start))]


class Window:
    """Finds the cheapest runs to free, so that `alloc(count)` succeeds in a pool that has no free run of this length.

    The caller offers runs one after another, the cheapest first, until `count` adjacent frames are free or in offered
    runs. So the most expensive run that is freed is as cheap as possible. If the last offer leaves a choice, the fewest
    frames are freed, and of these the ones at the lowest address. The pool must not change meanwhile.

    If the run whose next use is furthest away is offered first, this is PatrickStar's eviction, for runs of pages.

    A *stretch* is a maximal row of adjacent runs that are offered or free. Cost: an offer joins stretches at their
    ends, as `PagePool` joins free runs, in a time that does not depend on their number.
    """

    def __init__(self, pool: PagePool, count: int) -> None:
        self._pool = pool
        self._count = count
        # The stretches, by either end.
        self._start_by_stop: dict[int, int] = {}
        self._stop_by_start: dict[int, int] = {}

    def offer(self, run: PageRun) -> list[PageRun] | None:
        """Offer an allocated run. Returns the runs to free, in address order, or None if more must be offered."""
        start = self._start_by_stop.pop(run.start, None)
        if start is None:
            start = run.start - self._pool.free_before(run)
        stop = self._stop_by_start.pop(run.stop, None)
        if stop is None:
            stop = run.stop + self._pool.free_after(run)
        self._start_by_stop[stop], self._stop_by_start[start] = start, stop
        return self._cheapest(start, stop) if stop - start >= self._count else None

    def _cheapest(self, start: int, stop: int) -> list[PageRun]:
        """The allocated runs to free for `count` adjacent frames of a stretch, with the fewest frames in total."""
        cheapest: list[PageRun] = []
        least = stop - start + 1
        window: deque[tuple[PageRun, int]] = deque()  # each run, and how many of its frames must be freed
        frames = freed = 0
        for run, is_free in self._pool.tiles(start, stop):
            window.append((run, 0 if is_free else run.count))
            frames += run.count
            freed += window[-1][1]
            while frames - window[0][0].count >= self._count:
                left, left_freed = window.popleft()
                frames -= left.count
                freed -= left_freed
            if frames >= self._count and freed < least:
                cheapest, least = [run for run, freed in window if freed], freed
        return cheapest
