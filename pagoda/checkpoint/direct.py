"""Files that several threads write at any offset, bypassing the page cache."""

import errno
import os
import threading
from pathlib import Path

from pagoda.memory.files import open_regular
from pagoda.memory.page import PAGE_ALIGN

_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)
_UNSYNCED_BYTES = 64 << 20
"""Most bytes of a file that may wait in the page cache to be written to disk."""


class DirectFile:
    """A file to write to. When `pwrite` returns, the drive has most of the bytes. All are safe after `sync`.

    A copy to the page cache takes as much time of a core as the drive's write takes: half a second for each GiB. So
    whole blocks go directly from memory to the drive (O_DIRECT). A partial block at either end goes through the page
    cache. All data does if memory is not aligned or the file system refuses direct I/O. The page cache is then synced
    every 64 MiB and the file's data dropped from it, so that one large file cannot fill RAM with unwritten data.

    Thread-safe if writes do not overlap. Call `close` after the last one.
    """

    def __init__(self, path: Path, create: bool) -> None:
        """Raises OSError if the file cannot be opened, and FileExistsError if `create` is set and the file exists."""
        self._lock = threading.Lock()
        self._unsynced = 0
        self._direct: int | None = None
        self._fd = open_regular(path, os.O_WRONLY | (os.O_CREAT | os.O_EXCL if create else 0))
        try:
            self._direct = open_regular(path, os.O_WRONLY | os.O_DIRECT)
        except OSError as error:
            if error.errno not in _REFUSALS:
                self.close()
                raise

    def reserve(self, nbytes: int) -> None:
        """Extend the file to `nbytes` and reserve its space. Raises OSError if the disk has no room."""
        os.posix_fallocate(self._fd, 0, nbytes)

    def pwrite(self, data: memoryview, offset: int) -> None:
        """Write all of `data` at byte `offset` of the file. Raises OSError if the disk does."""
        data = data.cast("B")
        head = min(-offset % PAGE_ALIGN, data.nbytes)
        end = data.nbytes - (data.nbytes - head) % PAGE_ALIGN
        self._through_cache(data[:head], offset)
        done = head + self._past_cache(data[head:end], offset + head)
        self._through_cache(data[done:], offset + done)

    def sync(self) -> None:
        """Make the written data safe from a loss of power.

        Raises OSError if the disk does. The file is unusable then, because the kernel may have dropped data that it
        could not write.
        """
        os.fsync(self._fd)

    def close(self) -> None:
        """Close the file in its current state. Idempotent."""
        for descriptor in (self._fd, self._direct):
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
        self._fd, self._direct = -1, None

    def _past_cache(self, blocks: memoryview, offset: int) -> int:
        """Write whole blocks until direct I/O accepts no more. Returns the number of bytes written."""
        done = 0
        while self._direct is not None and done < blocks.nbytes:
            try:
                moved = os.pwrite(self._direct, blocks[done:], offset + done)
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise
                break
            if moved < PAGE_ALIGN:
                break  # the write through the page cache raises the error
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
