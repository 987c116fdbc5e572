"""Exclusive use of SSD directories."""

from collections.abc import Iterable
from contextlib import ExitStack, closing
from pathlib import Path

from pagoda.errors import StorageError
from pagoda.memory.lock import Lock


def lock_directories(directories: Iterable[Path]) -> ExitStack:
    """Lock directories, until the result is closed or dropped. This leaves no file behind.

    Raises StorageError if a directory is missing or locked. The message names the process that holds the lock.
    """
    with ExitStack() as locks:
        for directory in directories:
            try:
                locks.enter_context(closing(Lock(directory)))
            except BlockingIOError as error:
                raise StorageError(
                    f"SSD directory {directory} is in use by {error.strerror}: wait for it to end, close() its "
                    "optimizer, or name another directory in memory.ssd"
                ) from error
            except OSError as error:
                raise StorageError(
                    f"SSD directory {directory} cannot be used: {error.strerror}; create it (mkdir -p), or name "
                    "another on a local file system in memory.ssd"
                ) from error
        return locks.pop_all()
