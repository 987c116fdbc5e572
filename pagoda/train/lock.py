"""One run at a time in a run directory."""

import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pagoda.errors import ConfigError
from pagoda.memory.files import make_directories

LOCK = ".pagoda-lock"
_held: set[int] = set()
"""Descriptors of the locks that this process holds."""


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold a run directory for this process. Creates the directory if it is missing.

    The lock is an flock on a separate file, because the directory itself may contain page stores, which lock it too. It
    ends with the process, and forked children do not hold it. Afterwards the file is removed, and so are directories
    that were created here and are still empty. Reading needs no lock.

    Raises ConfigError if another run holds the directory, or if it cannot be created or locked.
    """
    made: list[Path] = []
    owner = os.getpid()
    try:
        try:
            made = make_directories(directory)
            descriptor = _lock(directory / LOCK)
        except OSError as error:
            raise ConfigError(f"--out {directory} cannot be used: {error.strerror}: {error.filename}") from error
        try:
            yield
        finally:
            if os.getpid() == owner:
                _unlock(directory / LOCK, descriptor)
    finally:
        if os.getpid() == owner:
            with suppress(OSError):  # something is in them by now
                for path in reversed(made):
                    path.rmdir()


def _lock(path: Path) -> int:
    """Create and lock the file. Returns its descriptor."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ConfigError(f"--out {path.parent} cannot be locked: {LOCK} is not an ordinary file")
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_open_as(descriptor, path):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
                _held.add(descriptor)
                return descriptor
        except BlockingIOError as error:
            holder = os.read(descriptor, 200).decode(errors="replace").strip() or "another process"
            os.close(descriptor)
            raise ConfigError(
                f"--out {path.parent} is in use by another run ({holder}): wait for its end, or give another directory"
            ) from error
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder removed it between the opening and the locking here


def _unlock(path: Path, descriptor: int) -> None:
    with suppress(OSError):
        if _is_open_as(descriptor, path):
            path.unlink()
    _held.discard(descriptor)
    os.close(descriptor)


def _is_open_as(descriptor: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    return False


def _leave_to_parent() -> None:
    """Runs in a forked child. Closes its copies of the descriptors, which would keep the locks after the parent has
    ended."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
