"""Exclusive use of files and directories."""

import fcntl
import gc
import os
import weakref
from pathlib import Path

from pagoda.memory.files import open_regular


class Lock:
    """An exclusive advisory lock (flock) on a directory or a file. It ends with the process.

    Two locks in one process exclude each other too. A lock belongs to this process alone: a process that it starts or
    forks cannot release it, and does not hold it after this process ends.
    """

    def __init__(self, path: Path, flags: int = os.O_RDONLY | os.O_DIRECTORY) -> None:
        """Open and lock a directory, or a regular file with other `flags`, which may create it.

        Raises BlockingIOError if it is locked already, with what is known of the holder as `strerror`. Raises OSError
        if it cannot be opened or locked.
        """
        self._path = path
        self._held: list[int] = []
        # Also unlocks when the object is dropped, for example after an error in the code that created it.
        weakref.finalize(self, _unlock, self._held)
        _locks.add(self)
        opener = os.open if flags & os.O_DIRECTORY else open_regular
        while not self.is_in_place():
            self.close()  # its holder removed or renamed it between the opening and the locking here
            self._held.append(opener(path, flags))
            try:
                self._lock()
            except BaseException:
                self.close()
                raise

    @property
    def descriptor(self) -> int:
        """The descriptor of what is locked."""
        return self._held[0]

    def is_in_place(self) -> bool:
        """Whether the path is still that of what is locked. False if nothing is locked any more."""
        try:
            return bool(self._held) and os.path.samestat(os.fstat(self.descriptor), self._path.stat())
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Unlock. Idempotent."""
        _unlock(self._held)

    def _lock(self) -> None:
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            gc.collect()  # an object that was dropped without close() may still hold it
            try:
                fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = _holder(os.fstat(self.descriptor).st_ino)
                raise BlockingIOError(error.errno, holder, str(self._path)) from error


_locks: "weakref.WeakSet[Lock]" = weakref.WeakSet()


def _unlock(held: list[int], shared: bool = False) -> None:
    while held:
        descriptor = held.pop()
        if not shared:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _abandon_all() -> None:
    """In a forked process, close its copies of the descriptors without unlocking the files that they share."""
    for lock in _locks:
        _unlock(lock._held, shared=True)


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
                        return f"this process (pid {pid})"
                    if pid > 0:
                        return f"another process (pid {pid})"
    except (OSError, ValueError, IndexError):
        pass
    return "another process"
