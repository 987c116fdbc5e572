"""The bytes of an SSD tier: one preallocated file of pages that no crash can leave behind."""

import errno
import fcntl
import logging
import mmap
import os
import secrets
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

from pagoda.errors import ConfigError, StorageError
from pagoda.memory.page import PAGE_ALIGN
from pagoda.memory.sizes import format_bytes

_log = logging.getLogger("pagoda")

_O_DIRECT: int = getattr(os, "O_DIRECT", 0)
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)


class PageFile:
    """`pages` slots of `page_bytes` in a file inside `directory`, read and written in place.

    Invariants: the space is reserved before the constructor returns, so no later write runs out of disk; the
    file has no name, so it vanishes with the process however that ends; a slot never written reads as zeros.

    Direct I/O (O_DIRECT) where the file system takes it, else buffered with one warning: `direct` says which,
    `fallback_reason` why not (None when direct). Both ask the same alignment of callers, so that a program
    that runs on one runs on the other.

    Thread-safe: I/O is positional and releases the GIL. `close` after the last transfer, not during it.
    """

    def __init__(self, directory: str | Path, pages: int, page_bytes: int) -> None:
        """Raises ConfigError when `pages` is below 1 or `page_bytes` is not a multiple of 4096.

        Raises StorageError when the directory is missing or cannot be written, or has not the space.
        """
        if pages < 1 or page_bytes < 1 or page_bytes % PAGE_ALIGN:
            raise ConfigError(
                f"a page file needs at least 1 page of a multiple of {PAGE_ALIGN} bytes, not {pages} of {page_bytes}"
            )
        self.directory = Path(directory)
        self.pages = pages
        self.page_bytes = page_bytes
        self.nbytes = pages * page_bytes
        self.fallback_reason: str | None = None

        self._check_free_space()
        self._fd = self._create_unnamed()
        # Also closes when the object is dropped, which gives the disk space back.
        self._closer = weakref.finalize(self, os.close, self._fd)
        try:
            self._reserve()
            self.fallback_reason = self._refusal_of_direct()
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
    def direct(self) -> bool:
        """Whether transfers bypass the page cache."""
        return self.fallback_reason is None

    def pread(self, page: int, view: memoryview, offset: int = 0) -> None:
        """Fill `view` from byte `offset` of slot `page` on; it may reach into the slots that follow.

        Raises ValueError when the bytes leave the file, or address, offset or length is not a multiple of
        4096; StorageError, naming offset, size and cause, when the disk fails.
        """
        self._transfer("read", os.preadv, page, view, offset)

    def pwrite(self, page: int, view: memoryview, offset: int = 0) -> None:
        """Write `view` at byte `offset` of slot `page` on; it may reach into the slots that follow.

        Raises as `pread` does. On return the drive has the bytes (or, buffered, the kernel); nothing is
        synced, since a page file does not outlive its process.
        """
        self._transfer("write", os.pwritev, page, view, offset)

    def close(self) -> None:
        """Give the disk space back. Idempotent."""
        self._closer()

    def __enter__(self) -> "PageFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_free_space(self) -> None:
        try:
            free = _free_bytes(self.directory)
        except OSError as error:
            raise StorageError(
                f"SSD directory {self.directory} cannot be used: {error.strerror}; "
                "create it (mkdir -p) or name another in ssd="
            ) from error
        if not self.directory.is_dir():
            raise StorageError(f"SSD directory {self.directory} is not a directory; name another in ssd=")
        if free < self.nbytes:
            raise self._too_full(free)

    def _create_unnamed(self) -> int:
        path = self.directory / f"pagoda-{os.getpid()}-{secrets.token_hex(6)}.pages"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise StorageError(
                f"SSD directory {self.directory} cannot be written: {error.strerror}; "
                "make it writable for this user or name another in ssd="
            ) from error
        # Before anything can fail or crash. The open descriptor keeps the bytes.
        os.unlink(path)
        return fd

    def _reserve(self) -> None:
        try:
            os.posix_fallocate(self._fd, 0, self.nbytes)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                # Read while the descriptor still holds what it got: that part is ours too.
                got = os.fstat(self._fd).st_blocks * 512
                raise self._too_full(_free_bytes(self.directory) + got) from error
            raise StorageError(
                f"SSD directory {self.directory} cannot reserve {format_bytes(self.nbytes)}: "
                f"{error.strerror}; name a directory on a local file system in ssd="
            ) from error

    def _too_full(self, free: int) -> StorageError:
        # A quota refuses although the disk looks free enough; then the shortfall is unknown.
        short = f"{format_bytes(self.nbytes - free)} short" if free < self.nbytes else "refused by a quota"
        return StorageError(
            f"SSD directory {self.directory} is too full: asked {format_bytes(self.nbytes)} "
            f"({self.pages} pages), free {format_bytes(max(free, 0))}, {short}; "
            "free some space, lower ssd=, or name a directory on a larger disk"
        )

    def _refusal_of_direct(self) -> str | None:
        """Switch to direct I/O and prove it by one aligned write and read. None, or why it stays buffered."""
        if not _O_DIRECT:
            return "this system has no O_DIRECT"
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        with mmap.mmap(-1, PAGE_ALIGN) as block:  # zeros, so the slot still reads as never written
            try:
                fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | _O_DIRECT)
                # Some file systems take the flag and refuse the transfer.
                moved = os.pwritev(self._fd, [block], 0), os.preadv(self._fd, [block], 0)
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise StorageError(
                        f"SSD directory {self.directory} failed a first write and read of {PAGE_ALIGN} "
                        f"bytes: {error.strerror}; check the disk or name another directory in ssd="
                    ) from error
                fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)
                return f"the file system refuses direct I/O ({error.strerror})"
        if moved != (PAGE_ALIGN, PAGE_ALIGN):
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)
            return f"direct I/O moved {moved} instead of {PAGE_ALIGN} bytes"
        return None

    def _transfer(
        self,
        verb: str,
        call: Callable[[int, Sequence[memoryview], int], int],
        page: int,
        view: memoryview,
        offset: int,
    ) -> None:
        data = view.cast("B")
        position = page * self.page_bytes + offset
        self._check_range(verb, position, data)
        # After a short direct transfer, go on from the last whole block: direct I/O cannot start inside one.
        block = PAGE_ALIGN if self.direct else 1
        done = 0
        while done < data.nbytes:
            try:
                moved = call(self._fd, [data[done:]], position + done)
            except OSError as error:
                raise self._failed(verb, position + done, data.nbytes - done, str(error.strerror)) from error
            reached = done + moved
            if reached < data.nbytes:
                reached -= reached % block
            if reached == done:
                cause = "end of file" if verb == "read" else "the disk took no more"
                raise self._failed(verb, position + done, data.nbytes - done, f"{cause} after {moved} bytes")
            done = reached

    def _check_range(self, verb: str, position: int, data: memoryview) -> None:
        if not self._closer.alive:
            raise self._failed(verb, position, data.nbytes, "the page file is closed")
        if position < 0 or position + data.nbytes > self.nbytes:
            raise ValueError(
                f"asked to {verb} {data.nbytes} bytes at offset {position} of a page file of {self.nbytes} bytes"
            )
        address = np.frombuffer(data, np.uint8).__array_interface__["data"][0] if data.nbytes else 0
        if position % PAGE_ALIGN or data.nbytes % PAGE_ALIGN or address % PAGE_ALIGN:
            raise ValueError(
                f"direct I/O needs multiples of {PAGE_ALIGN}: asked to {verb} {data.nbytes} bytes "
                f"at offset {position}, memory address {address:#x}; take the buffer from an Arena"
            )

    def _failed(self, verb: str, position: int, nbytes: int, cause: str) -> StorageError:
        return StorageError(
            f"page file in {self.directory}: failed to {verb} {nbytes} bytes at offset {position}: {cause}; "
            "check the disk (dmesg), then resume from the last checkpoint"
        )


def _free_bytes(directory: Path) -> int:
    """Bytes an unprivileged user may still take on the file system of `directory`."""
    stat = os.statvfs(directory)
    return stat.f_bavail * stat.f_frsize
