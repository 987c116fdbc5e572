"""A page store in its directories: found or made, locked, named at its first commit, deleted when nothing is kept."""

import logging
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from pagoda.errors import BudgetError, StorageError
from pagoda.memory.commits import (
    Commit,
    Reference,
    StoreRecord,
    bytes_of_stores,
    locate,
    remove_commit,
    stores_in,
    sweep,
    write_durably,
)
from pagoda.memory.lock import DirectoryLock
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
        self._lock = DirectoryLock(self._directories)
        try:
            for directory in self._directories:
                sweep(directory)
            if not self._reuse():
                self._create()
        except BaseException:
            self._lock.close()
            raise

    def commits(self) -> list[Commit]:
        """The commits found when it was opened, oldest first."""
        return self._commits

    def commit(self, table: PageTable, checkpoint: Path) -> Reference:
        """Make pages durable, then the table that refers to them. Raises StorageError; then nothing is committed."""
        with self._committing:
            if not self._recorded:
                self.record.make_folders()
                for file, path in zip(self.file.files, self.record.pages_paths, strict=True):
                    file.link(path)
                self.record.write()
                self._recorded = True
            self.file.sync()
            commit = f"{time.time_ns():016x}-{secrets.token_hex(4)}"
            entry = Commit(self.record.id, commit, self._page_bytes, str(checkpoint.absolute()), table)
            write_durably(self.record.commit_path(commit), entry.to_bytes())
        directories = tuple(str(directory) for directory in self.record.directories)
        return Reference(self.record.id, commit, self._page_bytes, len(table.slots), directories)

    def forget(self, commit: str) -> None:
        """Delete a commit durably; one that does not exist is none. Raises StorageError."""
        remove_commit(self.record, commit)

    def close(self) -> None:
        """Close the files, delete them if nothing is committed, and unlock the directories."""
        self.file.close()
        if not self.record.commit_ids():
            self.record.remove()
        self._lock.close()

    def _create(self) -> None:
        portion = self._portion(self._pages + self._spare, [0] * len(self._directories))
        self.record = StoreRecord.new(self._directories, self._page_bytes, portion)
        files: list[PageFile] = []
        try:
            for directory, count, path in zip(self._directories, portion, self.record.pages_paths, strict=True):
                files.append(PageFile(directory, count, self._page_bytes, fallback=path))
        except BaseException:
            for file in files:
                file.close()
            self.record.remove()
            raise
        self.file = StripedFile(files, self.record.portions)

    def _reuse(self) -> bool:
        """Open the newest store of this geometry that commits have left here; False when there is none."""
        here = [directory.resolve() for directory in self._directories]
        for found, first_stripe in reversed(stores_in(here[0])):
            if first_stripe or found.page_bytes != self._page_bytes or len(found.directories) != len(here):
                continue
            record = locate(Reference(found.id, "", found.page_bytes, 0, ()), here)
            if record is None or list(record.directories) != here:
                continue
            files: list[PageFile] = []
            try:
                self._commits = [Commit.read(record.commit_path(commit)) for commit in record.commit_ids()]
                for stripe, path in enumerate(record.pages_paths):
                    count = sum(portion[stripe] for portion in record.portions)
                    files.append(PageFile(here[stripe], count, self._page_bytes, existing=path))
            except StorageError as error:
                _log.warning("%s. Its store is left alone, and a new one made beside it", error)
                self._commits = []
                for file in files:
                    file.close()
                continue
            self.record, self.file, self._recorded = record, StripedFile(files, record.portions), True
            try:
                self._make_room()
            except BaseException:
                self.file.close()
                raise
            return True
        return False

    def _make_room(self) -> None:
        """Grow until all pages fit beside what the commits keep."""
        kept = len(np.unique(np.concatenate([commit.table.written for commit in self._commits])))
        more = self._pages + max(self._spare, kept) - self.file.slots
        if more > 0:
            self.file.grow(self._portion(more, [file.pages for file in self.file.files], kept, self.record.id))
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
                "raise memory.ssd='DIR:SIZE', or name another directory",
                tier="ssd",
            )
        return portion
