"""The identity of a checkpoint: a random id in its manifest, which stays the same when it is moved or renamed.

A checkpoint has its name only while it is complete. Before, its directory is `.NAME.partial`, and a mark contains its
id. While it is being deleted, its directory is `.NAME.removed`.

The same holds for a directory of a framework that contains a checkpoint and more. It is written as
`.NAME.partial/NAME`, which is renamed to `NAME`.
"""

import fcntl
import json
import os
import re
import secrets
from pathlib import Path

from pagoda.memory.files import inside, read_regular

MANIFEST = "manifest.json"
STATE = "pagoda"
"""Directory inside a checkpoint of a framework: Pagoda's own, from which a run resumes."""
CHECKPOINT_ID = re.compile(r"[0-9a-f]{32}")
PARTIAL_MARK = ".pagoda-partial"
"""The file that marks a partial directory as Pagoda's. It has the checkpoint's id and the directory's inode number."""


def new_checkpoint_id() -> str:
    return secrets.token_hex(16)


def partial(directory: Path) -> Path:
    """The path of a directory while it is being written."""
    return directory.with_name(f".{directory.name}.partial")


def removed(directory: Path) -> Path:
    """The path of a checkpoint while it is being deleted."""
    return directory.with_name(f".{directory.name}.removed")


def unfinished(directory: Path) -> Path:
    """The path of a framework's directory while it is being written."""
    return partial(directory) / directory.name


def finished(checkpoint: Path) -> Path:
    """The path of a checkpoint once the framework's directory that contains it is complete."""
    outer = checkpoint.parent.parent.parent / checkpoint.parent.name
    return outer / checkpoint.name if checkpoint.parent == unfinished(outer) else checkpoint


def checkpoint_id_of(directory: Path) -> str | None:
    """The id of the checkpoint in a directory. None if it cannot be read. The rest of the checkpoint may be damaged."""
    try:
        said = json.loads(read_regular(directory / MANIFEST))["id"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return said if isinstance(said, str) and CHECKPOINT_ID.fullmatch(said) else None


def partial_mark(checkpoint_id: str, descriptor: int) -> str:
    """The content of the mark of an open partial directory. The inode number distinguishes it from a copy."""
    return f"{checkpoint_id} {os.fstat(descriptor).st_ino}\n"


def never_completed(directory: Path, checkpoint_id: str) -> bool:
    """Whether a checkpoint was being written to `directory`, and its writer ended before it was complete."""
    within = unfinished(directory.parent) / directory.name
    return _was_begun(directory, checkpoint_id) or _was_begun(within, checkpoint_id)


def _was_begun(directory: Path, checkpoint_id: str) -> bool:
    try:
        with inside(partial(directory).parent, partial(directory).name) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # refused while it is being written
            mark = read_regular(PARTIAL_MARK, dir_fd=descriptor).decode()
            here = os.path.samestat(os.fstat(descriptor), os.lstat(partial(directory)))
            return here and mark == partial_mark(checkpoint_id, descriptor)
    except (OSError, ValueError):
        return False


def being_removed(directory: Path, checkpoint_id: str) -> bool:
    """Whether a checkpoint was at `directory`, and Pagoda has begun to delete it."""
    return checkpoint_id_of(removed(directory)) == checkpoint_id
