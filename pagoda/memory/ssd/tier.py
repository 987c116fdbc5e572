"""The SSD tier: pages that are verified when read and, once frozen, never overwritten."""

import threading
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pagoda.errors import BudgetError, StorageError
from pagoda.memory.page import Run
from pagoda.memory.sizes import format_bytes
from pagoda.memory.ssd.commits import Reference
from pagoda.memory.ssd.committed import CommittedPages
from pagoda.memory.ssd.orphans import gc_hint
from pagoda.memory.ssd.record import StoreRecord
from pagoda.memory.ssd.slots import PageTable, Slots, SlotTable, slots_of
from pagoda.memory.ssd.store import PageStore
from pagoda.memory.ssd.xxh3 import hashes_of
from pagoda.memory.tier import Tier

_LOOK_AGAIN_S = 0.5
"""How often a store that waits for free slots looks whether anybody is still about to free some."""

live: "weakref.WeakValueDictionary[str, SSDTier]" = weakref.WeakValueDictionary()
"""store id -> the tier that has it open in this process."""


@dataclass(eq=False)
class _Kept:
    """What a freeze keeps. The tier has it too, because its holder may be dropped without `close`."""

    table: PageTable
    holder: "weakref.ref[FrozenPages]"
    reference: Reference | None = None
    """Once it is committed; then the references to the slots are the commit's."""


class SSDTier(Tier):
    """Pages on one or several drives, out of place and verified.

    Where a page lies is the slot table's business, not the run's: a store to a page that nothing else refers to
    overwrites its slot, and one to a page that a freeze, a commit or a fork keeps goes to a free slot. `spare` slots
    beyond the pages make that possible: a commit of all pages takes at most as many slots as pages have changed since.

    Every store hashes each page (xxh3_64), every load compares. Pages never stored read as zeros. One load or store is
    atomic with every other that touches its pages, and with `freeze`.

    The directories are locked from the constructor to `close`. Pages of commits that `PageStore` finds there can be
    adopted.

    Thread-safe. `_changed` guards the slot table and all bookkeeping; I/O and hashing run outside of it.
    """

    def __init__(
        self,
        name: str,
        directories: Mapping[Path, int | None],
        pages: int,
        page_bytes: int,
        spare: int = 0,
    ) -> None:
        """`pages` that can be allocated, and `spare` slots; `directories` has most bytes of each, None for no limit.

        Raises StorageError and BudgetError as `PageStore` does.
        """
        super().__init__(name, page_bytes, pages)
        self._spare = spare
        self._changed = threading.Condition()
        self._durable: set[Run] = set()
        """Runs that `freeze` keeps."""
        self._kept: list[_Kept] = []
        """Freezes whose holder may yet free slots."""
        self._closed = False
        self._store = PageStore(directories, pages, page_bytes, spare)
        self._table = SlotTable(pages, self._store.file.slots)
        self._commits = {commit.commit: commit.table for commit in self._store.commits}
        for table in self._commits.values():
            self._table.pin(table)
        live[self._store.record.id] = self

    @property
    def commits(self) -> frozenset[str]:
        """Ids of the commits that keep slots of this store."""
        with self._changed:
            return frozenset(self._commits)

    @property
    def record(self) -> StoreRecord:
        """Its store."""
        return self._store.record

    @property
    def directories(self) -> tuple[Path, ...]:
        """The directories that it has locked."""
        return tuple(self._store.record.directories)

    def room_beside(self, gone: Collection[str]) -> int:
        """Slots beyond those of all pages and of the commits that are here, without the commits `gone`."""
        with self._changed:
            kept = slots_of(table for commit, table in self._commits.items() if commit not in gone)
        return self._table.slots - self._table.pages - len(kept)

    @property
    def bytes_on_drives(self) -> dict[Path, int]:
        """Bytes of the page file in each directory."""
        return {file.directory: file.nbytes for file in self._store.file.files}

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all pages and spare slots."""
        return super().capacity_bytes + self._spare * self.page_bytes

    @property
    def peak_bytes(self) -> int:
        """Most bytes of pages in use at once since creation, and all spare slots: their space is reserved."""
        return super().peak_bytes + self._spare * self.page_bytes

    def alloc(self, pages: int, transient: bool = False) -> Run:
        """Contiguous pages. Those of a `transient` run are in no freeze or commit, and so need no spare slots."""
        run = super().alloc(pages)
        if not transient:
            with self._changed:
                self._durable.add(run)
        return run

    def free(self, run: Run) -> None:
        """Give back a run; its slots are free as far as nothing else refers to them."""
        super().free(run)
        with self._changed:
            self._table.forget(run.start, run.count)
            self._durable.discard(run)
            self._changed.notify_all()

    def load(self, run: Run, offset_bytes: int, into: memoryview) -> None:
        """Read whole pages; their content is that of the latest store that has ended.

        Raises ValueError when the bytes leave the run, and unless offset and length are multiples of the page size,
        CorruptPageError for bytes that are not those that were stored, StorageError when the disk fails.
        """
        first, count = self._pages_of(run, offset_bytes, into.nbytes)
        with self._changed:
            while (table := self._table.begin_load(first, count)) is None:
                self._changed.wait()
        self._read(table, into)

    def store(self, run: Run, offset_bytes: int, data: memoryview) -> None:
        """Write whole pages, where nothing that is kept lies.

        Waits for a free slot while somebody holds a freeze. Raises ValueError as `load` does, StorageError when the
        disk fails, BudgetError when no slot is left; then pages may hold neither the old bytes nor the new, and
        loading them says so.
        """
        first, count = self._pages_of(run, offset_bytes, data.nbytes)
        hashes = hashes_of(data, self.page_bytes)
        with self._changed:
            targets = self._targets(first, count)
        try:
            self._store.file.write(targets, data)
        except BaseException:
            with self._changed:
                self._table.abandon_store(first, targets)
                self._changed.notify_all()
            raise
        with self._changed:
            self._table.end_store(first, targets, hashes)
            self._changed.notify_all()

    def freeze(self) -> "FrozenPages":
        """Keep every allocated page that is not transient as it is now, without I/O. Stores under way end first."""
        with self._changed:
            while self._table.storing:
                self._changed.wait()
            frozen = self.begin_freeze()
            for run in self._durable:
                frozen.add(run)
            return frozen

    def begin_freeze(self) -> "FrozenPages":
        """A freeze of no pages yet: `FrozenPages.add` keeps each run as it is when that is called."""
        return FrozenPages(self)

    def adopt(self, run: Run, committed: "CommittedPages", its_run: Run) -> bool:
        """Let a run have the content of committed pages, without I/O. False, and nothing has changed, when these are
        not this store's, or no longer committed: then copy.
        """
        self._check_allocated(run)
        with self._changed:
            here = self._commits.get(committed.commit) if committed.store == self._store.record.id else None
            if here is None or run.count != its_run.count:
                return False
            self._wait_for_stores(run)
            self._table.adopt(run.start, here.part(its_run.start, its_run.count))
            self._changed.notify_all()
            return True

    def fork(self, run: Run) -> "Fork":
        """Keep a run's pages beside what is stored to them from now on. Takes a spare slot for each page stored to."""
        return Fork(self, run)

    def forget(self, commit: str) -> None:
        """Delete a commit of this store durably, then free its slots; one that does not exist is none."""
        self._store.record.remove_commit(commit)
        with self._changed:
            table = self._commits.pop(commit, None)
            if table is not None:
                self._table.unpin(table)
                self._changed.notify_all()

    def close(self) -> None:
        """Close the files, delete them if nothing is committed, and unlock the directories. Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        live.pop(self._store.record.id, None)
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, table: PageTable, into: memoryview) -> None:
        """Load pages that `begin_load` has given, and end that."""
        try:
            self._store.file.read(table, into)
        finally:
            with self._changed:
                self._table.end_load(table)
                self._changed.notify_all()

    def _pages_of(self, run: Run, offset_bytes: int, nbytes: int) -> tuple[int, int]:
        """(first page, pages) of a part of a run."""
        self._check(run, offset_bytes, nbytes)
        if offset_bytes % self.page_bytes or nbytes % self.page_bytes:
            raise ValueError(
                f"asked for {nbytes} bytes at offset {offset_bytes} of {run} in tier {self.name!r}, which moves whole "
                f"pages of {self.page_bytes} bytes"
            )
        return run.start + offset_bytes // self.page_bytes, nbytes // self.page_bytes

    def _pin(self, run: Run) -> PageTable:
        """Keep a run's pages as they are once the stores to it have ended."""
        self._wait_for_stores(run)
        table = self._table.table(run.start, run.count)
        self._table.pin(table)
        return table

    def _wait_for_stores(self, run: Run) -> None:
        while self._table.storing_to(run.start, run.count):
            self._changed.wait()

    def _targets(self, first: int, count: int) -> Slots:
        """Slots to write to, waited for as long as somebody is about to free some."""
        while (targets := self._table.begin_store(first, count)) is None:
            if self._table.lacks(first, count):
                self._let_go_of_dropped()
                if not self._table.lacks(first, count):
                    continue
                if not (self._kept or self._table.in_transit):
                    raise self._exhausted()
            if self._closed:
                raise StorageError("the SSD tier is closed")
            self._changed.wait(_LOOK_AGAIN_S)
        return targets

    def _let_go_of_dropped(self) -> None:
        for kept in [kept for kept in self._kept if kept.holder() is None]:
            self._let_go(kept)

    def _let_go(self, kept: _Kept) -> None:
        """Nobody need wait for this freeze any more; unless it was committed, its slots are free."""
        self._kept.remove(kept)
        if kept.reference is None:
            self._table.unpin(kept.table)
        self._changed.notify_all()

    def _exhausted(self) -> BudgetError:
        kept = len(self._commits)
        page = self.page_bytes
        return BudgetError(
            f"no slot of tier {self.name!r} is free for a page whose old content is kept: of {self._table.slots} slots "
            f"{self._pool.in_use} are for pages in use, and {kept} checkpoints keep others "
            f"({format_bytes(self._table.slots * page)} in all, {self._spare} spare slots). Delete checkpoints, keep "
            f"fewer (keep_checkpoints), or raise memory.ssd='DIR:SIZE'.{gc_hint(self.directories)}",
            tier=self.name,
        )


class FrozenPages:
    """The pages of a tier as they were, each run at the instant when it was added, whatever has been stored since.

    Stores that find no free slot wait as long as its holder may yet free some: until `close`, or until the object is
    dropped. So close it (or leave its `with`) only after older commits have been forgotten.
    """

    def __init__(self, tier: SSDTier) -> None:
        self._tier = tier
        self._kept = _Kept(PageTable.blank(tier._table.pages), weakref.ref(self))
        with tier._changed:
            tier._kept.append(self._kept)

    def add(self, run: Run) -> None:
        """Keep a run that is not kept yet as it is now; what is under way to it ends first. Not after `commit`."""
        self._tier._check_allocated(run)
        with self._tier._changed:
            kept = self._open().table.part(run.start, run.count)
            now = self._tier._pin(run)
            kept.slots[:] = now.slots
            kept.hashes[:] = now.hashes

    def load(self, run: Run, offset_bytes: int, into: memoryview) -> None:
        """Read whole pages as they were. Raises as `SSDTier.load` does."""
        first, count = self._tier._pages_of(run, offset_bytes, into.nbytes)
        with self._tier._changed:
            table = self._tier._table.begin_load_of(self._kept.table.part(first, count))
        self._tier._read(table, into)

    def commit(self, checkpoint: Path, checkpoint_id: str) -> dict[str, Any]:
        """Keep the pages beyond the end of the process, for the checkpoint that has, or will have, this id.

        Returns a reference to them, as JSON, for `open_commit`. A crash at any instant leaves the commit as a whole
        or nothing of it. The path is where the checkpoint is or will be: it may be moved later.

        Raises StorageError when that fails; then nothing is committed.
        """
        if self._kept.reference is None:
            with self._tier._changed:
                table = self._open().table
            reference = self._tier._store.commit(table, checkpoint, checkpoint_id)
            with self._tier._changed:
                self._tier._commits[reference.commit] = table
                self._kept.reference = reference
        return self._kept.reference.to_json()

    def release(self) -> None:
        """Keep the pages no longer, in memory and, if they were committed, on disk. Idempotent."""
        if self._kept.reference is not None:
            self._tier.forget(self._kept.reference.commit)
        self.close()

    def close(self) -> None:
        """Have done with it: what was committed stays, what was not is released. Idempotent."""
        with self._tier._changed:
            if self._kept in self._tier._kept:
                self._tier._let_go(self._kept)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> _Kept:
        if self._kept not in self._tier._kept:
            raise ValueError("the frozen pages were released")
        return self._kept


class Fork:
    """What a run held before an update that may have to be undone. Ends with `keep` or `undo`, once."""

    def __init__(self, tier: SSDTier, run: Run) -> None:
        self._tier = tier
        self._run = run
        tier._check_allocated(run)
        with tier._changed:
            self._table: PageTable | None = tier._pin(run)

    def keep(self) -> None:
        """Keep what has been stored since; the old pages' slots are free."""
        self._end(undo=False)

    def undo(self) -> None:
        """Have the old pages back; the slots of what has been stored since are free. Without I/O."""
        self._end(undo=True)

    def _end(self, undo: bool) -> None:
        with self._tier._changed:
            table, self._table = self._table, None
            if table is None:
                raise ValueError(f"the fork of {self._run} has ended")
            if undo:
                self._tier._wait_for_stores(self._run)
                self._tier._table.adopt(self._run.start, table)
            self._tier._table.unpin(table)
            self._tier._changed.notify_all()
