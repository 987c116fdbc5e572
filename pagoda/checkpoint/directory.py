"""A checkpoint directory: a manifest beside its tensor files, appearing whole or not at all."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import xxhash

from pagoda.errors import CheckpointError, StorageError
from pagoda.memory.ssd_tier import forget_commit

FORMAT, VERSION = "pagoda-checkpoint", 4
MANIFEST = "manifest.json"
_REMOVED = ".removed"


@contextmanager
def committed(directory: Path) -> Iterator[Path]:
    """A temporary directory to fill; renamed to `directory` when the block ends well, removed when it does not.

    Files in it must have been synced by whoever wrote them. Raises CheckpointError when `directory` exists already, or
    somebody else is writing it; StorageError when the disk is full or cannot be written. Pagoda's own errors pass as
    they are.
    """
    check_absent(directory)
    temporary = partial(directory)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        lock = _claim(temporary, directory)
        try:
            yield temporary
            _sync(temporary)
            temporary.rename(directory)
            _sync(directory.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        finally:
            os.close(lock)
    except StorageError:
        raise  # another disk failed, and this says which
    except OSError as error:
        raise StorageError(
            f"{directory} could not be written: {error}. Free space there, or name another directory."
        ) from error


def _claim(temporary: Path, directory: Path) -> int:
    """Make a directory, or take over what a crash left of it, emptied; returns the descriptor that locks it."""
    while True:
        temporary.mkdir(exist_ok=True)
        descriptor = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever had it may have renamed or removed it since it was opened here.
            if temporary.is_dir() and os.path.samestat(os.fstat(descriptor), temporary.stat()):
                for entry in temporary.iterdir():
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
                return descriptor
        except BlockingIOError as error:
            os.close(descriptor)
            raise CheckpointError(
                f"{directory} is being written by somebody else. Wait for that to end, or name another one."
            ) from error
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        check_absent(directory)


def partial(directory: Path) -> Path:
    """Where a directory is filled before it has its name."""
    return directory.with_name(f".{directory.name}.partial")


def remove(directory: Path, places: Sequence[Path] = ()) -> None:
    """Delete a checkpoint, and the commits of pages on SSD that it keeps, in `places` or where they were made.

    It loses its name first, so that at no instant there is part of a checkpoint; what a crash leaves behind is deleted
    by the next call beside it, or when the SSD directories are next opened. Raises StorageError.
    """
    references = []
    with suppress(CheckpointError):  # a damaged one keeps pages until the SSD directories are next opened
        references = commits_of(directory)
    try:
        for leftover in directory.parent.glob(f".*{_REMOVED}"):
            shutil.rmtree(leftover, ignore_errors=True)
        nameless = directory.with_name(f".{directory.name}{_REMOVED}")
        directory.rename(nameless)
        _sync(directory.parent)
        for reference in references:
            forget_commit(reference, places)
        shutil.rmtree(nameless)
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"The checkpoint {directory} could not be deleted: {error}") from error


def commits_of(directory: Path) -> list[dict[str, Any]]:
    """The references to the pages on SSD that a checkpoint keeps, one a rank. Raises CheckpointError as
    `read_manifest`."""
    return [rank["reference"] for rank in read_manifest(directory).get("paged", {}).get("ranks", ())]


def check_absent(directory: Path) -> None:
    """Raises CheckpointError when `directory` exists already."""
    if directory.exists():
        raise CheckpointError(f"{directory} exists already, and nothing is overwritten. Name another one.")


def write_manifest(directory: Path, content: dict[str, Any]) -> None:
    """Write and sync the manifest, with a hash of what it says."""
    content = json.loads(json.dumps(content))  # as it will be read
    write_json(directory / MANIFEST, {"format": FORMAT, "version": VERSION, "hash": _hash(content), **content})


def write_json(path: Path, content: Any, indent: int | None = None) -> None:
    """Write and sync a JSON file."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=indent)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a checkpoint. Raises CheckpointError when there is none, or not one of this format."""
    path = directory / MANIFEST
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise CheckpointError(
            f"{directory} is not a checkpoint: {path.name} cannot be read ({error.strerror})"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a Pagoda manifest")
    if content.get("version") != VERSION:
        raise CheckpointError(f"{path} has version {content.get('version')}; this Pagoda reads version {VERSION}")
    said = {key: value for key, value in content.items() if key not in ("format", "version", "hash")}
    if content.get("hash") != _hash(said):
        raise CheckpointError(f"{path} is damaged: what it says does not have the hash it was written with")
    return said


def _hash(content: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
