"""Safe handling of files and directories: nothing outside them can be changed, through no symbolic or hard link, and no
pipe blocks.

Names are resolved relative to the descriptor of an open directory, so a path cannot be replaced between a check and an
action.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from pagoda.errors import StorageError

TEMPORARY = ".tmp"
"""The suffix of a file's name while it is being written."""
_MOST_BYTES = 1 << 28
"""Most bytes of a file that is read as a whole, unless the caller allows more."""


class SyncError(StorageError):
    """A sync failed. The kernel may have dropped unwritten data, so a later sync cannot repair the failure."""


@contextlib.contextmanager
def inside(directory: Path, *names: str) -> Iterator[int]:
    """The descriptor of the directory `directory/name/...`. Raises OSError if it does not exist.

    None of the names may be a symbolic link. `directory` may be one, because the user named it.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for name in names:
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def open_regular(path: str | Path, flags: int = os.O_RDONLY, *, dir_fd: int | None = None) -> int:
    """The descriptor of a regular file. Raises OSError for anything else, without waiting for a pipe's writer.

    With `dir_fd`, an open directory, or for writing, the name must not be a symbolic link. For writing, the file must
    not have another name. `flags` must not have O_TRUNC, which would act before that is known.
    """
    writes = flags & (os.O_WRONLY | os.O_RDWR)
    no_follow = os.O_NOFOLLOW if writes or dir_fd is not None else 0
    descriptor = os.open(path, flags | os.O_NONBLOCK | no_follow, 0o666, dir_fd=dir_fd)
    status = os.fstat(descriptor)
    problem = None
    if not stat.S_ISREG(status.st_mode):
        problem = errno.EINVAL, "it is not a regular file"
    elif writes and status.st_nlink > 1:
        problem = errno.EMLINK, "it has a second name (a hard link): writing to it would change that file too"
    if problem is not None:
        os.close(descriptor)
        raise OSError(*problem, str(path))
    return descriptor


def append_to(path: Path) -> BinaryIO:
    """A file, opened to append to it without a buffer. It is created if it is missing. Raises OSError like
    `open_regular`."""
    descriptor = open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    return cast(BinaryIO, os.fdopen(descriptor, "ab", buffering=0))


def read_regular(path: str | Path, *, dir_fd: int | None = None, most_bytes: int = _MOST_BYTES) -> bytes:
    """The content of a regular file. Raises OSError like `open_regular`, and for a file of more than `most_bytes`."""
    with os.fdopen(open_regular(path, dir_fd=dir_fd), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise OSError(errno.EFBIG, f"it has {size} bytes, more than any file that Pagoda writes", str(path))
        return file.read()


def replace_file(directory: int, name: str, content: bytes) -> None:
    """Write a file in an open directory. After a crash at any instant it has either its old content or the new one.

    Raises OSError if it cannot be written, and SyncError if its name cannot be made durable.
    """
    temporary = name + TEMPORARY
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with contextlib.suppress(FileNotFoundError):  # which a crash has left, or a link to another file
        os.unlink(temporary, dir_fd=directory)
    try:
        with os.fdopen(os.open(temporary, flags, 0o666, dir_fd=directory), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=directory)
        raise
    sync_descriptor(directory, name)


def write_durably(path: Path, content: bytes) -> None:
    """`replace_file` with a path. Raises like it."""
    with inside(path.parent) as directory:
        replace_file(directory, path.name, content)


def copy_durably(source: Path, directory: int) -> None:
    """Copy a file, or a directory of files, into an open directory. Raises OSError for a pipe or a device too."""
    if not source.is_dir():
        replace_file(directory, source.name, read_regular(source))
        return
    with contextlib.suppress(FileExistsError):
        os.mkdir(source.name, dir_fd=directory)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    inner = os.open(source.name, flags, dir_fd=directory)
    try:
        for path in sorted(source.iterdir()):
            copy_durably(path, inner)
        sync_descriptor(inner, source.name)
    finally:
        os.close(inner)


def sync_descriptor(directory: int, what: str | Path) -> None:
    """Make the names in an open directory durable. Raises SyncError with `what` in its message."""
    try:
        os.fsync(directory)
    except OSError as error:
        raise SyncError(
            f"the directory of {what} cannot be synced: {error.strerror}; check the disk (dmesg)"
        ) from error


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable. Raises OSError if it cannot be opened, and SyncError."""
    with inside(directory) as descriptor:
        sync_descriptor(descriptor, directory)


def make_directories(directory: Path) -> list[Path]:
    """Create a directory and its missing parents durably. Returns the created directories, the outermost first.

    Raises OSError and SyncError.
    """
    missing = [path for path in (directory, *directory.absolute().parents) if not path.exists()]
    made = []
    for path in reversed(missing):
        try:
            path.mkdir()
        except FileExistsError:
            continue  # another process has created it meanwhile
        sync_directory(path.parent)
        made.append(path)
    if not directory.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(directory))
    return made


def may_exist(path: Path) -> bool:
    """Whether something is at a path. True if the system does not tell."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        pass
    return True


@contextlib.contextmanager
def storage_errors(what: str) -> Iterator[None]:
    """Turn OSErrors into StorageErrors whose messages begin with `what`."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"{what}: {error.strerror or error}") from error
