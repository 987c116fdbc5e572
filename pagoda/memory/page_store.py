"""A page store in its directories: found or made, locked, named at its first commit, deleted when nothing is kept."""

import logging
import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from pagoda.errors import BudgetError, ConfigError, StorageError
from pagoda.memory.commits import (
    PAGES,
    RECORD,
    Commit,
    Reference,
    StoreRecord,
    bytes_of_stores,
    locate,
    read_store,
    remove_temporary_files,
    stores_in,
    table_hash,
    unknown_in,
)
from pagoda.memory.files import SyncError, inside, storage_errors, sync_descriptor, sync_directory
from pagoda.memory.lock import DirectoryLock
from pagoda.memory.orphans import gc_hint, readable_commits, why_abandoned
from pagoda.memory.sizes import format_bytes
from pagoda.memory.slots import PageTable
from pagoda.memory.ssd import PageFile, StripedFile, portion_of

_log = logging.getLogger("pagoda")


class PageStore:
    """Slots for `pages` pages and `spare` more, striped over directories that nobody else may use meanwhile.

    Until the first commit the files have no name, where the file system can do that, so that a process that ends
    before leaves nothing behind. A store of the same page size that commits have left in the same directories is used
    on, and grown until it has free slots for all pages beside what they keep. Stores of another page size or other
    stripes are left alone, and what they take counts against the limits.

    **What it deletes.** Opening deletes nothing but what a crash left of Pagoda's own files, in folders whose record is
    valid and whose directory is locked: files that were being written (`remove_temporary_files`), and page tables of a
    checkpoint that was never completed, or that Pagoda was deleting, which its directory shows (`why_abandoned`).
    `forget` deletes one page table, and `close` this store's own files if no page table is left. Nothing is deleted
    along a path read from a file, or through a symbolic link.

    Thread-safe.
    """

    record: StoreRecord
    """Identity and geometry."""
    file: StripedFile
    """The slots."""

    def __init__(self, directories: Mapping[Path, int | None], pages: int, page_bytes: int, spare: int) -> None:
        """`directories` has most bytes of each, None for no limit.

        Raises StorageError when a directory is missing, held by somebody else, cannot be written or has not the
        space, BudgetError when the limits leave too little beside what commits in the directories keep.
        """
        self._directories = list(directories)
        self._limits = list(directories.values())
        self._pages = pages
        self._spare = spare
        self._page_bytes = page_bytes
        self._commits: list[Commit] = []
        self._recorded = False
        """Whether the files have names and the record is on disk."""
        self._committing = threading.Lock()
        self._sync_error: SyncError | None = None
        """Why nothing can be committed any more."""
        self._lock = DirectoryLock(self._directories)
        try:
            for directory in self._directories:
                _tidy(directory)
            if not self._reuse():
                self._create()
        except BaseException:
            self._lock.close()
            raise

    def commits(self) -> list[Commit]:
        """The commits found when it was opened, oldest first."""
        return self._commits

    def commit(self, table: PageTable, checkpoint: Path, checkpoint_id: str) -> Reference:
        """Make pages durable, then the table that refers to them.

        Raises StorageError when that fails, or when a file of the store was deleted or replaced since it was opened;
        then nothing is committed. After a sync that failed, every commit fails.
        """
        with self._committing:
            if self._sync_error is not None:
                raise SyncError(f"nothing more can be kept on SSD by this run: {self._sync_error}")
            try:
                if not self._recorded:
                    self._record()
                self.file.sync()
                self._check_in_place()
                commit = f"{time.time_ns():016x}-{secrets.token_hex(4)}"
                place = str(checkpoint.absolute())
                content = Commit(self.record.id, commit, self._page_bytes, checkpoint_id, place, table).to_bytes()
                self.record.write_commit(commit, content)
            except SyncError as error:
                self._sync_error = error
                raise
        directories = tuple(str(directory) for directory in self.record.directories)
        return Reference(self.record.id, commit, self._page_bytes, len(table.slots), table_hash(content), directories)

    def forget(self, commit: str) -> None:
        """Delete a commit durably; one that does not exist is none. Raises StorageError."""
        self.record.remove_commit(commit)

    def close(self) -> None:
        """Close the files, delete them if nothing is committed, and unlock the directories."""
        self.file.close()
        with suppress(StorageError):  # what cannot be read is kept
            if not self.record.commit_ids():
                self.record.remove()
        self._lock.close()

    def _record(self) -> None:
        """Give the store its name, at its first commit: the record first, so that no file is ever without one."""
        self.record.write()
        for file, path in zip(self.file.files, self.record.pages_paths, strict=True):
            file.link(path)
            with storage_errors(f"{path} cannot be synced"), inside(path.parent.parent, path.parent.name) as folder:
                sync_descriptor(folder, path)
        for directory in self.record.directories:
            with suppress(PermissionError):  # the directory may have been made just now, as those of ranks are
                sync_directory(directory.parent)
        self._recorded = True

    def _check_in_place(self) -> None:
        """Raises StorageError where the files that this process writes to are not those that others will find."""
        for stripe, (file, folder) in enumerate(zip(self.file.files, self.record.folders, strict=True)):
            if not self.record.is_written(stripe):
                missing = RECORD
            elif not file.is_in(folder, PAGES):
                missing = PAGES
            else:
                continue
            raise StorageError(
                f"{folder / missing} was deleted, moved or replaced while it was in use: this run's state on SSD can "
                "no longer be kept. Start again with --resume, from the last checkpoint"
            )

    def _create(self) -> None:
        portion = self._portion(self._pages + self._spare, [0] * len(self._directories))
        self.record = StoreRecord.new(self._directories, self._page_bytes, portion)
        files: list[PageFile] = []
        try:
            for stripe, (directory, count) in enumerate(zip(self._directories, portion, strict=True)):
                files.append(PageFile(directory, count, self._page_bytes, fallback=partial(self._named, stripe)))
        except BaseException:
            for file in files:
                file.close()
            self.record.remove()
            raise
        self.file = StripedFile(files, self.record.portions)

    def _named(self, stripe: int) -> Path:
        """The name of a page file that must have one from the start, in a folder that says whose it is."""
        self.record.write()
        return self.record.pages_paths[stripe]

    def _reuse(self) -> bool:
        """Open the newest store of this geometry that is here; False when there is none."""
        here = [directory.resolve() for directory in self._directories]
        for found, first_stripe in reversed(stores_in(here[0])):
            if first_stripe or found.page_bytes != self._page_bytes or len(found.directories) != len(here):
                continue
            record = locate(found.id, here)
            if record is None or list(record.directories) != here:
                continue
            files: list[PageFile] = []
            try:
                _check_no_copy(record)
                self._commits = [record.read_commit(commit) for commit in record.commit_ids()]
                for directory, count, path in zip(here, record.pages_of_files, record.pages_paths, strict=True):
                    files.append(PageFile(directory, count, self._page_bytes, existing=path))
            except (StorageError, ConfigError) as error:
                _log.warning("%s. Its store is left alone, and a new one made beside it", error)
                self._commits = []
                for file in files:
                    file.close()
                continue
            self.record, self.file, self._recorded = record, StripedFile(files, record.portions), True
            try:
                if not all(map(record.is_written, range(len(here)))):  # moved, or cut short by a crash
                    record.write()
                self._make_room()
            except BaseException:
                self.file.close()
                raise
            return True
        return False

    def _make_room(self) -> None:
        """Grow until all pages fit beside what the commits keep. The record follows once the new slots are durable."""
        kept = len(np.unique(np.concatenate([np.zeros(0, np.int64), *(c.table.written for c in self._commits)])))
        more = self._pages + max(self._spare, kept) - self.file.slots
        if more > 0:
            self.file.grow(self._portion(more, [file.pages for file in self.file.files], kept, self.record.id))
            self.file.sync()
            self.record = replace(self.record, portions=tuple(self.file.portions))
            self.record.write()

    def _portion(self, slots: int, have: Sequence[int], kept: int = 0, own: str = "") -> tuple[int, ...]:
        """How many of `slots` each directory gets beside the `have` slots of the store `own`."""
        page = self._page_bytes
        others = [bytes_of_stores(directory, but=own) for directory in self._directories]
        limits = [
            None if limit is None else max(0, (limit - other) // page - has)
            for limit, other, has in zip(self._limits, others, have, strict=True)
        ]
        portion = portion_of(slots, limits)
        if portion is None:
            room = sum(limit for limit in limits if limit is not None)
            taken = [f"checkpoints there keep {format_bytes(kept * page)}"] if kept else []
            if any(others):
                taken.append(f"stores of another page size or other directories take {format_bytes(sum(others))}")
            raise BudgetError(
                f"SSD {', '.join(map(str, self._directories))}: {format_bytes(slots * page)} more are needed and "
                f"{format_bytes(room * page)} are allowed"
                f"{'; ' + ' and '.join(taken) + ': delete checkpoints (see pagoda inspect),' if taken else ':'} "
                f"raise memory.ssd='DIR:SIZE', or name another directory.{gc_hint(self._directories)}",
                tier="ssd",
            )
        return portion


def _tidy(directory: Path) -> None:
    """Delete what a crash left of Pagoda's own files in a locked directory; `PageStore` says what that may be, and why.

    Warns of what looks like a store and is none, and of what looks orphaned.
    """
    for reason in unknown_in(directory):
        _log.warning("%s; the folder is left alone", reason)
    for store, stripe in stores_in(directory):
        remove_temporary_files(store, stripe)
        for commit in readable_commits(store) if stripe == 0 else ():
            why = why_abandoned(commit)
            if why is not None:
                _log.warning("checkpoint %s: %s; its pages on SSD are free again", commit.checkpoint, why)
                with suppress(StorageError):  # then the next to open it does
                    store.remove_commit(commit.commit)
    if hint := gc_hint([directory], stores=False):
        _log.warning("SSD directory %s:%s", directory, hint)


def _check_no_copy(record: StoreRecord) -> None:
    """Raises StorageError for a store of several stripes of which one may be a copy of another that is still in use:
    the stripes that the two share must not be written to for the one, because the other needs them as they are."""
    here = record.directories
    written = {read_store(directory, record.id)[0].directories for directory in here}
    if len(written) > 1:
        raise StorageError(f"{record.folders[0]}: its stripes were last used with other ones, perhaps copies of these")
    for stripe, place in enumerate(written.pop()) if len(here) > 1 else ():
        try:
            copied = read_store(place, record.id)[1] == stripe and not os.path.samefile(place, here[stripe])
        except OSError:  # a StorageError is one: nothing of the store is there
            continue
        if copied:
            raise StorageError(f"{record.folders[stripe]} is a copy: the store's own stripe is still in {place}")
