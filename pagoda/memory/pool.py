"""Which frames are free. Only bookkeeping, without bytes."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator

from pagoda.memory.page import PageRun

Price = Callable[[PageRun], float | None]
"""The cost of evicting an allocated run. Lower is better (for example minus its next use in s). None pins the run."""


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
        self.first = first
        self.in_use = 0
        """The number of allocated frames."""
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
        _check_count(count)
        index = bisect_left(self._free_by_fit, (count, -1))
        if index == len(self._free_by_fit):
            return None
        size, start = self._free_by_fit[index]
        self._drop_free(start, size)
        if size > count:
            self._add_free(start + count, size - count)
        self._allocated[start] = count
        self.in_use += count
        return PageRun(start, count)

    def free(self, run: PageRun) -> None:
        """Free a run that `alloc` returned. Raises ValueError for any other run, and changes nothing then."""
        count = self._allocated.get(run.start)
        if count is None:
            raise ValueError(f"{run} is not allocated: no run starts at frame {run.start}")
        if count != run.count:
            raise ValueError(f"{run} is not allocated: the run at frame {run.start} has {count} frames")
        del self._allocated[run.start]
        self.in_use -= run.count
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

    def cheapest_window(self, count: int, price: Price) -> list[PageRun] | None:
        """The allocated runs to free, at the least cost, so that `alloc(count)` succeeds.

        A window is `count` adjacent frames, free or in runs whose `price` is not None. Its cost is (highest price,
        total frames of the runs that it overlaps). The cheapest window is chosen, with the lowest address if tied.
        Returns the runs that it overlaps in address order, [] if `count` frames fit already, and None if there is no
        window. `price` is called at most once for each run and must not return NaN. Linear in the number of runs.
        Raises ValueError if `count` is below 1.

        With price = minus next use, this is PatrickStar's furthest-next-use eviction, for runs of pages.
        """
        _check_count(count)
        if self.largest_free >= count:
            return []
        if self.frames < count:
            return None
        # Slide over the tiles (free or allocated runs). The cost never decreases as a window grows, so only the
        # shortest stretches of tiles that hold `count` frames matter: one for each right end.
        stretch: deque[tuple[int, int, bool]] = deque()
        ceiling: deque[tuple[float, int]] = deque()  # (price, start), prices falling: [0] is the highest
        frames = evicted = 0
        last_start = self.first + self.frames - count
        best: list[PageRun] | None = None
        best_cost = (float("inf"), self.frames + 1)
        for tile in self._tiles():
            start, size, is_free = tile
            if not is_free:
                cost = price(PageRun(start, size))
                if cost is None:
                    if start + size > last_start:
                        break  # what follows is too short
                    stretch.clear()
                    ceiling.clear()
                    frames = evicted = 0
                    continue
                while ceiling and ceiling[-1][0] <= cost:
                    ceiling.pop()
                ceiling.append((cost, start))
                evicted += size
            stretch.append(tile)
            frames += size
            while frames - stretch[0][1] >= count:
                old_start, old_size, old_is_free = stretch.popleft()
                frames -= old_size
                if not old_is_free:
                    evicted -= old_size
                    if ceiling[0][1] == old_start:
                        ceiling.popleft()
            # No single free tile holds `count` frames, so a stretch that does has at least one run to evict.
            if frames >= count and (ceiling[0][0], evicted) < best_cost:
                best_cost = (ceiling[0][0], evicted)
                best = [PageRun(start, size) for start, size, is_free in stretch if not is_free]
        return best

    def _tiles(self) -> Iterator[tuple[int, int, bool]]:
        """(start, count, is_free) of every run, in address order, found with the boundary tags."""
        position, stop = self.first, self.first + self.frames
        while position < stop:
            taken = self._allocated.get(position)
            count = self._free_by_start[position] if taken is None else taken
            yield position, count, taken is None
            position += count

    def _add_free(self, start: int, count: int) -> None:
        self._free_by_start[start] = count
        self._free_by_stop[start + count] = count
        insort(self._free_by_fit, (count, start))

    def _drop_free(self, start: int, count: int) -> None:
        del self._free_by_start[start]
        del self._free_by_stop[start + count]
        del self._free_by_fit[bisect_left(self._free_by_fit, (count, start))]


def _check_count(count: int) -> None:
    if count < 1:
        raise ValueError(f"cannot allocate {count} frames: the minimum is 1")
