"""Which SSD slot holds which page, and which slots must not be overwritten. Only bookkeeping, no I/O."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagoda.memory.page import PageRun

Slots = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

UNWRITTEN = -1
"""The slot of a page that was never stored. It reads as zeros and takes no space."""


@dataclass(frozen=True)
class PageTable:
    """Slots and hashes of consecutive pages at one instant."""

    slots: Slots
    """Slot of each page, or UNWRITTEN, shape [pages]."""
    hashes: Hashes
    """xxh3_64 of each page's bytes, shape [pages]. 0 for unwritten pages."""

    @property
    def written(self) -> Slots:
        """The slots to which the table refers."""
        slots: Slots = self.slots[self.slots != UNWRITTEN]
        return slots

    def part(self, run: PageRun) -> "PageTable":
        """The part of the table for a run of its pages, as views."""
        return PageTable(self.slots[run.start : run.stop], self.hashes[run.start : run.stop])

    @staticmethod
    def blank(pages: int) -> "PageTable":
        """A table of pages that were never written."""
        return PageTable(np.full(pages, UNWRITTEN, np.int64), np.zeros(pages, np.uint64))


def slots_of(tables: Iterable[PageTable]) -> Slots:
    """The slots to which any of these tables refers, without duplicates."""
    return np.unique(np.concatenate([np.zeros(0, np.int64), *(table.written for table in tables)]))


class SlotTable:
    """Pages [0, pages) over slots [0, slots): where each page is now, and which references keep each slot.

    The live table has one reference to a slot for each page in it (several after a table was adopted more than once).
    Each pinned `PageTable` of a snapshot or a commit has one reference to each of its slots. Invariants: a slot with
    two or more references is never the target of a store; a slot is free if it has no references and is not the target
    of a running store. Only one caller at a time stores a page, and never while the page is loaded: `begin_load` and
    `begin_store` return None if the caller must wait.

    NOT thread-safe. A tier guards it with a lock. So loads and stores only call numpy functions that keep the GIL: if
    other threads are busy, reacquiring the GIL takes longer than the rest.
    """

    def __init__(self, pages: int, slots: int) -> None:
        if pages < 1 or slots < 1:
            raise ValueError(f"there is nothing to keep in {pages} pages and {slots} slots")
        self.pages = pages
        self.slots = slots
        self.free = slots
        """Slots that a store could use now."""
        self._live = PageTable.blank(pages)
        self._references = np.zeros(slots, np.int32)
        self._loading = np.zeros(pages, np.int32)
        """By page, the number of loads under way."""
        self._storing = np.zeros(pages, np.bool_)
        # A bytearray makes it fast to find the next free slot or several adjacent ones.
        self._is_free = bytearray(b"\x01") * slots
        self._next = 0
        """Where the next search for free slots begins."""

    @property
    def storing(self) -> bool:
        """Whether a store is under way. It may free slots when it ends."""
        return bool(self._storing.any())

    def storing_to(self, run: PageRun) -> bool:
        """Whether a store to one of these pages is under way."""
        return bool(self._storing[run.start : run.stop].any())

    def busy(self, run: PageRun) -> bool:
        """Whether a load or store of one of these pages is under way."""
        return self.storing_to(run) or bool(self._loading[run.start : run.stop].any())

    def table(self, run: PageRun) -> PageTable:
        """A copy of the current table of these pages."""
        part = self._live.part(run)
        return PageTable(part.slots.copy(), part.hashes.copy())

    def begin_load(self, run: PageRun) -> PageTable | None:
        """The pages' slots, which do not change until `end_load`. None while one of the pages is being stored."""
        if self.storing_to(run):
            return None
        self._loading[run.start : run.stop] += 1
        return self.table(run)

    def end_load(self, run: PageRun) -> None:
        """The slots from `begin_load` are no longer read."""
        self._loading[run.start : run.stop] -= 1

    def begin_store(self, run: PageRun) -> Slots | None:
        """The slots to which pages will be written, shape [pages]. None if the store must wait.

        A page goes to its own slot if nothing else refers to that slot, otherwise to a free slot. The store must wait
        while the pages are stored or loaded, or while too few slots are free (`lacks`). In that case nothing has
        changed.
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

    def lacks(self, run: PageRun) -> int:
        """The number of free slots that are missing for a store of these pages. 0 if there are enough."""
        return max(0, int(self._fresh(self._live.part(run).slots).sum()) - self.free)

    def end_store(self, run: PageRun, targets: Slots, hashes: Hashes) -> None:
        """The pages are now in `targets`, with these hashes."""
        live = self._live.part(run)
        moved = live.slots != targets
        left = live.slots[moved & (live.slots != UNWRITTEN)]
        self._references[targets[moved]] += 1
        live.slots[:] = targets
        live.hashes[:] = hashes
        self._storing[run.start : run.stop] = False
        self._dereference(left)

    def abandon_store(self, run: PageRun, targets: Slots) -> None:
        """The store failed: pages keep their old slots. If these were the targets, their bytes are unknown."""
        old = self._live.part(run).slots
        self._storing[run.start : run.stop] = False
        self._release(targets[old != targets])

    def pin(self, table: PageTable) -> None:
        """Keep the slots to which `table` refers. Each is either referred to already, or free (for a commit found on
        disk)."""
        slots = table.written
        for slot in slots[self._references[slots] == 0].tolist():
            if self._is_free[slot]:
                self._is_free[slot] = 0
                self.free -= 1
        np.add.at(self._references, slots, 1)

    def unpin(self, table: PageTable) -> None:
        """Undo `pin`."""
        self._dereference(table.written)

    def grow(self, slots: int) -> None:
        """Add free slots, up to `slots` in all."""
        more = slots - self.slots
        self._references = np.concatenate([self._references, np.zeros(more, np.int32)])
        self._is_free.extend(b"\x01" * more)
        self.slots, self.free = slots, self.free + more

    def extend(self, pages: int) -> None:
        """Add pages that were never stored, up to `pages` in all."""
        more = max(0, pages - self.pages)
        blank = PageTable.blank(more)
        self._live = PageTable(
            np.concatenate([self._live.slots, blank.slots]), np.concatenate([self._live.hashes, blank.hashes])
        )
        self._loading = np.concatenate([self._loading, np.zeros(more, np.int32)])
        self._storing = np.concatenate([self._storing, np.zeros(more, np.bool_)])
        self.pages += more

    def adopt(self, run: PageRun, table: PageTable) -> None:
        """Replace pages that are not busy with those of a table, to whose slots something refers. Their old slots lose
        this reference."""
        live = self._live.part(run)
        np.add.at(self._references, table.written, 1)
        self._dereference(live.written)
        live.slots[:] = table.slots
        live.hashes[:] = table.hashes

    def _fresh(self, old: Slots) -> npt.NDArray[np.bool_]:
        """By page, whether it cannot be stored in its current slot."""
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
        """The slot after that of the page before `first`, so that adjacent pages are also adjacent on the drive."""
        before = int(self._live.slots[first - 1]) if first else UNWRITTEN
        return before + 1 if before != UNWRITTEN else self._next

    def _take(self, count: int, near: int) -> Slots:
        """`count` free slots. They are adjacent and start at `near` if possible."""
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
        """The first of `count` adjacent free slots, at or after `near` if possible, otherwise anywhere. -1 if there are
        none."""
        wanted = b"\x01" * count
        for start in (near, self._next):
            found = self._is_free.find(wanted, start)
            if found >= 0:
                return found
        return self._is_free.find(wanted)


def stretches(chosen: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """[start, stop) of every stretch of True values."""
    if not chosen.any():  # the usual case, for which the rest takes long
        return []
    if chosen.all():
        return [(0, len(chosen))]
    edges = np.flatnonzero(np.diff(np.concatenate(([False], chosen, [False])).astype(np.int8)))
    return [(int(start), int(stop)) for start, stop in zip(edges[::2], edges[1::2], strict=True)]
