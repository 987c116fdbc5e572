"""Exclusive use of SSD directories."""

import errno
import fcntl
import gc
import os
import weakref
from collections.abc import Sequence
from pathlib import Path

from pagoda.errors import StorageError


class DirectoryLock:
    """Exclusive advisory locks (flock) on directories. They leave no file behind and end with the process.

    Two locks in one process exclude each other too. Locks belong to this process alone: a process that it starts or
    forks cannot release them, and does not hold them after this process ends.
    """

    def __init__(self, directories: Sequence[Path]) -> None:
        """Raises StorageError if a directory is missing or locked. The message names the process that holds the
        lock."""
        self._descriptors: list[int] = []
        # Also unlocks when the object is dropped, for example after an error in the code that created it.
        self._closer = weakref.finalize(self, _unlock, self._descriptors)
        _locks.add(self)
        try:
            for directory in directories:
                self._lock(directory)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unlock the directories. Idempotent."""
        self._closer()

    def _lock(self, directory: Path) -> None:
        try:
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise StorageError(
                f"SSD directory {directory} cannot be used: {error.strerror}; "
                "create it (mkdir -p) or name another in memory.ssd"
            ) from error
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                gc.collect()  # an optimizer that was dropped without close() may still hold it
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            why = f"cannot be locked: {error.strerror}; name a directory on a local file system in memory.ssd"
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                holder = _holder(os.fstat(descriptor).st_ino)
                why = (
                    f"is in use by {holder}: wait for it to end, close() its optimizer, or "
                    "name another directory in memory.ssd"
                )
            os.close(descriptor)
            raise StorageError(f"SSD directory {directory} {why}") from error
        self._descriptors.append(descriptor)


_locks: "weakref.WeakSet[DirectoryLock]" = weakref.WeakSet()


def _unlock(descriptors: list[int], shared: bool = False) -> None:
    while descriptors:
        descriptor = descriptors.pop()
        if not shared:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _abandon_all() -> None:
    """In a forked process, close its copies of the descriptors without unlocking the files that they share."""
    for lock in _locks:
        _unlock(lock._descriptors, shared=True)


os.register_at_fork(after_in_child=_abandon_all)


def _holder(inode: int) -> str:
    """The process that holds the lock, if the system tells."""
    try:
        with open("/proc/locks") as locks:
            for line in locks:
                fields = line.split()
                if fields[1] == "FLOCK" and fields[5].endswith(f":{inode}"):
                    pid = int(fields[4])
                    if pid == os.getpid():
                        return f"another optimizer of this process (pid {pid})"
                    if pid > 0:
                        return f"another process (pid {pid})"
    except (OSError, ValueError, IndexError):
        pass
    return "another process"
