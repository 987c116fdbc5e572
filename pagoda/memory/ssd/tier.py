"""The SSD tier: pages that are verified when read and, once frozen, never overwritten."""

import logging
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pagoda.errors import BudgetError, StorageError
from pagoda.memory.identity import checkpoint_id_of
from pagoda.memory.page import PageRun
from pagoda.memory.sizes import format_bytes
from pagoda.memory.ssd.commits import Reference
from pagoda.memory.ssd.committed import CommittedPages
from pagoda.memory.ssd.lock import lock_directories
from pagoda.memory.ssd.orphans import gc_hint
from pagoda.memory.ssd.record import StoreRecord, locate
from pagoda.memory.ssd.slots import PageTable, Slots, SlotTable, slots_of
from pagoda.memory.ssd.store import PageStore

_log = logging.getLogger("pagoda")

_LOOK_AGAIN_S = 0.5
"""Seconds after which a write that waits for free slots checks again whether any will become free."""

_live: "weakref.WeakValueDictionary[str, SSDTier]" = weakref.WeakValueDictionary()
"""store id -> the tier that has it open in this process."""


class SSDTier:
    """Pages on one or several drives, written out of place and verified.

    The slot table decides where a page is stored. A write of a page to which nothing else refers overwrites its slot. A
    write of a page that another run, a snapshot or a commit keeps goes to a free slot. The `spare` slots make that
    possible: a commit of all pages takes at most as many slots as pages have changed since.

    Every store hashes each page, and every load compares (`CheckedFile`). Pages that were never stored read as zeros.
    Each load or store is atomic with respect to others that touch its pages, and to `PageSnapshot.add`.

    The directories are locked from the constructor to `close`. Pages of commits that `PageStore` finds there can be
    adopted.

    Thread-safe. `_changed` guards the slot table and all bookkeeping. I/O and hashing run outside.
    """

    def __init__(self, directories: Mapping[Path, int | None], pages: int, page_bytes: int, spare: int = 0) -> None:
        """Has room for `pages`, and grows if more are allocated. `spare` is the number of additional slots.
        `directories` maps each directory to its limit in bytes; None means no limit.

        Raises StorageError and BudgetError like `PageStore`.
        """
        self.page_bytes = page_bytes
        self._pages, self._numbers, self._spare = pages, pages, spare
        self._allocated = 0
        self._changed = threading.Condition()
        self._kept: list[_Kept] = []
        """What the open snapshots keep."""
        self._closed = False
        self._store = PageStore(directories, pages, page_bytes, spare)
        self._table = SlotTable(pages, self._store.file.slots)
        self._commits = {commit.commit: commit.table for commit in self._store.commits}
        self._run_of = {commit.commit: commit.run for commit in self._store.commits}
        """Commit that another process left -> its run."""
        self._own_runs: set[str] = set()
        """Runs from which this one resumes."""
        for table in self._commits.values():
            self._table.pin(table)
        _live[self.record.id] = self

    @property
    def record(self) -> StoreRecord:
        """The tier's store, with the directories that it has locked."""
        return self._store.record

    @property
    def commits(self) -> frozenset[str]:
        """Ids of the commits that keep slots of this store."""
        with self._changed:
            return frozenset(self._commits)

    def room_beside(self, gone: Collection[str], unchanging: Iterable[PageRun] = ()) -> int:
        """Slots that neither a page nor a commit has, once the commits `gone` are deleted. Pages of `unchanging` runs
        share their slots with commits.

        Raises StorageError and BudgetError if other runs keep so much that the store has to grow and cannot.
        """
        with self._changed:
            self._grow()
            kept = slots_of(table for commit, table in self._commits.items() if commit not in gone)
            kept = np.setdiff1d(kept, slots_of(self._table.table(run) for run in unchanging))
            return self._table.slots - self._pages - self.added.count - len(kept)

    def alloc(self, pages: int) -> PageRun:
        """Permanently allocate the next pages. If the tier has no room for them, it grows.

        Raises StorageError and BudgetError like `PageStore`. Nothing is allocated then.
        """
        with self._changed:
            stop = self._allocated + pages
            if stop > self._table.pages:
                spare = max(self._spare, self._store.beside - self._kept_by_others)
                self._grow_to(self._pages + stop - self._numbers + spare)
                self._table.extend(stop)
            self._allocated = stop
            return PageRun(stop - pages, pages)

    @property
    def added(self) -> PageRun:
        """The pages by which the tier has grown, which come last."""
        return PageRun(self._numbers, max(0, self._allocated - self._numbers))

    @property
    def free_slots(self) -> int:
        """The number of pages that could go to other slots now."""
        with self._changed:
            return self._table.free

    def make_room(self, pages: int, spare: int) -> None:
        """Grow for `rearrange` with these numbers. Raises StorageError and BudgetError like `PageStore`."""
        with self._changed:
            self._grow_to(pages + self.added.count + spare)

    def rearrange(self, pages: int, spare: int, kept: Mapping[PageRun, PageRun], numbers: int | None = None) -> None:
        """Allocate `pages` pages anew, with `spare` additional slots, for which there is room. `kept`: run of the new
        pages -> run whose content it has from now on, without I/O. `added` pages follow, as they are. What other pages
        hold is lost, unless a snapshot or a commit keeps it. No load or store is under way.

        `numbers`: how many pages can be named, if these are more than may have content at once.
        """
        numbers = pages if numbers is None else numbers
        with self._changed:
            added = self.added
            stop = numbers + added.count
            held = [*self._commits.values()]
            held += [table for each in self._kept if each.reference is None for table in each.tables.values()]
            table = SlotTable(max(1, stop), self._store.file.slots)
            for each in held:
                table.pin(each)
            for run, before in {**kept, PageRun(numbers, added.count): added}.items():
                content = self._table.table(before)
                table.pin(content)
                table.adopt(run, content)
                table.unpin(content)
            self._table, self._pages, self._spare = table, pages, spare
            self._numbers, self._allocated = numbers, stop
            self._changed.notify_all()

    def share(self, run: PageRun, into: PageRun) -> None:
        """Give another run the content of a run, without I/O. A store to a page of either goes to a free slot then.
        Nothing stores to the first run, and nothing stores to or loads the other."""
        with self._changed:
            self._table.adopt(into, self._table.table(run))
            self._changed.notify_all()

    def drop(self, run: PageRun) -> None:
        """Nothing needs the content of a run any more, and nothing stores to it. Its slots become free, unless
        something else keeps them. A load under way may fail, or bring other bytes."""
        with self._changed:
            self._table.adopt(run, PageTable.blank(run.count))
            self._changed.notify_all()

    def load(self, run: PageRun, offset_bytes: int, into: memoryview) -> None:
        """Read pages, with the content of the latest store that has ended. A page that was stored in part is read as
        far as that.

        Raises ValueError like `PageRun.part`, CorruptPageError if the bytes differ from those that were stored, and
        StorageError if the disk fails.
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

    def store(self, run: PageRun, offset_bytes: int, data: memoryview) -> None:
        """Write pages, without overwriting anything that is kept. Only a part of the last page may be written.

        Waits for a free slot while a snapshot may still free some. Raises ValueError like `load`, StorageError if the
        disk fails, and BudgetError if no slot is left. After a StorageError, pages may hold neither the old bytes nor
        the new ones, and loading them then raises an error.
        """
        pages = self._part(run, offset_bytes, data.nbytes)
        with self._changed:
            targets = self._targets(pages)
        try:
            hashes = self._store.file.write(targets, data)
        except BaseException:
            with self._changed:
                self._table.abandon_store(pages, targets)
                self._changed.notify_all()
            raise
        with self._changed:
            self._table.end_store(pages, targets, hashes)
            self._changed.notify_all()

    def snapshot(self) -> "PageSnapshot":
        """A new snapshot without pages. `PageSnapshot.add` keeps each run as it is at the time of that call. Stores
        that find no free slot wait until the snapshot is closed."""
        return PageSnapshot(self)

    def adopt(self, run: PageRun, committed: CommittedPages, its_run: PageRun) -> bool:
        """Give a run the content of committed pages, without I/O. Returns False and changes nothing if the pages belong
        to another store or are no longer committed. The caller must then copy them."""
        with self._changed:
            here = self._commits.get(committed.commit) if committed.store == self.record.id else None
            if here is None or run.count != its_run.count or its_run.stop > len(here.slots):
                return False
            self._wait_while(self._table.busy, run)
            self._own_runs |= {self._run_of[committed.commit]} if committed.commit in self._run_of else set()
            self._table.adopt(run, here.part(its_run))
            self._changed.notify_all()
            return True

    def forget(self, commit: str) -> None:
        """Delete a commit of this store durably, then free its slots. Does nothing if the commit does not exist."""
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

    def _part(self, run: PageRun, offset_bytes: int, nbytes: int) -> PageRun:
        if run.start < 0 or run.stop > self._allocated:
            raise ValueError(f"{run} is not on SSD: only {self._allocated} pages are allocated")
        return run.part(offset_bytes, nbytes, self.page_bytes)

    def _wait_while(self, condition: Callable[[PageRun], bool], run: PageRun) -> None:
        while condition(run):
            self._changed.wait()

    def _targets(self, pages: PageRun) -> Slots:
        """Slots to write to. Waits as long as something may still free slots."""
        while (targets := self._table.begin_store(pages)) is None:
            if self._table.lacks(pages):
                for kept in [kept for kept in self._kept if kept.holder() is None]:
                    self._let_go(kept)
                if not self._table.lacks(pages):
                    continue
                if not (self._table.storing or self._kept):
                    if self._grow():
                        continue
                    raise self._exhausted()
            if self._closed:
                raise StorageError("the SSD tier is closed")
            self._changed.wait(_LOOK_AGAIN_S)
        return targets

    def _grow(self) -> bool:
        """Add the slots that commits of other runs keep of this run's spare ones. Returns whether there were any."""
        return self._grow_to(self._pages + self.added.count + self._spare)

    def _grow_to(self, slots: int) -> bool:
        """Grow to so many slots in addition to those that commits of other runs keep. Returns whether that added
        any."""
        before, kept = self._table.slots, self._kept_by_others
        self._store.grow(slots + kept, kept)
        self._table.grow(self._store.file.slots)
        return self._table.slots > before

    @property
    def _kept_by_others(self) -> int:
        """Slots that commits of other runs keep."""
        others = (
            self._commits[c] for c, run in self._run_of.items() if c in self._commits and run not in self._own_runs
        )
        return len(slots_of(others))

    def _let_go(self, kept: "_Kept") -> None:
        """A snapshot has ended. Its slots become free, unless it was committed."""
        self._kept.remove(kept)
        if kept.reference is None:
            for table in kept.tables.values():
                self._table.unpin(table)
        self._changed.notify_all()

    def _exhausted(self) -> BudgetError:
        page = self.page_bytes
        return BudgetError(
            f"no slot of tier 'ssd' is free for a page whose old content is kept: {self._pages} of "
            f"{self._table.slots} slots are for pages in use, and {len(self._commits)} checkpoints keep others "
            f"({format_bytes(self._table.slots * page)} in all, {self._spare} spare slots). Delete checkpoints, keep "
            f"fewer (memory.ssd_checkpoints, --save-total-limit), or raise memory.ssd='DIR:SIZE'."
            f"{gc_hint(self.record.directories)}",
            tier="ssd",
        )


@dataclass(eq=False)
class _Kept:
    """What a snapshot keeps. The tier has a reference too, because the snapshot may be dropped without `close`."""

    holder: "weakref.ref[PageSnapshot]"
    tables: dict[PageRun, PageTable] = field(default_factory=dict)
    """Tables that are pinned until the commit. After that, the commit's own table is pinned."""
    reference: Reference | None = None
    """Set once the snapshot is committed."""


class PageSnapshot:
    """Runs of a tier, each as it was at the instant at which it was added, whatever has been stored since.

    The snapshot keeps their slots until it is closed or dropped. Close it only after older commits have been
    forgotten, because a store may wait for the slots of either.
    """

    def __init__(self, tier: SSDTier) -> None:
        self._tier = tier
        self._kept = _Kept(weakref.ref(self))
        with tier._changed:
            tier._kept.append(self._kept)

    def add(self, run: PageRun) -> None:
        """Keep a run as it is now, once running stores to it have ended. The run must not be kept already. Do not call
        it after `commit`.

        Each of its pages that is stored to from now on takes a spare slot.
        """
        tier = self._tier
        with tier._changed:
            tables = self._open().tables
            tier._wait_while(tier._table.storing_to, run)
            tables[run] = tier._table.table(run)
            tier._table.pin(tables[run])

    def commit(self, checkpoint: Path, checkpoint_id: str) -> dict[str, Any]:
        """Keep the pages after the process ends, for the checkpoint that has or will have this id.

        Returns a reference to them, as JSON, for `open_commit`. A crash at any instant leaves either the whole commit
        or nothing. `checkpoint` is the path at which the checkpoint is or will be. It may be moved later.

        Raises StorageError on failure. Nothing is committed in that case.
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
        return asdict(self._kept.reference)

    def release(self) -> None:
        """Stop keeping the pages in memory and, if they were committed, on disk. Idempotent."""
        if self._kept.reference is not None:
            self._tier.forget(self._kept.reference.commit)
        self.close()

    def close(self) -> None:
        """End the snapshot. Committed pages are kept, others are released. Idempotent."""
        with self._tier._changed:
            if self._kept in self._tier._kept:
                self._tier._let_go(self._kept)

    def _open(self) -> _Kept:
        if self._kept not in self._tier._kept:
            raise ValueError("the snapshot was released")
        return self._kept


def forget_commit(reference: Mapping[str, Any], checkpoint_id: str, directories: Sequence[str | Path] = ()) -> None:
    """Durably delete the commit of a deleted checkpoint, so that its slots are free. Also deletes the store if that was
    its last commit and the store is not open. Raises StorageError on failure.

    Searches only `directories`. The commit stays if it is not there, if it belongs to another checkpoint, if a
    checkpoint with this id is still where it was saved (so that a copy was deleted), or if another process has locked
    its directories.
    """
    wanted = Reference.from_json(reference)
    tier = _live.get(wanted.store)
    record = tier.record if tier is not None else locate(wanted.store, [Path(directory) for directory in directories])
    if record is None:
        _log.warning(
            "the pages of checkpoint %s are kept, because they are not in the SSD directories of this run. To delete "
            "them: pagoda gc %s",
            checkpoint_id,
            " ".join(wanted.directories),
        )
        return
    if wanted.commit not in record.commit_ids():
        return
    mine = [directory for other in [*_live.values()] for directory in other.record.directories]
    try:
        locks = lock_directories(d for d in record.directories if not any(os.path.samefile(d, own) for own in mine))
    except StorageError:
        return  # the rank that has them open forgets its commit; otherwise `pagoda gc` finds it
    with locks:
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
