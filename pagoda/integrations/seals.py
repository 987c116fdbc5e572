"""Seals: they bind a framework's own files to the state in pages that was saved with them.

A framework writes some of its files itself: counters, schedulers, random states. It neither syncs nor checks them, and
the process may be killed after some of them. So the last file written to a directory is a seal, with the size and the
hash of each file. A directory without a valid seal is not complete, and nothing resumes from it.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from pagoda.errors import CheckpointError
from pagoda.memory.files import open_regular, read_regular, storage_errors, sync_directory, write_durably
from pagoda.memory.identity import MANIFEST
from pagoda.memory.json_forms import FormError, whole, with_hash

SEAL = "pagoda-seal.json"
_FORMAT = "pagoda-seal"
_MOST_HASHED_BYTES = 256 << 20
"""Of a larger file, such as exported weights, the seal has the size alone, because nothing resumes from it."""


class _UnsealedError(CheckpointError):
    """A save in the directory was begun and not completed."""


def begin(directory: Path) -> None:
    """Create a directory if it does not exist, and mark it as not complete. Raises StorageError."""
    with storage_errors(f"{directory} could not be written"):
        directory.mkdir(parents=True, exist_ok=True)
        _write(directory, None)


def seal(directory: Path) -> None:
    """Sync all files in a directory, then write its seal. Raises StorageError."""
    with storage_errors(f"{directory} could not be written"):
        files = {}
        for path in _files(directory):
            with path.open("rb") as file:
                os.fsync(file.fileno())
            files[str(path.relative_to(directory))] = _fingerprint(path)
        for folder, _, _ in os.walk(directory, topdown=False):
            sync_directory(Path(folder))
        sync_directory(directory.parent)
        _write(directory, files)


def check(directory: Path) -> None:
    """Raises CheckpointError if a directory has no valid seal, or if a file differs from what was sealed."""
    for name, expected in _read(directory).items():
        try:
            now = _fingerprint(directory / name)
        except OSError as error:
            raise CheckpointError(f"{directory / name} cannot be read: {error.strerror}") from error
        if now != expected:
            raise CheckpointError(f"{directory / name} has changed since it was saved, or is damaged")


def is_begun(directory: Path) -> bool:
    """Whether a directory is marked as not complete."""
    try:
        _read(directory)
    except _UnsealedError:
        return True
    except CheckpointError:
        pass
    return False


def check_removable(directory: Path) -> None:
    """Raises CheckpointError if a directory is not a save, or has files that its seal does not name. A save that was
    not completed may have any files."""
    if directory.is_symlink() or not (directory / SEAL).is_file():
        raise CheckpointError(f"{directory} has no {SEAL}")
    with suppress(_UnsealedError):
        sealed = _read(directory)
        for path in _files(directory):
            if (name := str(path.relative_to(directory))) not in sealed:
                raise CheckpointError(f"{name} in {directory} is not part of the save")


def _files(directory: Path) -> Iterator[Path]:
    """The files to seal. Of a checkpoint of Pagoda, this is the manifest alone, which has hashes of the others."""
    for folder, folders, names in os.walk(directory):
        folders.sort()
        for name in [MANIFEST] if MANIFEST in names else sorted(names):
            if name != SEAL and (path := Path(folder, name)).is_file() and not path.is_symlink():
                yield path


def _fingerprint(path: Path) -> list[Any]:
    """The size of a file, and its hash. None in place of the hash of a large file."""
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > _MOST_HASHED_BYTES:
            return [size, None]
        return [size, hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()]


def _write(directory: Path, files: dict[str, list[Any]] | None) -> None:
    write_durably(directory / SEAL, json.dumps(with_hash({"format": _FORMAT, "files": files})).encode())


def _read(directory: Path) -> dict[str, list[Any]]:
    """The files in a seal. Raises CheckpointError if the directory is not complete or its seal is damaged."""
    try:
        content = whole(read_regular(directory / SEAL))
    except OSError as error:
        raise CheckpointError(f"{directory} is not complete: {SEAL} cannot be read ({error.strerror})") from error
    except FormError as error:
        raise CheckpointError(
            f"{directory / SEAL} was edited or damaged, or another version wrote it: {error}"
        ) from error
    files: dict[str, list[Any]] | None = content.get("files")
    if content.get("format") != _FORMAT:
        raise CheckpointError(f"{directory / SEAL} is damaged")
    if files is None:
        raise _UnsealedError(f"{directory} is not complete: the process ended while it was written")
    return files
