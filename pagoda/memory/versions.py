"""Versions of states in one tier: runs of pages with counted references. Only bookkeeping, without bytes."""

from collections.abc import Sequence
from heapq import heappop, heappush

from pagoda.memory.page import PageRun
from pagoda.memory.pool import PagePool

EMPTY = PageRun(0, 0)
"""The run of a state without pages. It needs no room and is never shared."""


class VersionPool:
    """The pages of one tier that hold states, each in a run of its own.

    Whoever may still read a run refers to it (`pin`). An update changes a run in place if nothing else refers to it.
    Otherwise it writes the next version to another run. The run of the old version is free once nothing refers to it.

    Pages are divided once, into runs of exactly the sizes that states have: one for each state, and spare ones. The
    rest is a reserve for runs of any size. A run of a state may end up anywhere, but there are always as many runs of
    each size. So whatever moved before, all spare runs are free once each state has one run.

    NOT thread-safe.
    """

    def __init__(self, homes: Sequence[int], spares: Sequence[int] = (), reserve: int = 0) -> None:
        """`homes`: the pages of each state. The first `alloc` of each is in this order from the tier's first page on.
        `spares`: the pages of each spare run."""
        self._free: dict[int, list[int]] = {}
        """Pages -> the first page of each free run of this size, as a heap."""
        self._references: dict[int, int] = {}
        """First page of a run -> the number of its references."""
        start = 0
        for count in (*homes, *spares):
            if count:
                heappush(self._free.setdefault(count, []), start)
            start += count
        self._divided = start
        """The reserve begins here."""
        self.pages = start + reserve
        self._reserve = PagePool(reserve, start) if reserve else None
        self.in_use = 0
        """Pages of runs with references."""

    def alloc(self, count: int) -> PageRun | None:
        """A run of `count` pages with one reference, or None if there is no room."""
        if not count:
            return EMPTY
        if free := self._free.get(count):
            run = PageRun(heappop(free), count)
        else:
            found = None if self._reserve is None else self._reserve.alloc(count)
            if found is None:
                return None
            run = found
        self._references[run.start] = 1
        self.in_use += count
        return run

    def has(self, count: int) -> bool:
        """Whether `alloc` would find a run of `count` pages now."""
        reserve = 0 if self._reserve is None else self._reserve.largest_free
        return not count or bool(self._free.get(count)) or reserve >= count

    def pin(self, run: PageRun) -> None:
        """Add a reference. Raises KeyError if the run has none."""
        if run.count:
            self._references[run.start] += 1

    def unpin(self, run: PageRun) -> bool:
        """Take a reference away. Returns whether the run is free now. Raises KeyError if it has no reference."""
        if not run.count:
            return False
        self._references[run.start] -= 1
        if self._references[run.start]:
            return False
        del self._references[run.start]
        self.in_use -= run.count
        if run.start < self._divided:
            heappush(self._free[run.count], run.start)
        else:
            assert self._reserve is not None
            self._reserve.free(run)
        return True

    def is_shared(self, run: PageRun) -> bool:
        """Whether a run has more than one reference."""
        return self._references.get(run.start, 0) > 1 if run.count else False
