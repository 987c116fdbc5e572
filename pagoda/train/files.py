"""Files of a run: made so that a power loss keeps them, read only where they are ordinary files."""

import os
import stat
from pathlib import Path


def sync_directory(directory: Path) -> None:
    """Returns once the names in `directory` would survive a power loss."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directories(directory: Path) -> list[Path]:
    """Makes `directory` and its parents where missing, durably; returns those that it made, outermost first."""
    missing = [path for path in (directory, *directory.absolute().parents) if not path.exists()]
    made = []
    for path in reversed(missing):
        try:
            path.mkdir()
        except FileExistsError:
            continue  # another process made it meanwhile
        sync_directory(path.parent)
        made.append(path)
    return made


def write_durably(path: Path, content: bytes) -> None:
    """Replaces `path` by a file with `content`, atomically; returns once that would survive a power loss."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)


def read_ordinary(path: Path, most_bytes: int | None = None) -> bytes:
    """The content of an ordinary file. Raises OSError for anything else in its place, at once: a FIFO, a device; and
    for a file of more than `most_bytes`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(0, "it is not an ordinary file")
        if most_bytes is not None and found.st_size > most_bytes:
            raise OSError(0, f"it has {found.st_size} bytes, more than any that Pagoda writes")
        return file.read()
