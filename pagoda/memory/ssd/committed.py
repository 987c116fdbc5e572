"""Reads the pages of a commit of this process or another one."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pagoda.errors import StorageError
from pagoda.memory.arena import Arena
from pagoda.memory.page import PageRun
from pagoda.memory.ssd.checked_file import open_pages
from pagoda.memory.ssd.commits import Commit, Reference, table_hash
from pagoda.memory.ssd.record import StoreRecord, locate


class CommittedPages:
    """The pages of one commit, read-only and verified. Thread-safe. Must be closed.

    They need no lock, because nothing overwrites them as long as the commit exists. If the commit is deleted meanwhile,
    a read raises CorruptPageError at worst.
    """

    def __init__(self, record: StoreRecord, commit: Commit) -> None:
        """Raises StorageError if a page file is missing or shorter than its store says."""
        self.store = record.id
        self.commit = commit.commit
        self.page_bytes = record.page_bytes
        self.pages = len(commit.table.slots)
        self._table = commit.table
        self._file = open_pages(record, read_only=True)

    def load(self, run: PageRun, offset_bytes: int, into: memoryview) -> None:
        """Fill `into` with whole pages, starting at byte `offset_bytes` of `run`. The run is one of the committed tier.

        Raises ValueError if the bytes are outside the run or the commit, or are not whole pages. Raises
        CorruptPageError and StorageError like `SSDTier.load`.
        """
        if run.start < 0 or run.stop > self.pages:
            raise ValueError(f"{run} is not in a commit of {self.pages} pages")
        self._file.read(self._table.part(run.part(offset_bytes, into.nbytes, self.page_bytes)), into)

    def damaged(self) -> Iterator[str]:
        """Read every page, and yield an error message for each damaged page."""
        arena = Arena(self.page_bytes)
        into = arena.view(0, self.page_bytes)
        for page in range(self.pages):
            try:
                self.load(PageRun(page, 1), 0, into)
            except StorageError as error:
                yield f"page {page}: {error}"

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._file.close()


def open_commit(reference: Mapping[str, Any], directories: Sequence[str | Path] = ()) -> CommittedPages:
    """Open the pages of a reference that `PageSnapshot.commit` returned.

    Searches `directories` first, then the directories in which the pages were written. Raises StorageError if the store
    or the commit is missing, if its page table or files are damaged, or if the page table does not match the reference.
    """
    wanted = Reference.from_json(reference)
    record = locate(wanted.store, [*map(Path, directories), *map(Path, wanted.directories)])
    if record is None:
        raise StorageError(
            f"the pages of store {wanted.store} are not in {', '.join(wanted.directories)}"
            f"{''.join(f' or {d}' for d in directories)}: give the directory that has pagoda-{wanted.store}"
        )
    commit = record.read_commit(wanted.commit)
    if table_hash(commit.to_bytes()) != wanted.table or len(commit.table.slots) != wanted.pages:
        raise StorageError(
            f"{record.commit_path(wanted.commit)} is not the page table of the checkpoint, because it was replaced: "
            "restore the original file, or use another checkpoint"
        )
    return CommittedPages(record, commit)
