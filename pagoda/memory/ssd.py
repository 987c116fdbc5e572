"""The bytes of an SSD tier: preallocated files of pages, on one drive or striped over several."""

import errno
import fcntl
import logging
import mmap
import os
import secrets
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from pagoda.errors import ConfigError, StorageError
from pagoda.memory.files import SyncError, inside, open_regular, storage_errors
from pagoda.memory.page import PAGE_ALIGN
from pagoda.memory.sizes import format_bytes

_log = logging.getLogger("pagoda")

_O_DIRECT: int = getattr(os, "O_DIRECT", 0)
_O_TMPFILE: int = getattr(os, "O_TMPFILE", 0)
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)
_MOST_BUFFERS = 1024
"""IOV_MAX: buffers of one vectored call."""


class PageFile:
    """`pages` slots of `page_bytes` in a file inside `directory`.

    Invariants: the space is reserved before the constructor returns, so no later write runs out of disk; until
    `link` the file has no name, so it vanishes with the process however that ends; a slot never written reads as
    zeros.

    Direct I/O (O_DIRECT) where the file system takes it, else buffered with one warning: `direct` says which,
    `fallback_reason` why not (None when direct). Both ask the same alignment of callers, so that a program
    that runs on one runs on the other.

    Thread-safe: I/O is positional and releases the GIL. `close` after the last transfer, not during it.
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
        """A new file; or `existing`, which has a name, and of which `pages` are used.

        `fallback` makes the name that a new file gets at once where the file system has no files without one that could
        be named later; left out, such a file stays nameless for good.

        Raises ConfigError when `pages` is below 1 or `page_bytes` is not a multiple of 4096. Raises StorageError when
        the directory is missing, cannot be written or has not the space, or when an existing file is missing, shorter
        than its pages, a symbolic link or no regular file, or has a second name (a hard link) and is to be written to.
        """
        if pages < 1 or page_bytes < 1 or page_bytes % PAGE_ALIGN:
            raise ConfigError(
                f"a page file needs at least 1 page of a multiple of {PAGE_ALIGN} bytes, not {pages} of {page_bytes}"
            )
        self.directory = Path(directory)
        self.path = existing
        """Its name, once it has one."""
        self.pages = pages
        self.page_bytes = page_bytes
        self.fallback_reason: str | None = None
        self._sync_error: SyncError | None = None

        if existing is None:
            self._check_free_space(self.nbytes)
            self._fd = self._create(fallback)
        else:
            self._fd = self._open(existing, os.O_RDONLY if read_only else os.O_RDWR)
        # Also closes when the object is dropped, which gives the disk space of a file without a name back.
        self._closer = weakref.finalize(self, os.close, self._fd)
        try:
            if existing is None:
                self._reserve()
            else:
                self._check_length()
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
        """Whether `name` in a folder is this very file, with all of its pages."""
        try:
            with inside(folder.parent, folder.name) as descriptor:
                there = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(there, os.fstat(self._fd)) and there.st_size >= self.nbytes

    def pread(self, page: int, view: memoryview, offset: int = 0) -> None:
        """Fill `view` from byte `offset` of slot `page` on; it may reach into the slots that follow.

        Raises ValueError when the bytes leave the file, or address, offset or length is not a multiple of
        4096; StorageError, naming offset, size and cause, when the disk fails.
        """
        self._transfer("read", os.preadv, page, [view], offset)

    def pwrite(self, page: int, view: memoryview, offset: int = 0) -> None:
        """Write `view` at byte `offset` of slot `page` on; it may reach into the slots that follow.

        Raises as `pread` does. On return the drive has the bytes (or, buffered, the kernel); they are safe from a
        loss of power after `sync`.
        """
        self._transfer("write", os.pwritev, page, [view], offset)

    def preadv(self, page: int, views: Sequence[memoryview]) -> None:
        """Fill several buffers, in order, from slot `page` on, with as few calls as the system allows."""
        for first in range(0, len(views), _MOST_BUFFERS):
            part = views[first : first + _MOST_BUFFERS]
            self._transfer("read", os.preadv, page, part, sum(v.nbytes for v in views[:first]))

    def pwritev(self, page: int, views: Sequence[memoryview]) -> None:
        """Write several buffers, in order, from slot `page` on, with as few calls as the system allows."""
        for first in range(0, len(views), _MOST_BUFFERS):
            part = views[first : first + _MOST_BUFFERS]
            self._transfer("write", os.pwritev, page, part, sum(v.nbytes for v in views[:first]))

    def grow(self, pages: int) -> None:
        """Have `pages` slots. Raises StorageError when the disk has not the space; then it keeps those it has."""
        if pages <= self.pages:
            return
        before, self.pages = self.pages, pages
        try:
            self._check_free_space((pages - before) * self.page_bytes)
            self._reserve()
        except BaseException:
            self.pages = before
            raise

    def link(self, path: Path) -> None:
        """Give a file without a name this one; a file that has a name keeps it. The folder may not be a symbolic link.

        Raises StorageError.
        """
        if self.path is not None:
            return
        what = f"the page file {path} cannot be given its name"
        with storage_errors(what), inside(path.parent.parent, path.parent.name) as folder:
            # A directory descriptor, though the path is absolute, because only linkat follows the symbolic link.
            os.link(f"/proc/self/fd/{self._fd}", path.name, dst_dir_fd=folder, follow_symlinks=True)
        self.path = path

    def sync(self) -> None:
        """Make what was written safe from a loss of power.

        Raises SyncError; from then on every sync of this file does, because the kernel may have dropped what it could
        not write and report success the next time.
        """
        if self._sync_error is None:
            try:
                os.fdatasync(self._fd)
            except OSError as error:
                self._sync_error = SyncError(
                    f"page file in {self.directory}: failed to sync: {error.strerror}; check the disk (dmesg), then "
                    "resume from the last checkpoint"
                )
        if self._sync_error is not None:
            raise SyncError(str(self._sync_error))

    def close(self) -> None:
        """Close the file; the disk space of one without a name is free again. Idempotent."""
        self._closer()

    def __enter__(self) -> "PageFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_free_space(self, nbytes: int) -> None:
        try:
            free = _free_bytes(self.directory)
        except OSError as error:
            raise StorageError(
                f"SSD directory {self.directory} cannot be used: {error.strerror}; "
                "create it (mkdir -p) or name another in ssd="
            ) from error
        if not self.directory.is_dir():
            raise StorageError(f"SSD directory {self.directory} is not a directory; name another in ssd=")
        if free < nbytes:
            raise self._too_full(nbytes, free)

    def _create(self, fallback: Callable[[], Path] | None) -> int:
        try:
            if _O_TMPFILE:
                try:
                    return os.open(self.directory, os.O_RDWR | _O_TMPFILE, 0o600)
                except OSError as error:
                    if error.errno not in _NO_TMPFILE:
                        raise
            named = None if fallback is None else fallback()
            path = named or self.directory / f"pagoda-{os.getpid()}-{secrets.token_hex(6)}.pages"
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise StorageError(
                f"SSD directory {self.directory} cannot be written: {error.strerror}; "
                "make it writable for this user or name another in ssd="
            ) from error
        if named is None:
            os.unlink(path)  # the open descriptor keeps the bytes
        self.path = named
        return fd

    def _open(self, path: Path, flags: int) -> int:
        with storage_errors(f"the page file {path} cannot be opened"):
            with inside(path.parent.parent, path.parent.name) as folder:
                descriptor = open_regular(path.name, flags, dir_fd=folder, follow=False)
            if flags != os.O_RDONLY and os.fstat(descriptor).st_nlink != 1:
                os.close(descriptor)
                raise StorageError(
                    f"the page file {path} has a second name (a hard link), and writing to it would change that one too"
                )
        return descriptor

    def _check_length(self) -> None:
        size = os.fstat(self._fd).st_size
        if size < self.nbytes:
            raise StorageError(
                f"the page file {self.path} is truncated: it has {size} bytes where its store recorded {self.nbytes}"
            )

    def _reserve(self) -> None:
        try:
            os.posix_fallocate(self._fd, 0, self.nbytes)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                # Read while the descriptor still holds what it got: that part is ours too.
                got = os.fstat(self._fd).st_blocks * 512
                raise self._too_full(self.nbytes, _free_bytes(self.directory) + got) from error
            raise StorageError(
                f"SSD directory {self.directory} cannot reserve {format_bytes(self.nbytes)}: "
                f"{error.strerror}; name a directory on a local file system in ssd="
            ) from error

    def _too_full(self, nbytes: int, free: int) -> StorageError:
        # A quota refuses although the disk looks free enough; then the shortfall is unknown.
        short = f"{format_bytes(nbytes - free)} short" if free < nbytes else "refused by a quota"
        return StorageError(
            f"SSD directory {self.directory} is too full: asked {format_bytes(nbytes)} "
            f"({nbytes // self.page_bytes} pages), free {format_bytes(max(free, 0))}, {short}; "
            "free some space, lower ssd=, or name a directory on a larger disk"
        )

    def _refusal_of_direct(self, writes: bool) -> str | None:
        """Switch to direct I/O and prove it by one aligned (write and) read. None, or why it stays buffered."""
        if not _O_DIRECT:
            return "this system has no O_DIRECT"
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        with mmap.mmap(-1, PAGE_ALIGN) as block:  # zeros, so the slot still reads as never written
            try:
                fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | _O_DIRECT)
                # Some file systems take the flag and refuse the transfer.
                moved = [os.pwritev(self._fd, [block], 0)] if writes else []
                moved.append(os.preadv(self._fd, [block], 0))
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise StorageError(
                        f"SSD directory {self.directory} failed a first transfer of {PAGE_ALIGN} "
                        f"bytes: {error.strerror}; check the disk or name another directory in ssd="
                    ) from error
                fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)
                return f"the file system refuses direct I/O ({error.strerror})"
        if set(moved) != {PAGE_ALIGN}:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)
            return f"direct I/O moved {moved} instead of {PAGE_ALIGN} bytes"
        return None

    def _transfer(
        self,
        verb: str,
        call: Callable[[int, Sequence[memoryview], int], int],
        page: int,
        views: Sequence[memoryview],
        offset: int,
    ) -> None:
        buffers = [view.cast("B") for view in views]
        total = sum(buffer.nbytes for buffer in buffers)
        position = page * self.page_bytes + offset
        self.check_transfer(verb, position, [(_address(buffer), buffer.nbytes) for buffer in buffers])
        # After a short direct transfer, go on from the last whole block: direct I/O cannot start inside one.
        block = PAGE_ALIGN if self.direct else 1
        done = 0
        while done < total:
            try:
                moved = call(self._fd, buffers, position + done)
            except OSError as error:
                raise self.failed(verb, position + done, total - done, str(error.strerror)) from error
            reached = done + moved
            if reached < total:
                reached -= reached % block
            if reached == done:
                cause = "end of file" if verb == "read" else "the disk took no more"
                raise self.failed(verb, position + done, total - done, f"{cause} after {moved} bytes")
            buffers = list(_without(buffers, reached - done))
            done = reached

    def check_transfer(self, verb: str, position: int, parts: Sequence[tuple[int, int]]) -> None:
        """Raises ValueError unless buffers, of (address, bytes), can be moved to or from this byte of the file on;
        StorageError where it is closed."""
        total = sum(nbytes for _, nbytes in parts)
        if not self._closer.alive:
            raise self.failed(verb, position, total, "the page file is closed")
        if position < 0 or position + total > self.nbytes:
            raise ValueError(
                f"asked to {verb} {total} bytes at offset {position} of a page file of {self.nbytes} bytes"
            )
        for address, nbytes in parts:
            if position % PAGE_ALIGN or nbytes % PAGE_ALIGN or address % PAGE_ALIGN:
                raise ValueError(
                    f"direct I/O needs multiples of {PAGE_ALIGN}: asked to {verb} {nbytes} bytes "
                    f"at offset {position}, memory address {address:#x}; take the buffer from an Arena"
                )

    def failed(self, verb: str, position: int, nbytes: int, cause: str) -> StorageError:
        """The error of a transfer that failed."""
        return StorageError(
            f"page file in {self.directory}: failed to {verb} {nbytes} bytes at offset {position}: {cause}; "
            "check the disk (dmesg), then resume from the last checkpoint"
        )


class StripedFile:
    """Slots [0, slots) over the page files of several drives, so that adjoining slots lie on different ones.

    Slots were laid in `portions`, each a number of slots on every drive: round robin, and past the drives whose
    share is full. A file that grows gets one portion more, so no slot ever moves.

    Thread-safe as `PageFile` is; transfers of a call follow each other, one for each drive and stretch of slots that
    adjoin there, so what keeps several drives busy is several threads.
    """

    def __init__(self, files: Sequence[PageFile], portions: Sequence[Sequence[int]]) -> None:
        """Raises ValueError when the portions are not those of these files."""
        self.files = tuple(files)
        self.page_bytes = files[0].page_bytes
        self.portions = [tuple(portion) for portion in portions]
        totals = tuple(map(sum, zip(*self.portions, strict=True)))
        if totals != tuple(file.pages for file in files):
            raise ValueError(f"slots {totals} in files of {[file.pages for file in files]} pages")
        self._map()

    @property
    def slots(self) -> int:
        return len(self._drive)

    @property
    def nbytes(self) -> int:
        return self.slots * self.page_bytes

    def read(self, slots: npt.NDArray[np.int64], into: memoryview) -> None:
        """Fill `into` with whole pages, from these slots. Raises as `PageFile.pread` does."""
        for file, page, views in self._stretches(slots, into):
            file.preadv(page, views)

    def write(self, slots: npt.NDArray[np.int64], data: memoryview) -> None:
        """Write whole pages to these slots. Raises as `PageFile.pwrite` does."""
        for file, page, views in self._stretches(slots, data):
            file.pwritev(page, views)

    def where(self, slot: int) -> str:
        """The file and byte offset of a slot, for messages."""
        file = self.files[self._drive[slot]]
        return f"{file.path or f'the page file in {file.directory}'} at offset {self._page[slot] * self.page_bytes}"

    def grow(self, portion: Sequence[int]) -> None:
        """Add a portion. Raises StorageError when a disk has not the space."""
        for file, more in zip(self.files, portion, strict=True):
            file.grow(file.pages + more)
        self.portions.append(tuple(portion))
        self._map()

    def sync(self) -> None:
        """Make what was written safe from a loss of power, on every drive."""
        for file in self.files:
            file.sync()

    def close(self) -> None:
        for file in self.files:
            file.close()

    def _map(self) -> None:
        """Compute the drive and the page of its file for every slot."""
        drives: list[npt.NDArray[np.int64]] = []
        for portion in self.portions:
            turns = np.concatenate([np.arange(count) for count in portion])
            drive = np.repeat(np.arange(len(portion)), portion)
            drives.append(drive[np.lexsort((drive, turns))])
        self._drive = np.concatenate(drives)
        self._page = np.empty_like(self._drive)
        for index in range(len(self.files)):
            mine = self._drive == index
            self._page[mine] = np.arange(mine.sum())

    def _stretches(
        self, slots: npt.NDArray[np.int64], data: memoryview
    ) -> Iterator[tuple[PageFile, int, list[memoryview]]]:
        """(file, first page, buffers) of every stretch of pages that adjoin on a drive."""
        size = self.page_bytes
        drives, pages = self._drive[slots].tolist(), self._page[slots].tolist()
        for index, file in enumerate(self.files):
            mine = [i for i, drive in enumerate(drives) if drive == index]
            start = stop = 0
            while start < len(mine):
                while stop < len(mine) and pages[mine[stop]] - pages[mine[start]] == stop - start:
                    stop += 1
                part, start = mine[start:stop], stop
                if part[-1] - part[0] == len(part) - 1:
                    views = [data[part[0] * size : (part[-1] + 1) * size]]
                else:
                    views = [data[i * size : (i + 1) * size] for i in part]
                yield file, pages[part[0]], views


def portion_of(slots: int, limits: Sequence[int | None]) -> tuple[int, ...] | None:
    """How many of `slots` go to each drive: as equal as `limits` (slots; None for no limit) allow. None: too many."""
    counts = [0] * len(limits)
    left = slots
    while left:
        open_drives = [d for d, limit in enumerate(limits) if limit is None or counts[d] < limit]
        if not open_drives:
            return None
        share = -(-left // len(open_drives))
        for drive in open_drives:
            limit = limits[drive]
            more = min(share, left) if limit is None else min(share, left, limit - counts[drive])
            counts[drive] += more
            left -= more
    return tuple(counts)


def _address(buffer: memoryview) -> int:
    """Where a buffer lies in memory."""
    return np.frombuffer(buffer, np.uint8).__array_interface__["data"][0] if buffer.nbytes else 0


def _without(buffers: Sequence[memoryview], nbytes: int) -> Iterator[memoryview]:
    """What is left of buffers whose first `nbytes` have been moved."""
    for buffer in buffers:
        if nbytes < buffer.nbytes:
            yield buffer[nbytes:]
        nbytes = max(0, nbytes - buffer.nbytes)


def _free_bytes(directory: Path) -> int:
    """Bytes an unprivileged user may still take on the file system of `directory`."""
    stat = os.statvfs(directory)
    return stat.f_bavail * stat.f_frsize
