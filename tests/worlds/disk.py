"""A drive in memory, in place of the page files. It is slow, fails at random, and then tears what it was writing."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from pagoda.errors import StorageError

from .rules import Rules
from .threads import Threads


class Drive:
    """What all files of a world share."""

    def __init__(self, threads: Threads, rng: Random, rules: Rules) -> None:
        self.threads = threads
        self._rules = rules
        self._is_out = False
        """Whether the last transfer that could has failed."""
        self.failed = 0
        """How many have."""
        self.healthy = False
        """Whether nothing fails for now."""
        self.files: dict[Path, MemoryFile] = {}
        self._rng = rng

    def file(self, directory: str | Path, pages: int, page_bytes: int, **settings: Any) -> "MemoryFile":
        """In place of the class PageFile."""
        existing = settings.get("existing")
        if existing is not None:
            return self.files[existing].opened(pages)
        return MemoryFile(self, Path(directory), pages, page_bytes)

    def transfer(self, verb: str, copies: list[Callable[[], None]]) -> None:
        """Do some copies, with pauses before, between and after them; perhaps fail meanwhile."""
        fails = self._fails(verb)
        done = self._rng.randrange(len(copies)) if fails else len(copies)
        self.threads.pause()
        for copy in copies[:done]:
            copy()
            self.threads.pause()
        if fails:
            self.failed += 1
            raise StorageError(f"the drive of this world failed to {verb}")

    def _fails(self, verb: str) -> bool:
        rules = self._rules
        if self.healthy or not rules.drive_failures or verb not in rules.fails:
            return False
        self._is_out = self._rng.random() < (rules.outage if self._is_out else rules.drive_failures)
        return self._is_out


class MemoryFile:
    """A file of pages. It has the methods of PageFile."""

    fallback_reason = None
    direct = True

    def __init__(self, drive: Drive, directory: Path, pages: int, page_bytes: int) -> None:
        self.directory = directory
        self.path: Path | None = None
        self.pages = pages
        self.page_bytes = page_bytes
        self._drive = drive
        self._bytes = bytearray(pages * page_bytes)

    @property
    def nbytes(self) -> int:
        return self.pages * self.page_bytes

    def opened(self, pages: int) -> "MemoryFile":
        """The same file, opened again."""
        other = MemoryFile(self._drive, self.directory, 0, self.page_bytes)
        other.path, other.pages, other._bytes = self.path, pages, self._bytes
        return other

    def is_in(self, folder: Path, name: str) -> bool:
        return self.path == folder / name

    def pread(self, page: int, *views: memoryview) -> None:
        self._drive.transfer("read", [*self._copies(page, views, reading=True)])

    def pwrite(self, page: int, *views: memoryview) -> None:
        self._drive.transfer("write", [*self._copies(page, views, reading=False)])

    def _copies(self, page: int, views: tuple[memoryview, ...], reading: bool) -> list[Callable[[], None]]:
        at, copies = page * self.page_bytes, []
        for view in views:
            for start in range(0, view.nbytes, self.page_bytes // 2):
                piece = view.cast("B")[start : start + self.page_bytes // 2]
                copies.append(lambda at=at, piece=piece: self._copy(at, piece, reading))
                at += piece.nbytes
        assert at <= self.nbytes, "a transfer outside the file"
        return copies

    def _copy(self, at: int, piece: memoryview, reading: bool) -> None:
        if reading:
            piece[:] = self._bytes[at : at + piece.nbytes]
        else:
            self._bytes[at : at + piece.nbytes] = piece

    def grow(self, pages: int) -> None:
        self._bytes.extend(bytes(max(0, pages - self.pages) * self.page_bytes))
        self.pages = max(self.pages, pages)

    def link(self, path: Path) -> None:
        if self.path is None:
            path.touch()
            self.path = path
            self._drive.files[path] = self

    def sync(self) -> None:
        self._drive.threads.pause()

    def close(self) -> None:
        pass
