"""A checkpoint directory: a manifest and tensor files, appearing whole or not at all, deleted only if they are ours."""

import errno
import fcntl
import json
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from pagoda.errors import CheckpointError, StorageError
from pagoda.memory.files import (
    TEMPORARY,
    inside,
    make_directories,
    read_regular,
    replace_file,
    storage_errors,
    sync_directory,
)
from pagoda.memory.identity import (
    CHECKPOINT_ID,
    MANIFEST,
    PARTIAL_MARK,
    new_checkpoint_id,
    partial,
    partial_mark,
    removed,
)
from pagoda.memory.ssd.commits import Reference
from pagoda.memory.ssd.tier import forget_commit

_log = logging.getLogger("pagoda")

FORMAT, VERSION = "pagoda-checkpoint", 5


@contextmanager
def committed(
    directory: Path, checkpoint_id: str | None = None, keep_mark: Callable[[], bool] = lambda: False
) -> Iterator[Path]:
    """A temporary directory to fill; renamed to `directory` when the block ends well, removed when it does not.

    Files in it must have been synced already. It is marked with the id of the checkpoint that it is to
    be, so that pages of one that was never completed can be told. Where `keep_mark` says so when the block has failed,
    the mark stays, because ranks that are gone may have committed such pages.

    Raises CheckpointError when `directory` exists already, or somebody else is writing it, or the temporary directory's
    name is taken by something that Pagoda did not make; StorageError when the disk is full or cannot be written.
    Pagoda's own errors pass as they are.
    """
    check_absent(directory)
    temporary = partial(directory)
    try:
        make_directories(directory.parent)
        with suppress(PermissionError):  # the caller may have made the parent just now, and not synced it
            sync_directory(directory.parent.parent)
        lock = _claim(temporary, directory, checkpoint_id or new_checkpoint_id())
        try:
            named = False
            try:
                sync_directory(directory.parent)
                yield temporary
                sync_directory(temporary)
                temporary.rename(directory)
                named = True
                os.unlink(PARTIAL_MARK, dir_fd=lock)
                sync_directory(directory.parent)
            except BaseException:
                if not named:
                    with suppress(OSError):
                        if keep_mark():
                            _empty(lock, keep=PARTIAL_MARK)
                        else:
                            _empty(lock, last=PARTIAL_MARK)
                            temporary.rmdir()
                raise
        finally:
            os.close(lock)
    except StorageError:
        raise  # another disk failed, and this says which
    except OSError as error:
        raise StorageError(
            f"{directory} could not be written: {error}. Free space there, or name another directory."
        ) from error


def _claim(temporary: Path, directory: Path, checkpoint_id: str) -> int:
    """Make a directory, or take over what a crash left of it, emptied; returns the descriptor that locks it."""
    while True:
        temporary.mkdir(exist_ok=True)
        try:
            descriptor = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise _not_ours(temporary) from error
            raise
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The process that had it may have renamed or removed it since it was opened here.
            if temporary.is_dir() and os.path.samestat(os.fstat(descriptor), temporary.stat()):
                names = os.listdir(descriptor)
                if PARTIAL_MARK not in names and not {*names} <= {PARTIAL_MARK + TEMPORARY}:
                    raise _not_ours(temporary)
                _empty(descriptor, keep=PARTIAL_MARK)
                replace_file(descriptor, PARTIAL_MARK, partial_mark(checkpoint_id, descriptor).encode())
                return descriptor
        except BlockingIOError as error:
            os.close(descriptor)
            raise CheckpointError(
                f"{directory} is being written by another process. Wait until it ends, or name another directory."
            ) from error
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        check_absent(directory)


def _not_ours(temporary: Path) -> CheckpointError:
    return CheckpointError(
        f"{temporary} is needed to write in, and Pagoda did not make what is there. Move it away, or name another "
        "directory to write to."
    )


def _empty(descriptor: int, keep: str = "", last: str = "") -> None:
    """Delete what is in an open directory, without following symbolic links; but for `keep`, and `last` at the end."""
    for name in sorted(os.listdir(descriptor), key=last.__eq__):
        if name == keep:
            continue
        if stat.S_ISDIR(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode):
            shutil.rmtree(name, dir_fd=descriptor)
        else:
            os.unlink(name, dir_fd=descriptor)


@dataclass(frozen=True)
class Removable:
    """A checkpoint that can be deleted, with its pages: nothing but what Pagoda has written is in its directory."""

    directory: Path
    checkpoint_id: str
    references: Sequence[dict[str, Any]]
    """To the pages on SSD that it keeps, one a rank."""

    @staticmethod
    def of(directory: Path) -> "Removable":
        """Raises CheckpointError, which says why, where a checkpoint must be kept: its directory is a symbolic link,
        its manifest cannot be read, or there is something in it that Pagoda did not write."""
        if directory.is_symlink():
            raise CheckpointError(f"{directory} is kept: it is a symbolic link")
        manifest = read_manifest(directory)
        checkpoint_id, hashes = manifest.get("id"), manifest.get("hashes")
        if not isinstance(checkpoint_id, str) or not CHECKPOINT_ID.fullmatch(checkpoint_id):
            raise CheckpointError(f"{directory} is kept: its manifest has no id")
        own = {MANIFEST, PARTIAL_MARK, *(f"{file}.safetensors" for file in hashes or ())}
        others = sorted({*os.listdir(directory)} - own)
        if others:
            raise CheckpointError(f"{directory} is kept: {', '.join(others[:3])} in it is not of the checkpoint")
        return Removable(directory, checkpoint_id, _references(manifest))

    def retire(self) -> None:
        """Take its name away, durably, so that at no instant there is part of a checkpoint. Raises StorageError."""
        with _deleting(self.directory):
            self.directory.rename(removed(self.directory))
            sync_directory(self.directory.parent)

    def forget(self, places: Sequence[str | Path]) -> None:
        """Delete its commits, of the stores in `places`. Raises StorageError."""
        for reference in self.references:
            forget_commit(reference, self.checkpoint_id, places)

    def delete(self) -> None:
        """Delete the files of one that was retired, the manifest last. Raises StorageError."""
        nameless = removed(self.directory)
        with _deleting(self.directory):
            with inside(nameless.parent, nameless.name) as descriptor:
                _empty(descriptor, last=MANIFEST)
            nameless.rmdir()


def remove(directory: Path, places: Sequence[str | Path] = ()) -> None:
    """Delete a checkpoint, and the commits of pages that it keeps on SSD, of the stores in `places`.

    What a crash leaves of it is deleted by `remove_leftovers`, or when the SSD directories are next opened. Raises
    CheckpointError where it must be kept, as `Removable.of` says, and StorageError.
    """
    remove_leftovers(directory.parent, places)
    removable = Removable.of(directory)
    removable.retire()
    removable.forget(places)
    removable.delete()


def remove_leftovers(parent: Path, places: Sequence[str | Path]) -> None:
    """Finish deleting the checkpoints in a directory whose deletion was interrupted."""
    for name in sorted(os.listdir(parent)) if parent.is_dir() else ():
        original = parent / name[1:].removesuffix(".removed")
        if name == removed(original).name:
            with suppress(CheckpointError, StorageError):
                found = Removable.of(parent / name)
                leftover = Removable(original, found.checkpoint_id, found.references)
                leftover.forget(places)
                leftover.delete()


def removables(directories: Sequence[Path]) -> list[Removable]:
    """The checkpoints among `directories` that can be deleted; the others are kept."""
    found = []
    for directory in directories:
        with suppress(CheckpointError):
            found.append(Removable.of(directory))
    return found


def _deleting(directory: Path) -> AbstractContextManager[None]:
    return storage_errors(f"The checkpoint {directory} could not be deleted")


def _references(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Raises CheckpointError for what no checkpoint says of its pages."""
    try:
        found = [rank["reference"] for rank in manifest.get("paged", {}).get("ranks", ())]
        for reference in found:
            Reference.from_json(reference)
    except (StorageError, AttributeError, LookupError, TypeError) as error:
        raise CheckpointError(f"its pages are not described: {error}") from error
    return found


def check_absent(directory: Path) -> None:
    """Raises CheckpointError when `directory` exists already."""
    if os.path.lexists(directory):
        raise CheckpointError(f"{directory} exists already, and Pagoda overwrites nothing. Name another directory.")


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
        content = json.loads(read_regular(path).decode())
    except OSError as error:
        raise CheckpointError(
            f"{directory} is not a checkpoint: {path.name} cannot be read ({error.strerror})"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a Pagoda manifest")
    if content.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has version {content.get('version')!r:.80}; this Pagoda reads version {VERSION}. Resume or export "
            "it with the Pagoda that wrote it."
        )
    said = {key: value for key, value in content.items() if key not in ("format", "version", "hash")}
    if content.get("hash") != _hash(said):
        raise CheckpointError(f"{path} is damaged: its hash does not match. Use another checkpoint")
    return said


def _hash(content: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())
