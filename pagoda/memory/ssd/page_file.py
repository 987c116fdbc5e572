"""A preallocated file of pages on one drive: how it is created or opened, and every read and write of pages on SSD.

A transfer that fails raises StorageError, and is not repeated here. Those of an update are repeated by the stream
(`schedule/stream.py`), others as `Scheduler.failed` says.
"""

import errno
import fcntl
import logging
import mmap
import os
import secrets
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from pagoda.errors import ConfigError, StorageError
from pagoda.memory.files import SyncError, inside, open_regular, storage_errors, sync_descriptor
from pagoda.memory.page import PAGE_ALIGN
from pagoda.memory.sizes import format_bytes

_log = logging.getLogger("pagoda")

_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)
_MOST_BUFFERS = 1024
"""IOV_MAX: the most buffers of one vectored call."""


class PageFile:
    """`pages` slots of `page_bytes` in a file inside `directory`.

    Invariants: the space is reserved before the constructor returns, so no later write runs out of disk space; until
    `link` the file has no name, so it vanishes when the process ends for any reason; a slot that was never written
    reads as zeros.

    Uses direct I/O (O_DIRECT) if the file system supports it. Otherwise uses buffered I/O and warns once. `direct` says
    which, and `fallback_reason` says why I/O is buffered (None if it is direct). Take buffers from an `Arena`, because
    direct I/O needs addresses and lengths that are multiples of 4096.

    Thread-safe: I/O is positional and releases the GIL. Call `close` after the last transfer, not during one.
    """

    def __init__(
        self,
        directory: str | Path,
        pages: int,
        page_bytes: int,
        *,
        existing: Path | None = None,
        fallback: Callable[[], Path] | None = None,
        read_only: bool = False,
    ) -> None:
        """Creates a new file, or opens the first `pages` of `existing`, which has a name.

        `fallback` returns the name of a new file if the file system does not support unnamed files that can be linked
        later. Without `fallback`, such a file never gets a name.

        Raises ConfigError if `pages` is below 1 or `page_bytes` is not a multiple of 4096. Raises StorageError if the
        directory is missing, cannot be written or has too little space. Also raises StorageError if an existing file is
        missing, shorter than its pages, a symbolic link or not a regular file, or if it will be written and has a
        second name (a hard link).
        """
        if pages < 1 or page_bytes < 1 or page_bytes % PAGE_ALIGN:
            raise ConfigError(
                f"a page file needs at least 1 page of a multiple of {PAGE_ALIGN} bytes, not {pages} of {page_bytes}"
            )
        self.directory = Path(directory)
        self.path = existing
        """The file's name, once it has one."""
        self.pages = 0 if existing is None else pages
        self.page_bytes = page_bytes
        self.fallback_reason: str | None = None

        if existing is None:
            self._fd = self._create(fallback)
        else:
            self._fd = self._open(existing, os.O_RDONLY if read_only else os.O_RDWR)
        # Also closes when the object is dropped, which frees the disk space of a file without a name.
        self._closer = weakref.finalize(self, os.close, self._fd)
        try:
            if existing is None:
                self.grow(pages)
            elif (size := os.fstat(self._fd).st_size) < self.nbytes:
                raise StorageError(
                    f"the page file {existing} is truncated: it has {size} bytes, but its store recorded {self.nbytes}"
                )
            self.fallback_reason = self._refusal_of_direct(writes=existing is None)
        except BaseException:
            self.close()
            raise
        if self.fallback_reason is not None:
            _log.warning(
                "SSD directory %s: %s; using buffered I/O, which is slower and fills the page cache",
                self.directory,
                self.fallback_reason,
            )

    @property
    def nbytes(self) -> int:
        return self.pages * self.page_bytes

    @property
    def direct(self) -> bool:
        """Whether transfers bypass the page cache."""
        return self.fallback_reason is None

    def is_in(self, folder: Path, name: str) -> bool:
        """Whether `name` in a folder is the same file, with all of its pages."""
        try:
            with inside(folder.parent, folder.name) as descriptor:
                there = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(there, os.fstat(self._fd)) and there.st_size >= self.nbytes

    def pread(self, page: int, *views: memoryview) -> None:
        """Fill buffers in order, starting at slot `page`, with as few calls as possible.

        Raises ValueError if the bytes are outside the file. Raises StorageError with offset, size and cause if the disk
        fails.
        """
        self._transfer("read", page, views)

    def pwrite(self, page: int, *views: memoryview) -> None:
        """Write buffers in order, starting at slot `page`. Raises like `pread`.

        On return the drive has the bytes (or the kernel, if I/O is buffered). After `sync` they survive a loss of
        power.
        """
        self._transfer("write", page, views)

    def _transfer(self, verb: Literal["read", "write"], page: int, views: Sequence[memoryview]) -> None:
        position = page * self.page_bytes
        buffers = [view.cast("B") for view in views]
        end = position + sum(buffer.nbytes for buffer in buffers)
        if not self._closer.alive:
            raise self._failed(verb, position, end, "the page file is closed")
        if position < 0 or end > self.nbytes:
            raise ValueError(
                f"cannot {verb} {end - position} bytes at offset {position} of a page file of {self.nbytes} bytes"
            )
        call = os.preadv if verb == "read" else os.pwritev
        # After a short direct transfer, continue at the last whole block: direct I/O cannot start inside a block.
        block = PAGE_ALIGN if self.direct else 1
        while position < end:
            try:
                moved = call(self._fd, buffers[:_MOST_BUFFERS], position)
            except OSError as error:
                raise self._failed(verb, position, end, str(error.strerror)) from error
            whole = moved if position + moved == end else moved - moved % block
            if not whole:
                cause = "end of file" if verb == "read" else "the disk took no more"
                raise self._failed(verb, position, end, f"{cause} after {moved} bytes")
            position += whole
            buffers = list(_without(buffers, whole))

    def grow(self, pages: int) -> None:
        """Grow to `pages` slots. Raises StorageError if the disk has too little space. The file then keeps its old
        slots."""
        more = (pages - self.pages) * self.page_bytes
        if more <= 0:
            return
        free = self._free_bytes()
        if free < more:
            raise self._too_full(more, free)
        try:
            os.posix_fallocate(self._fd, self.nbytes, more)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                # Read this while the descriptor still holds the part that it got, because that part counts as ours.
                got = os.fstat(self._fd).st_blocks * 512 - self.nbytes
                raise self._too_full(more, self._free_bytes() + got) from error
            raise StorageError(
                f"SSD directory {self.directory} cannot reserve {format_bytes(more)}: "
                f"{error.strerror}; name a directory on a local file system in memory.ssd"
            ) from error
        self.pages = pages

    def link(self, path: Path) -> None:
        """Durably give an unnamed file this name. A file that already has a name keeps it.

        Raises StorageError, also if the folder is a symbolic link, and SyncError.
        """
        what = f"the page file {path} cannot be given its name"
        with storage_errors(what), inside(path.parent.parent, path.parent.name) as folder:
            if self.path is None:
                # Pass a directory descriptor although the path is absolute: without it, `os.link` would not follow
                # the symbolic link.
                os.link(f"/proc/self/fd/{self._fd}", path.name, dst_dir_fd=folder, follow_symlinks=True)
                self.path = path
            sync_descriptor(folder, path)

    def sync(self) -> None:
        """Make written bytes survive a loss of power. Raises SyncError."""
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise SyncError(
                f"page file in {self.directory}: failed to sync: {error.strerror}; check the disk (dmesg), then "
                "resume from the last checkpoint"
            ) from error

    def close(self) -> None:
        """Close the file. The disk space of an unnamed file becomes free. Idempotent."""
        self._closer()

    def _create(self, fallback: Callable[[], Path] | None) -> int:
        try:
            try:
                return os.open(self.directory, os.O_RDWR | os.O_TMPFILE, 0o600)
            except OSError as error:
                if error.errno not in _NO_TMPFILE:
                    raise
            named = None if fallback is None else fallback()
            path = named or self.directory / f"pagoda-{os.getpid()}-{secrets.token_hex(6)}.pages"
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(
                f"SSD directory {self.directory} cannot be used: {error.strerror}; "
                "create it (mkdir -p), make it writable for this user, or name another in memory.ssd"
            ) from error
        if named is None:
            os.unlink(path)  # the open descriptor keeps the bytes
        self.path = named
        return fd

    def _open(self, path: Path, flags: int) -> int:
        what = f"the page file {path} cannot be opened"
        with storage_errors(what), inside(path.parent.parent, path.parent.name) as folder:
            return open_regular(path.name, flags, dir_fd=folder)

    def _free_bytes(self) -> int:
        """Bytes that an unprivileged user can still use on the file system."""
        stat = os.fstatvfs(self._fd)
        return stat.f_bavail * stat.f_frsize

    def _too_full(self, nbytes: int, free: int) -> StorageError:
        # A quota may refuse although the disk seems to have enough free space. The shortfall is then unknown.
        short = f"{format_bytes(nbytes - free)} short" if free < nbytes else "refused by a quota"
        return StorageError(
            f"SSD directory {self.directory} is too full: {format_bytes(nbytes)} "
            f"({nbytes // self.page_bytes} pages) are needed, {format_bytes(max(free, 0))} are free, {short}; "
            "free some space, lower memory.ssd's size, or name a directory on a larger disk"
        )

    def _refusal_of_direct(self, writes: bool) -> str | None:
        """Switch to direct I/O, and test it with one aligned write (if `writes`) and read. Returns None, or why I/O
        stays buffered."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        with mmap.mmap(-1, PAGE_ALIGN) as block:  # zeros, so the slot still reads as never written
            try:
                fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT)
                # Some file systems accept the flag but refuse the transfer.
                if writes:
                    os.pwritev(self._fd, [block], 0)
                os.preadv(self._fd, [block], 0)
                return None
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise StorageError(
                        f"SSD directory {self.directory} failed a first transfer of {PAGE_ALIGN} "
                        f"bytes: {error.strerror}; check the disk or name another directory in memory.ssd"
                    ) from error
                reason = f"the file system refuses direct I/O ({error.strerror})"
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)
        return reason

    def _failed(self, verb: str, position: int, end: int, cause: str) -> StorageError:
        return StorageError(
            f"page file in {self.directory}: failed to {verb} {end - position} bytes at offset {position}: {cause}; "
            "check the disk (dmesg), then resume from the last checkpoint"
        )


def _without(buffers: Sequence[memoryview], nbytes: int) -> Iterator[memoryview]:
    """The buffers without their first `nbytes`, which have been transferred."""
    for buffer in buffers:
        if nbytes < buffer.nbytes:
            yield buffer[nbytes:]
        nbytes = max(0, nbytes - buffer.nbytes)
