"""A page store in its directories: opens or creates it, locks it, names its files at the first commit, and deletes it
if nothing is committed."""

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

from pagoda.errors import BudgetError, ConfigError, StorageError
from pagoda.memory.files import SyncError, sync_directory
from pagoda.memory.sizes import format_bytes
from pagoda.memory.ssd.checked_file import CheckedFile, open_pages, portion_of
from pagoda.memory.ssd.commits import Commit, Reference, table_hash
from pagoda.memory.ssd.lock import lock_directories
from pagoda.memory.ssd.orphans import gc_hint, why_abandoned
from pagoda.memory.ssd.page_file import PageFile
from pagoda.memory.ssd.record import (
    PAGES,
    RECORD,
    StoreRecord,
    bytes_of_stores,
    locate,
    read_store,
    remove_temporary_files,
    stores_in,
    unknown_in,
)
from pagoda.memory.ssd.slots import PageTable, slots_of

_log = logging.getLogger("pagoda")


class PageStore:
    """Slots for `pages` pages and `spare` more, striped over directories that it locks for its own use.

    Until the first commit the files have no name, if the file system supports that, so a process that ends earlier
    leaves nothing behind. If commits have left a store of the same page size in the same directories, that store is
    reused. It grows until it has slots for all pages, the spare ones, and what commits keep, except those of the run
    that keeps most. That is probably the run that is resumed, whose commits may use the spare slots. If it is another
    one, `grow` adds slots. Stores with another page size or other stripes are left alone, and their size counts against
    the limits.

    **What it deletes.** Opening deletes only Pagoda's own files that a crash left, in folders whose record is valid and
    whose directory is locked. These are half-written files (`remove_temporary_files`) and page tables of a checkpoint
    that was never completed or that Pagoda was deleting, as its directory shows (`why_abandoned`). `close` deletes this
    store's own files if no page table is left. Nothing is deleted along a path read from a file, or through a symbolic
    link.

    Thread-safe.
    """

    record: StoreRecord
    """Identity and geometry."""
    file: CheckedFile
    """The slots."""

    def __init__(self, directories: Mapping[Path, int | None], pages: int, page_bytes: int, spare: int) -> None:
        """`directories` maps each directory to its limit in bytes; None means no limit.

        Raises StorageError if a directory is missing, locked by another store, cannot be written or has too little
        space. Raises BudgetError if the limits leave too little in addition to what commits in the directories keep.
        """
        self._limits = dict(directories)
        self._pages = pages
        self._spare = spare
        self._page_bytes = page_bytes
        self.beside = spare
        """Slots with which it was opened, in addition to those of `pages`."""
        self.commits: list[Commit] = []
        """The commits that were found when the store was opened, oldest first."""
        self._recorded = False
        """Whether the files have names and the record is on disk."""
        self._committing = threading.Lock()
        self._sync_error: SyncError | None = None
        """Why nothing can be committed any more."""
        self._lock = lock_directories(directories)
        try:
            for directory in directories:
                _tidy(directory)
            if not self._reuse():
                self._create()
        except BaseException:
            self._lock.close()
            raise

    def commit(self, table: PageTable, checkpoint: Path, checkpoint_id: str) -> Reference:
        """Make pages durable, then the table that refers to them.

        Raises StorageError if that fails, or if a file of the store was deleted or replaced since it was opened. Then
        nothing is committed. After a failed sync, every commit fails.
        """
        with self._committing:
            if self._sync_error is not None:
                raise SyncError(f"this run can keep nothing more on SSD: {self._sync_error}")
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
        directories = [str(directory) for directory in self.record.directories]
        return Reference(self.record.id, commit, self._page_bytes, len(table.slots), table_hash(content), directories)

    def close(self) -> None:
        """Close the files, delete them if nothing is committed, and unlock the directories."""
        self.file.close()
        with suppress(StorageError):  # what cannot be read is kept
            if not self.record.commit_ids():
                self.record.remove()
        self._lock.close()

    def _record(self) -> None:
        """Name the store's files, at its first commit. The record comes first, so that no file ever exists without
        one."""
        self.record.write()
        for file, folder in zip(self.file.files, self.record.folders, strict=True):
            file.link(folder / PAGES)
        for directory in self.record.directories:
            with suppress(PermissionError):  # the directory may be new, like those of ranks
                sync_directory(directory.parent)
        self._recorded = True

    def _check_in_place(self) -> None:
        """Raises StorageError if the files that this process writes to are not the ones at their paths."""
        for stripe, (file, folder) in enumerate(zip(self.file.files, self.record.folders, strict=True)):
            if not self.record.is_written(stripe):
                missing = RECORD
            elif not file.is_in(folder, PAGES):
                missing = PAGES
            else:
                continue
            raise StorageError(
                f"{folder / missing} was deleted, moved or replaced while it was in use, so this run can no longer "
                "keep its state on SSD. Start again from the last checkpoint with --resume-from-checkpoint last"
            )

    def _create(self) -> None:
        directories = list(self._limits)
        portion = self._portion(self._pages + self._spare, [0] * len(directories))
        resolved = tuple(directory.resolve() for directory in directories)
        self.record = StoreRecord(secrets.token_hex(8), self._page_bytes, resolved, (portion,))
        files = (
            PageFile(directory, pages, self._page_bytes, fallback=partial(self._named, stripe))
            for stripe, (directory, pages) in enumerate(zip(directories, portion, strict=True))
        )
        try:
            self.file = CheckedFile(files, self.record.portions)
        except BaseException:
            self.record.remove()
            raise

    def _named(self, stripe: int) -> Path:
        """The name of a page file that needs one from the start. Its folder gets a record first."""
        self.record.write()
        return self.record.folders[stripe] / PAGES

    def _reuse(self) -> bool:
        """Open the newest store in these directories with this geometry. Returns False if there is none."""
        here = [directory.resolve() for directory in self._limits]
        for found, _ in reversed(stores_in(here[0])):
            record = locate(found.id, here)
            if record is None or list(record.directories) != here or record.page_bytes != self._page_bytes:
                continue
            try:
                _check_no_copy(record)
                commits = [record.read_commit(commit) for commit in record.commit_ids()]
                self.file = open_pages(record)
            except (StorageError, ConfigError) as error:
                _log.warning("%s. Its store is left alone, and a new one is created", error)
                continue
            self.record, self.commits, self._recorded = record, commits, True
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
        """Grow until all pages fit in addition to what the commits keep."""
        kept = len(slots_of(commit.table for commit in self.commits))
        runs = {commit.run for commit in self.commits}
        beside = [len(slots_of(c.table for c in self.commits if c.run != run)) for run in runs]
        self.beside = max(self._spare + min(beside, default=0), kept)
        self.grow(self._pages + self.beside, kept)

    def grow(self, slots: int, kept: int) -> None:
        """Grow to at least `slots` slots, of which commits keep `kept`. If the files have names, writes the record once
        the new slots are durable.

        Raises BudgetError if the limits do not allow that, and StorageError if a disk is full.
        """
        more = slots - self.file.slots
        if more <= 0:
            return
        with self._committing:
            self.file.grow(self._portion(more, self.record.pages_of_files, kept, self.record.id))
            self.record = replace(self.record, portions=self.file.portions)
            if self._recorded:
                self.file.sync()
                self.record.write()

    def _portion(self, slots: int, have: Sequence[int], kept: int = 0, own: str = "") -> tuple[int, ...]:
        """How many of `slots` each directory gets in addition to the `have` slots of the store `own`."""
        page = self._page_bytes
        others = [bytes_of_stores(directory, but=own) for directory in self._limits]
        limits = [
            None if limit is None else max(0, (limit - other) // page - has)
            for limit, other, has in zip(self._limits.values(), others, have, strict=True)
        ]
        portion = portion_of(slots, limits)
        if portion is None:
            room = sum(limit for limit in limits if limit is not None)
            taken = [f"checkpoints there keep {format_bytes(kept * page)}"] if kept else []
            if any(others):
                taken.append(f"stores of another page size or other directories take {format_bytes(sum(others))}")
            raise BudgetError(
                f"SSD {', '.join(map(str, self._limits))}: {format_bytes(slots * page)} more are needed, but only "
                f"{format_bytes(room * page)} are allowed"
                f"{'; ' + ' and '.join(taken) + ': delete checkpoints (see pagoda inspect),' if taken else ':'} "
                f"raise memory.ssd='DIR:SIZE', or name another directory.{gc_hint(self._limits)}",
                tier="ssd",
            )
        return portion


def _tidy(directory: Path) -> None:
    """Delete Pagoda's own files that a crash left in a locked directory. `PageStore` says which, and why.

    Warns of folders that look like a store but are not, and of orphans.
    """
    for reason in unknown_in(directory):
        _log.warning("%s; the folder is left alone", reason)
    for store, stripe in stores_in(directory):
        remove_temporary_files(store, stripe)
        for commit in store.readable_commits() if stripe == 0 else ():
            why = why_abandoned(commit)
            if why is not None:
                _log.warning("checkpoint %s: %s; its pages on SSD are free again", commit.checkpoint, why)
                with suppress(StorageError):  # the next one to open it will remove it
                    store.remove_commit(commit.commit)
    if hint := gc_hint([directory], stores=False):
        _log.warning("SSD directory %s:%s", directory, hint)


def _check_no_copy(record: StoreRecord) -> None:
    """Raises StorageError if a stripe of a store with several stripes may be a copy whose original is still in use. The
    stripes that both share must then not be written to, because the original needs them unchanged."""
    here = record.directories
    written = {read_store(directory, record.id)[0].directories for directory in here}
    if len(written) > 1:
        raise StorageError(
            f"{record.folders[0]} and the folders of its store on the other drives were not last used together. One of "
            "them may be a copy: name the original directories."
        )
    for stripe, place in enumerate(written.pop()) if len(here) > 1 else ():
        try:
            copied = read_store(place, record.id)[1] == stripe and not os.path.samefile(place, here[stripe])
        except OSError:  # includes StorageError: nothing of the store is there
            continue
        if copied:
            raise StorageError(
                f"{record.folders[stripe]} is a copy of a folder that is still in {place}: name that directory instead."
            )
