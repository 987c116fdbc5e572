"""Files that several threads fill past the page cache, with any bytes at any place."""

import errno
import os
import threading
from pathlib import Path

from pagoda.memory.page import PAGE_ALIGN

_O_DIRECT: int = getattr(os, "O_DIRECT", 0)
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)
_UNSYNCED_BYTES = 64 << 20
"""Most bytes of a file that the kernel has and the disk has not, while it is written through the page cache."""


class DirectFile:
    """A file to write to. On return of `pwrite` the drive has most of the bytes; all are safe after `sync`.

    A copy to the page cache takes a core as long as the drive takes to write: half a second for each GiB. So whole
    blocks go to the drive from where they are in memory (O_DIRECT). Less than a block, at either end, goes through the
    page cache; and everything does where memory is not aligned or the file system refuses direct I/O, but is synced
    every 64 MiB and dropped from it, so that one large file cannot fill RAM with what waits to be written.

    Thread-safe as long as writes do not overlap. `close` after the last of them.
    """

    def __init__(self, path: Path, create: bool) -> None:
        """Raises OSError where the file cannot be opened; FileExistsError if it is to be made and is there already."""
        self._lock = threading.Lock()
        self._unsynced = 0
        self._direct: int | None = None
        self._fd = os.open(path, os.O_WRONLY | (os.O_CREAT | os.O_EXCL if create else 0), 0o666)
        if _O_DIRECT:
            try:
                self._direct = os.open(path, os.O_WRONLY | _O_DIRECT)
            except OSError as error:
                if error.errno not in _REFUSALS:
                    self.close()
                    raise

    def reserve(self, nbytes: int) -> None:
        """Make it `nbytes` long, and have the space for that. Raises OSError where the disk has not."""
        os.posix_fallocate(self._fd, 0, nbytes)

    def pwrite(self, data: memoryview, offset: int) -> None:
        """Write all of `data` from byte `offset` of the file on. Raises OSError as the disk does."""
        data = data.cast("B")
        head = min(-offset % PAGE_ALIGN, data.nbytes)
        end = data.nbytes - (data.nbytes - head) % PAGE_ALIGN
        self._through_cache(data[:head], offset)
        done = head + self._past_cache(data[head:end], offset + head)
        self._through_cache(data[done:], offset + done)

    def sync(self) -> None:
        """Make what was written safe from a loss of power.

        Raises OSError as the disk does. The file is of no use then: the kernel may have dropped what it could not
        write.
        """
        os.fsync(self._fd)

    def close(self) -> None:
        """Close the file as it is. Idempotent."""
        for descriptor in (self._fd, self._direct):
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
        self._fd, self._direct = -1, None

    def _past_cache(self, blocks: memoryview, offset: int) -> int:
        """Write whole blocks as far as direct I/O takes them; returns the bytes that it took."""
        done = 0
        while self._direct is not None and done < blocks.nbytes:
            try:
                moved = os.pwrite(self._direct, blocks[done:], offset + done)
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise
                break
            if moved < PAGE_ALIGN:
                break  # the page cache says why
            done += moved - moved % PAGE_ALIGN
        return done

    def _through_cache(self, data: memoryview, offset: int) -> None:
        with self._lock:
            self._unsynced += data.nbytes
            full = self._unsynced >= _UNSYNCED_BYTES
            self._unsynced = 0 if full else self._unsynced
        while data:
            written = os.pwrite(self._fd, data, offset)
            data, offset = data[written:], offset + written
        if full:
            self.sync()
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
