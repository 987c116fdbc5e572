"""The SSD tier: pages that are verified when read and, once frozen, never overwritten."""

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from pagoda.errors import BudgetError, StorageError
from pagoda.memory.commits import Reference, StoreRecord, locate
from pagoda.memory.committed import CommittedPages
from pagoda.memory.frozen import Fork, FrozenPages
from pagoda.memory.identity import checkpoint_id_of
from pagoda.memory.lock import DirectoryLock
from pagoda.memory.orphans import gc_hint
from pagoda.memory.page import Run
from pagoda.memory.page_store import PageStore
from pagoda.memory.sizes import format_bytes
from pagoda.memory.slots import PageTable, Slots, SlotTable
from pagoda.memory.tier import Tier
from pagoda.memory.verify import read_pages
from pagoda.memory.xxh3 import hashes_of

_log = logging.getLogger("pagoda")

_LOOK_AGAIN_S = 0.5
"""How often a store that waits for free slots looks whether anybody is still about to free some."""

_live: "weakref.WeakValueDictionary[str, SSDTier]" = weakref.WeakValueDictionary()
"""store id -> the tier that has it open in this process."""


@dataclass
class _Hold:
    """A freeze, as its tier sees it."""

    holder: "weakref.ref[FrozenPages]"
    table: PageTable
    committed: bool = False
    """Whether the references to the slots are the commit's now."""


class SSDTier(Tier):
    """Pages on one or several drives, out of place and verified.

    Where a page lies is the slot table's business, not the run's: a store to a page that nothing else refers to
    overwrites its slot, and one to a page that a freeze, a commit or a fork keeps goes to a free slot. `spare` slots
    beyond the pages make that possible: a commit of all pages takes at most as many slots as pages have changed since.

    Every store hashes each page (xxh3_64), every load compares. Pages never stored read as zeros. One load or store is
    atomic with every other that touches its pages, and with `freeze`.

    The directories are locked from the constructor to `close`. Until the first commit the files have no name, where
    the file system can do that, so that nothing is left of a process that ends before. A store of the same page size
    that commits have left in the same directories is used on, so that its pages can be adopted.

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

        Raises StorageError when a directory is missing, held by somebody else, cannot be written or has not the
        space, BudgetError when the limits leave too little beside what commits in the directories keep.
        """
        super().__init__(name, page_bytes, pages)
        self._spare = spare
        self._changed = threading.Condition()
        self._durable: set[Run] = set()
        """Runs that freezes and commits keep."""
        self._freezing = 0
        self._holds: list[_Hold] = []
        """Freezes whose holder may yet free slots."""
        self._closed = False
        self._store = PageStore(directories, pages, page_bytes, spare)
        self._table = SlotTable(pages, self._store.file.slots)
        self._commits = {commit.commit: commit.table for commit in self._store.commits()}
        for table in self._commits.values():
            self._table.pin(table)
        _live[self._store.record.id] = self

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
            kept = [table.written for commit, table in self._commits.items() if commit not in gone]
        slots = len(np.unique(np.concatenate(kept))) if kept else 0
        return self._table.slots - self._table.pages - slots

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

        Raises ValueError as the contract says and unless offset and length are multiples of the page size,
        CorruptPageError for bytes that are not those that were stored, StorageError when the disk fails.
        """
        first, count = self.pages_of(run, offset_bytes, into.nbytes)
        with self._changed:
            while (table := self._table.begin_load(first, count)) is None:
                self._changed.wait()
        self._read(table, into)

    def store(self, run: Run, offset_bytes: int, data: memoryview) -> None:
        """Write whole pages, where nothing that is kept lies.

        Waits for a free slot while somebody holds a freeze. Raises ValueError as the contract says and unless offset
        and length are multiples of the page size, StorageError when the disk fails, BudgetError when no slot is
        left; then pages may hold neither the old bytes nor the new, and loading them says so.
        """
        first, count = self.pages_of(run, offset_bytes, data.nbytes)
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
            self._freezing += 1
            try:
                while self._table.storing:
                    self._changed.wait()
                live = self._table.table(0, self._table.pages)
                kept = PageTable.blank(self._table.pages)
                for run in self._durable:
                    kept.slots[run.start : run.stop] = live.slots[run.start : run.stop]
                    kept.hashes[run.start : run.stop] = live.hashes[run.start : run.stop]
                self._table.pin(kept)
            finally:
                self._freezing -= 1
                self._changed.notify_all()
            frozen = FrozenPages(self, kept)
            self._holds.append(_Hold(weakref.ref(frozen), kept))
            return frozen

    def begin_freeze(self) -> "FrozenPages":
        """A freeze of no pages yet: `FrozenPages.add` keeps each run as it is when that is called."""
        with self._changed:
            kept = PageTable.blank(self._table.pages)
            frozen = FrozenPages(self, kept)
            self._holds.append(_Hold(weakref.ref(frozen), kept))
            return frozen

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
        self._check_allocated(run)
        with self._changed:
            self._wait_for_stores(run)
            table = self._table.table(run.start, run.count)
            self._table.pin(table)
            return Fork(self, run, table)

    def forget(self, commit: str) -> None:
        """Delete a commit of this store durably, then free its slots; one that does not exist is none."""
        self._store.forget(commit)
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
        _live.pop(self._store.record.id, None)
        self._store.close()

    def __enter__(self) -> "SSDTier":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, table: PageTable, into: memoryview) -> None:
        """Load pages that `begin_load` has given, and end that."""
        try:
            read_pages(self._store.file, table, into)
        finally:
            with self._changed:
                self._table.end_load(table)
                self._changed.notify_all()

    def load_pinned(self, table: PageTable, into: memoryview) -> None:
        """Read pages of a pinned table."""
        with self._changed:
            self._table.begin_load_of(table)
        self._read(table, into)

    def add_to_frozen(self, frozen: FrozenPages, run: Run) -> None:
        """Keep one more run; a store to it that is under way ends first."""
        self._check_allocated(run)
        with self._changed:
            kept = self._hold(frozen).table.part(run.start, run.count)
            self._wait_for_stores(run)
            now = self._table.table(run.start, run.count)
            self._table.pin(now)
            kept.slots[:] = now.slots
            kept.hashes[:] = now.hashes

    def commit_frozen(self, frozen: FrozenPages, checkpoint: Path, checkpoint_id: str) -> Reference:
        """Make a freeze durable: the pages first, then their table."""
        with self._changed:
            hold = self._hold(frozen)
        reference = self._store.commit(hold.table, checkpoint, checkpoint_id)
        with self._changed:
            self._commits[reference.commit] = hold.table
            hold.committed = True
        return reference

    def let_go(self, frozen: FrozenPages) -> None:
        """Nobody need wait for this freeze any more; unless it was committed, its slots are free."""
        with self._changed:
            for hold in [hold for hold in self._holds if hold.holder() is frozen]:
                self._holds.remove(hold)
                if not hold.committed:
                    self._table.unpin(hold.table)
            self._changed.notify_all()

    def end_fork(self, run: Run, old: PageTable, undo: bool) -> None:
        """Let go of what a fork keeps, after having it back where it is to be undone."""
        with self._changed:
            if undo:
                self._wait_for_stores(run)
                self._table.adopt(run.start, old)
            self._table.unpin(old)
            self._changed.notify_all()

    def _hold(self, frozen: FrozenPages) -> _Hold:
        for hold in self._holds:
            if hold.holder() is frozen:
                return hold
        raise ValueError("the frozen pages were released")

    def pages_of(self, run: Run, offset_bytes: int, nbytes: int) -> tuple[int, int]:
        """(first page, pages) of a part of a run."""
        self._check(run, offset_bytes, nbytes)
        if offset_bytes % self.page_bytes or nbytes % self.page_bytes:
            raise ValueError(
                f"asked for {nbytes} bytes at offset {offset_bytes} of {run} in tier {self.name!r}, which moves whole "
                f"pages of {self.page_bytes} bytes"
            )
        return run.start + offset_bytes // self.page_bytes, nbytes // self.page_bytes

    def _wait_for_stores(self, run: Run) -> None:
        while self._table.storing_to(run.start, run.count):
            self._changed.wait()

    def _targets(self, first: int, count: int) -> Slots:
        """Slots to write to, waited for as long as somebody is about to free some."""
        while True:
            if not self._freezing:
                targets = self._table.begin_store(first, count)
                if targets is not None:
                    return targets
                if self._table.lacks(first, count) and not self._slots_to_come():
                    if self._table.lacks(first, count):
                        raise self._exhausted()
                    continue
            if self._closed:
                raise StorageError("the SSD tier is closed")
            self._changed.wait(_LOOK_AGAIN_S)

    def _slots_to_come(self) -> bool:
        """Whether loads, stores or a freeze under way may free slots."""
        for hold in [hold for hold in self._holds if hold.holder() is None]:  # dropped without a word
            self._holds.remove(hold)
            if not hold.committed:
                self._table.unpin(hold.table)
        return bool(self._holds) or self._table.in_transit

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


def forget_commit(reference: Mapping[str, Any], checkpoint_id: str, directories: Sequence[str | Path] = ()) -> None:
    """Delete a commit of a checkpoint that is no more, durably, so that its slots are free; deletes the store too if
    that was its last and nobody has it open. Raises StorageError when that fails.

    Looks in `directories` only. A commit stays if it is not there, if it belongs to another checkpoint, if a checkpoint
    with this id is still where it was saved (then a copy was deleted), or if somebody else has its directories open.
    """
    wanted = Reference.from_json(reference)
    tier = _live.get(wanted.store)
    record = tier.record if tier is not None else locate(wanted.store, [Path(directory) for directory in directories])
    if record is None:
        _log.warning(
            "the pages of checkpoint %s are not in the SSD directories of this run, and are kept: pagoda gc %s",
            checkpoint_id,
            " ".join(wanted.directories),
        )
        return
    if wanted.commit not in record.commit_ids():
        return
    with contextlib.ExitStack() as locked:
        try:
            locked.enter_context(_held(record.directories))
        except StorageError:
            return  # a rank that has them open forgets its own; else `pagoda gc` finds it
        try:
            commit = record.read_commit(wanted.commit)
        except StorageError as error:
            _log.warning("%s; it is kept", error)
            return
        if commit.checkpoint_id != checkpoint_id:
            _log.warning("%s belongs to another checkpoint, and is kept", record.commit_path(wanted.commit))
        elif checkpoint_id_of(Path(commit.checkpoint)) == checkpoint_id:
            _log.warning("the pages of %s are kept: what was deleted is a copy of it", commit.checkpoint)
        elif tier is not None:
            tier.forget(wanted.commit)
        else:
            record.remove_commit(wanted.commit)
            if not record.commit_ids():
                record.remove()


@contextlib.contextmanager
def _held(directories: Sequence[Path]) -> Iterator[None]:
    """Hold the locks of directories, of which tiers of this process may have some. Raises StorageError."""
    mine = [directory for tier in [*_live.values()] for directory in tier.directories]
    lock = DirectoryLock([d for d in directories if not any(os.path.samefile(d, own) for own in mine)])
    try:
        yield
    finally:
        lock.close()
