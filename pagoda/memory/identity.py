"""The identity of a checkpoint: a random id in its manifest, which stays when it is moved or renamed.

A checkpoint has its name only while it is whole. Before that its directory is `.NAME.partial`, with the id in a mark;
while it is deleted its directory is `.NAME.removed`.
"""

import fcntl
import json
import os
import re
import secrets
from pathlib import Path

from pagoda.memory.files import inside, read_regular

MANIFEST = "manifest.json"
CHECKPOINT_ID = re.compile(r"[0-9a-f]{32}")
PARTIAL_MARK = ".pagoda-partial"
"""The file in a partial directory that says that Pagoda made it: whose it is, and the directory's inode number."""


def new_checkpoint_id() -> str:
    return secrets.token_hex(16)


def partial(directory: Path) -> Path:
    """Where a directory is filled before it has its name."""
    return directory.with_name(f".{directory.name}.partial")


def removed(directory: Path) -> Path:
    """What a checkpoint is called while it is deleted."""
    return directory.with_name(f".{directory.name}.removed")


def checkpoint_id_of(directory: Path) -> str | None:
    """The id of the checkpoint in a directory; None where none can be read. It may be damaged otherwise."""
    try:
        said = json.loads(read_regular(directory / MANIFEST))["id"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return said if isinstance(said, str) and CHECKPOINT_ID.fullmatch(said) else None


def partial_mark(checkpoint_id: str, descriptor: int) -> str:
    """What the mark of an open partial directory says. The inode number tells it from a copy of it."""
    return f"{checkpoint_id} {os.fstat(descriptor).st_ino}\n"


def never_completed(directory: Path, checkpoint_id: str) -> bool:
    """Whether that checkpoint was to be at `directory`, and its writer ended before it was whole."""
    try:
        with inside(partial(directory).parent, partial(directory).name) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # refused while it is being written
            mark = read_regular(PARTIAL_MARK, dir_fd=descriptor).decode()
            here = os.path.samestat(os.fstat(descriptor), os.lstat(partial(directory)))
            return here and mark == partial_mark(checkpoint_id, descriptor)
    except (OSError, ValueError):
        return False


def being_removed(directory: Path, checkpoint_id: str) -> bool:
    """Whether that checkpoint was at `directory`, and Pagoda has begun to delete it."""
    return checkpoint_id_of(removed(directory)) == checkpoint_id
