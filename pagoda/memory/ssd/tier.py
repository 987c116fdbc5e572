"""The SSD tier: pages that are verified when read and, once frozen, never overwritten."""

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagoda.errors import BudgetError, StorageError
from pagoda.memory.identity import checkpoint_id_of
from pagoda.memory.page import Run
from pagoda.memory.sizes import format_bytes
from pagoda.memory.ssd.commits import Reference
from pagoda.memory.ssd.committed import CommittedPages
from pagoda.memory.ssd.lock import DirectoryLock
from pagoda.memory.ssd.orphans import gc_hint
from pagoda.memory.ssd.record import StoreRecord, locate
from pagoda.memory.ssd.slots import PageTable, Slots, SlotTable, slots_of
from pagoda.memory.ssd.store import PageStore
from pagoda.memory.ssd.xxh3 import hashes_of

_log = logging.getLogger("pagoda")

_LOOK_AGAIN_S = 0.5
"""How often a store that waits for free slots looks whether anybody is still about to free some."""

_live: "weakref.WeakValueDictionary[str, SSDTier]" = weakref.WeakValueDictionary()
"""store id -> the tier that has it open in this process."""


class SSDTier:
    """Pages on one or several drives, out of place and verified.

    Where a page lies is the slot table's business, not the run's: a store to a page that nothing else refers to
    overwrites its slot, and one to a page that a snapshot or a commit keeps goes to a free slot. `spare` slots beyond
    the pages make that possible: a commit of all pages takes at most as many slots as pages have changed since.

    Every store hashes each page (xxh3_64), every load compares. Pages never stored read as zeros. One load or store is
    atomic with every other that touches its pages, and with `PageSnapshot.add`.

    The directories are locked from the constructor to `close`. Pages of commits that `PageStore` finds there can be
    adopted.

    Thread-safe, but for `alloc`. `_changed` guards the slot table and all bookkeeping; I/O and hashing run outside.
    """

    def __init__(self, directories: Mapping[Path, int | None], pages: int, page_bytes: int, spare: int = 0) -> None:
        """`pages` that can be allocated, and `spare` slots; `directories` has most bytes of each, None for no limit.

        Raises StorageError and BudgetError as `PageStore` does.
        """
        self.page_bytes = page_bytes
        self._spare = spare
        self._allocated = 0
        self._changed = threading.Condition()
        self._kept: list[_Kept] = []
        """What snapshots keep that have not ended."""
        self._closed = False
        self._store = PageStore(directories, pages, page_bytes, spare)
        self._table = SlotTable(pages, self._store.file.slots)
        self._commits = {commit.commit: commit.table for commit in self._store.commits}
        for table in self._commits.values():
            self._table.pin(table)
        _live[self.record.id] = self

    @property
    def record(self) -> StoreRecord:
        """Its store, with the directories that it has locked."""
        return self._store.record

    @property
    def commits(self) -> frozenset[str]:
        """Ids of the commits that keep slots of this store."""
        with self._changed:
            return frozenset(self._commits)

    @property
    def peak_bytes(self) -> int:
        """Bytes of the pages that were allocated, and of all spare slots: their space is reserved."""
        return (self._allocated + self._spare) * self.page_bytes

    @property
    def bytes_on_drives(self) -> dict[Path, int]:
        """Bytes of the page file in each directory."""
        return {file.directory: file.nbytes for file in self._store.file.files}

    def room_beside(self, gone: Collection[str]) -> int:
        """Slots beyond those of all pages and of the commits that are here, without the commits `gone`."""
        with self._changed:
            kept = slots_of(table for commit, table in self._commits.items() if commit not in gone)
        return self._table.slots - self._table.pages - len(kept)

    def alloc(self, pages: int) -> Run:
        """The next pages that nobody has, for good. Raises ValueError when there are too few."""
        if self._allocated + pages > self._table.pages:
            raise ValueError(f"asked for {pages} pages of {self._table.pages - self._allocated} that are left on SSD")
        self._allocated += pages
        return Run(self._allocated - pages, pages)

    def load(self, run: Run, offset_bytes: int, into: memoryview) -> None:
        """Read whole pages; their content is that of the latest store that has ended.

        Raises ValueError when the bytes leave the run, and unless offset and length are multiples of the page size,
        CorruptPageError for bytes that are not those that were stored, StorageError when the disk fails.
        """
        pages = self._part(run, offset_bytes, into.nbytes)
        with self._changed:
            while (table := self._table.begin_load(pages)) is None:
                self._changed.wait()
        try:
            self._store.file.read(table, into)
        finally:
            with self._changed:
                self._table.end_load(pages)
                self._changed.notify_all()

    def store(self, run: Run, offset_bytes: int, data: memoryview) -> None:
        """Write whole pages, where nothing that is kept lies.

        Waits for a free slot while a snapshot may yet free some. Raises ValueError as `load` does, StorageError when
        the disk fails, BudgetError when no slot is left; then pages may hold neither the old bytes nor the new, and
        loading them says so.
        """
        pages = self._part(run, offset_bytes, data.nbytes)
        hashes = hashes_of(data, self.page_bytes)
        with self._changed:
            targets = self._targets(pages)
        try:
            self._store.file.write(targets, data)
        except BaseException:
            with self._changed:
                self._table.abandon_store(pages, targets)
                self._changed.notify_all()
            raise
        with self._changed:
            self._table.end_store(pages, targets, hashes)
            self._changed.notify_all()

    def snapshot(self, awaited: bool = True) -> "PageSnapshot":
        """A snapshot of no pages yet: `PageSnapshot.add` keeps each run as it is when that is called.

        `awaited`: stores that find no free slot wait until it is closed. Otherwise they fail, because it ends only
        after they have.
        """
        return PageSnapshot(self, awaited)

    def adopt(self, run: Run, committed: CommittedPages, its_run: Run) -> bool:
        """Let a run have the content of committed pages, without I/O. False, and nothing has changed, when these are
        not this store's, or no longer committed: then copy.
        """
        with self._changed:
            here = self._commits.get(committed.commit) if committed.store == self.record.id else None
            if here is None or run.count != its_run.count or its_run.stop > len(here.slots):
                return False
            self._wait_while(self._table.busy, run)
            self._table.adopt(run, here.part(its_run))
            self._changed.notify_all()
            return True

    def forget(self, commit: str) -> None:
        """Delete a commit of this store durably, then free its slots; one that does not exist is none."""
        self.record.remove_commit(commit)
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
        _live.pop(self.record.id, None)
        self._store.close()

    def _part(self, run: Run, offset_bytes: int, nbytes: int) -> Run:
        if run.start < 0 or run.stop > self._allocated:
            raise ValueError(f"asked for {run} on SSD, where {self._allocated} pages are allocated")
        return run.part(offset_bytes, nbytes, self.page_bytes)

    def _wait_while(self, condition: Callable[[Run], bool], run: Run) -> None:
        while condition(run):
            self._changed.wait()

    def _targets(self, pages: Run) -> Slots:
        """Slots to write to, waited for as long as somebody is about to free some."""
        while (targets := self._table.begin_store(pages)) is None:
            if self._table.lacks(pages):
                for kept in [kept for kept in self._kept if kept.holder() is None]:
                    self._let_go(kept)
                if not self._table.lacks(pages):
                    continue
                if not (self._table.storing or any(kept.awaited for kept in self._kept)):
                    raise self._exhausted()
            if self._closed:
                raise StorageError("the SSD tier is closed")
            self._changed.wait(_LOOK_AGAIN_S)
        return targets

    def _let_go(self, kept: "_Kept") -> None:
        """A snapshot has ended; unless it was committed, its slots are free."""
        self._kept.remove(kept)
        if kept.reference is None:
            for table in kept.tables.values():
                self._table.unpin(table)
        self._changed.notify_all()

    def _exhausted(self) -> BudgetError:
        page = self.page_bytes
        return BudgetError(
            f"no slot of tier 'ssd' is free for a page whose old content is kept: of {self._table.slots} slots "
            f"{self._allocated} are for pages in use, and {len(self._commits)} checkpoints keep others "
            f"({format_bytes(self._table.slots * page)} in all, {self._spare} spare slots). Delete checkpoints, keep "
            f"fewer (memory.ssd_checkpoints), or raise memory.ssd='DIR:SIZE'.{gc_hint(self.record.directories)}",
            tier="ssd",
        )


@dataclass(eq=False)
class _Kept:
    """What a snapshot keeps. The tier has it too, because the snapshot may be dropped without `close`."""

    holder: "weakref.ref[PageSnapshot]"
    awaited: bool
    tables: dict[Run, PageTable] = field(default_factory=dict)
    """Pinned, until they are committed; then the commit's own table is."""
    reference: Reference | None = None
    """Once it is committed."""


class PageSnapshot:
    """Runs of a tier as they were, each at the instant when it was added, whatever has been stored since.

    It keeps their slots until it is closed, restored, or dropped. Close it only after older commits have been
    forgotten: a store may wait for the slots of either.
    """

    def __init__(self, tier: SSDTier, awaited: bool) -> None:
        self._tier = tier
        self._kept = _Kept(weakref.ref(self), awaited)
        with tier._changed:
            tier._kept.append(self._kept)

    def add(self, run: Run) -> None:
        """Keep a run that is not kept yet as it is now, once what is being stored to it has ended. Not after `commit`.

        Takes a spare slot for each of its pages that is stored to from now on.
        """
        tier = self._tier
        with tier._changed:
            tables = self._open().tables
            tier._wait_while(tier._table.storing_to, run)
            tables[run] = tier._table.table(run)
            tier._table.pin(tables[run])

    def restore(self) -> None:
        """Have the old pages back, without I/O, and close: the slots of what has been stored since are free."""
        with self._tier._changed:
            for run, table in self._open().tables.items():
                self._tier._wait_while(self._tier._table.busy, run)
                self._tier._table.adopt(run, table)
            self._tier._let_go(self._kept)

    def commit(self, checkpoint: Path, checkpoint_id: str) -> dict[str, Any]:
        """Keep the pages beyond the end of the process, for the checkpoint that has, or will have, this id.

        Returns a reference to them, as JSON, for `open_commit`. A crash at any instant leaves the commit as a whole
        or nothing of it. The path is where the checkpoint is or will be: it may be moved later.

        Raises StorageError when that fails; then nothing is committed.
        """
        if self._kept.reference is None:
            whole = PageTable.blank(self._tier._table.pages)
            for run, table in self._open().tables.items():
                kept = whole.part(run)
                kept.slots[:], kept.hashes[:] = table.slots, table.hashes
            reference = self._tier._store.commit(whole, checkpoint, checkpoint_id)
            with self._tier._changed:
                self._tier._commits[reference.commit] = whole
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

    def _open(self) -> _Kept:
        if self._kept not in self._tier._kept:
            raise ValueError("the snapshot was released")
        return self._kept


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
    mine = [directory for other in [*_live.values()] for directory in other.record.directories]
    try:
        lock = DirectoryLock([d for d in record.directories if not any(os.path.samefile(d, own) for own in mine)])
    except StorageError:
        return  # a rank that has them open forgets its own; else `pagoda gc` finds it
    with contextlib.closing(lock):
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
