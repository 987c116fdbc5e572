"""Which slot of the SSD holds which page, and which slots nobody may overwrite. Pure bookkeeping, no I/O."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagoda.memory.page import Run

Slots = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

UNWRITTEN = -1
"""The slot of a page that was never stored: it reads as zeros and takes no space."""


@dataclass(frozen=True)
class PageTable:
    """Slot and hash of consecutive pages at one instant."""

    slots: Slots
    """Slot of each page, or UNWRITTEN, shape [pages]."""
    hashes: Hashes
    """xxh3_64 of each page's bytes, shape [pages]; 0 where unwritten."""

    @property
    def written(self) -> Slots:
        """The slots it refers to."""
        slots: Slots = self.slots[self.slots != UNWRITTEN]
        return slots

    def part(self, run: Run) -> "PageTable":
        """Those of a run of its pages, as views."""
        return PageTable(self.slots[run.start : run.stop], self.hashes[run.start : run.stop])

    @staticmethod
    def blank(pages: int) -> "PageTable":
        """Pages that were never written."""
        return PageTable(np.full(pages, UNWRITTEN, np.int64), np.zeros(pages, np.uint64))


def slots_of(tables: Iterable[PageTable]) -> Slots:
    """The slots that some of these tables refer to, each once."""
    return np.unique(np.concatenate([np.zeros(0, np.int64), *(table.written for table in tables)]))


class SlotTable:
    """Pages [0, pages) over slots [0, slots): where each page is now, and what keeps each slot.

    A slot is kept by references: one of the live table for each page in it (several after a table was adopted more
    than once), and one of every pinned `PageTable` (of a snapshot or a commit) that has it. Invariants: a slot
    with two references or more is never the target of a store; a slot without references, and that no store is going
    to, is free. A page is stored to by one caller at a time, and never while it is loaded: `begin_load` and
    `begin_store` say None where one has to wait.

    NOT thread-safe; a tier has a lock around it. So what every load and store calls keeps to numpy functions that keep
    the GIL: beside busy threads, waiting for it again takes longer than the rest.
    """

    def __init__(self, pages: int, slots: int) -> None:
        if pages < 1 or slots < pages:
            raise ValueError(f"{pages} pages do not fit {slots} slots")
        self.pages = pages
        self.slots = slots
        self.free = slots
        """Slots that a store could take now."""
        self._live = PageTable.blank(pages)
        self._references = np.zeros(slots, np.int32)
        self._loading = np.zeros(pages, np.int32)
        """How many loads of each page are under way."""
        self._storing = np.zeros(pages, np.bool_)
        # A bytearray, so that the next free slot, or several adjoining ones, are found at the speed of memory.
        self._is_free = bytearray(b"\x01") * slots
        self._next = 0
        """Where the search for free slots goes on."""

    @property
    def storing(self) -> bool:
        """Whether a store is under way: it may free slots when it ends."""
        return bool(self._storing.any())

    def storing_to(self, run: Run) -> bool:
        """Whether a store to one of these pages is under way."""
        return bool(self._storing[run.start : run.stop].any())

    def busy(self, run: Run) -> bool:
        """Whether a load or store of one of these pages is under way."""
        return self.storing_to(run) or bool(self._loading[run.start : run.stop].any())

    def table(self, run: Run) -> PageTable:
        """Where these pages are now: a copy."""
        part = self._live.part(run)
        return PageTable(part.slots.copy(), part.hashes.copy())

    def begin_load(self, run: Run) -> PageTable | None:
        """The pages' slots, which stay what they are until `end_load`; None while one of the pages is being stored."""
        if self.storing_to(run):
            return None
        self._loading[run.start : run.stop] += 1
        return self.table(run)

    def end_load(self, run: Run) -> None:
        """What `begin_load` gave is no longer read."""
        self._loading[run.start : run.stop] -= 1

    def begin_store(self, run: Run) -> Slots | None:
        """Where pages are to be written, shape [pages]; None while one has to wait.

        A page goes to its own slot if nothing else refers to that, else to a free one. One has to wait while the
        pages are stored or loaded, or while too few slots are free (`lacks`); then nothing has changed.
        """
        if self.busy(run) or self.lacks(run):
            return None
        old = self._live.part(run).slots
        fresh = self._fresh(old)
        targets = old.copy()
        for start, stop in stretches(fresh):
            near = int(targets[start - 1]) + 1 if start else self._after(run.start)
            targets[start:stop] = self._take(stop - start, near)
        self._storing[run.start : run.stop] = True
        return targets

    def lacks(self, run: Run) -> int:
        """Free slots that a store of these pages needs and there are not; 0 when there are enough."""
        return max(0, int(self._fresh(self._live.part(run).slots).sum()) - self.free)

    def end_store(self, run: Run, targets: Slots, hashes: Hashes) -> None:
        """The pages now lie in `targets`, with these hashes."""
        live = self._live.part(run)
        moved = live.slots != targets
        left = live.slots[moved & (live.slots != UNWRITTEN)]
        self._references[targets[moved]] += 1
        live.slots[:] = targets
        live.hashes[:] = hashes
        self._storing[run.start : run.stop] = False
        self._dereference(left)

    def abandon_store(self, run: Run, targets: Slots) -> None:
        """The store failed: pages keep their old slots, whose bytes are unknown where those were the targets."""
        old = self._live.part(run).slots
        self._storing[run.start : run.stop] = False
        self._release(targets[old != targets])

    def pin(self, table: PageTable) -> None:
        """Keep what `table` refers to. Every slot of it is referred to already, or free (a commit found on disk)."""
        slots = table.written
        for slot in slots[self._references[slots] == 0].tolist():
            if self._is_free[slot]:
                self._is_free[slot] = 0
                self.free -= 1
        np.add.at(self._references, slots, 1)

    def unpin(self, table: PageTable) -> None:
        """Undo `pin`."""
        self._dereference(table.written)

    def adopt(self, run: Run, table: PageTable) -> None:
        """Let pages that are not busy be those of a pinned table; their old slots lose this reference."""
        live = self._live.part(run)
        np.add.at(self._references, table.written, 1)
        self._dereference(live.written)
        live.slots[:] = table.slots
        live.hashes[:] = table.hashes

    def _fresh(self, old: Slots) -> npt.NDArray[np.bool_]:
        """Which pages cannot be stored where they are."""
        fresh: npt.NDArray[np.bool_] = (old == UNWRITTEN) | (self._references[old] != 1)
        return fresh

    def _dereference(self, slots: Slots) -> None:
        if not len(slots):
            return
        np.subtract.at(self._references, slots, 1)
        self._release(slots[self._references[slots] == 0])

    def _release(self, slots: Slots) -> None:
        """Make slots without references free."""
        for slot in slots.tolist():
            if not self._is_free[slot]:
                self._is_free[slot] = 1
                self.free += 1

    def _after(self, first: int) -> int:
        """The slot behind that of the page before `first`, so that adjoining pages adjoin on the drive too."""
        before = int(self._live.slots[first - 1]) if first else UNWRITTEN
        return before + 1 if before != UNWRITTEN else self._next

    def _take(self, count: int, near: int) -> Slots:
        """`count` free slots, adjoining if there are such, from `near` on if there are such."""
        taken: list[int] = []
        while len(taken) < count:
            size = count - len(taken)
            start = self._find(size, near)
            while start < 0:
                size = max(1, size // 2)
                start = self._find(size, near)
            self._is_free[start : start + size] = bytes(size)
            taken.extend(range(start, start + size))
            self._next = near = start + size
        self.free -= count
        return np.array(taken, np.int64)

    def _find(self, count: int, near: int) -> int:
        """The first of `count` adjoining free slots, at `near` or behind it, else anywhere; -1 if there are none."""
        wanted = b"\x01" * count
        for start in (near, self._next):
            found = self._is_free.find(wanted, start)
            if found >= 0:
                return found
        return self._is_free.find(wanted)


def stretches(chosen: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """[start, stop) of every stretch of True."""
    if chosen.all():
        return [(0, len(chosen))] if len(chosen) else []
    edges = np.flatnonzero(np.diff(np.concatenate(([False], chosen, [False])).astype(np.int8)))
    return [(int(start), int(stop)) for start, stop in zip(edges[::2], edges[1::2], strict=True)]
