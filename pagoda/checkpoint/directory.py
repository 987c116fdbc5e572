"""Checkpoint directories: a manifest and tensor files. They appear only once complete. Only Pagoda's own are
deleted."""

import errno
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

from pagoda.errors import CheckpointError, StorageError
from pagoda.memory.files import (
    TEMPORARY,
    inside,
    make_directories,
    read_regular,
    replace_file,
    storage_errors,
    sync_directory,
    write_durably,
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
from pagoda.memory.json_forms import hash_of
from pagoda.memory.lock import Lock
from pagoda.memory.ssd.commits import Reference
from pagoda.memory.ssd.tier import forget_commit

_log = logging.getLogger("pagoda")

FORMAT, VERSION = "pagoda-checkpoint", 5
_MOST_BYTES = 1 << 30
"""More bytes than a manifest has."""


@contextmanager
def committed(
    directory: Path, checkpoint_id: str | None = None, keep_mark: Callable[[], bool] = lambda: False
) -> Iterator[Path]:
    """A temporary directory to fill. It is renamed to `directory` if the block succeeds, and removed if it fails.

    Files in it must already be synced. It has a mark with the id of the future checkpoint, so that pages of a
    checkpoint that was never completed can be recognized. If the block fails and `keep_mark` returns True, the mark
    stays, because ranks that have died may have committed such pages.

    Raises CheckpointError if `directory` exists, if another process is writing it, or if something that Pagoda did not
    write has the temporary directory's name. Raises StorageError if the disk is full or cannot be written. Other errors
    of Pagoda are not converted.
    """
    check_absent(directory)
    temporary = partial(directory)
    try:
        make_directories(directory.parent)
        with suppress(PermissionError):  # the caller may have just created the parent, unsynced
            sync_directory(directory.parent.parent)
        lock = _claim(temporary, directory)
        claimed = lock.descriptor
        named = False
        try:
            mark = partial_mark(checkpoint_id or new_checkpoint_id(), claimed)
            replace_file(claimed, PARTIAL_MARK, mark.encode())
            sync_directory(directory.parent)
            yield temporary
            sync_directory(temporary)
            temporary.rename(directory)
            named = True
            os.unlink(PARTIAL_MARK, dir_fd=claimed)
            sync_directory(directory.parent)
        except BaseException:
            if not named:
                with suppress(OSError):
                    if keep_mark():
                        empty(claimed, keep=PARTIAL_MARK)
                    else:
                        empty(claimed, last=PARTIAL_MARK)
                        temporary.rmdir()
            raise
        finally:
            lock.close()
    except StorageError:
        raise  # another disk failed, and the error names it
    except OSError as error:
        raise StorageError(
            f"{directory} could not be written: {error}. Free space there, or name another directory."
        ) from error


def _claim(temporary: Path, directory: Path) -> Lock:
    """Make and lock a directory, or take over and empty one that a crash has left."""
    while True:
        temporary.mkdir(exist_ok=True)
        try:
            lock = Lock(temporary, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:  # the process that held the lock has renamed or removed it
            check_absent(directory)
            continue
        except BlockingIOError as error:
            raise CheckpointError(
                f"{directory} is being written by another process. Wait until it ends, or name another directory."
            ) from error
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise _not_ours(temporary) from error
            raise
        try:
            names = os.listdir(lock.descriptor)
            if PARTIAL_MARK not in names and not {*names} <= {PARTIAL_MARK + TEMPORARY}:
                raise _not_ours(temporary)
            empty(lock.descriptor, keep=PARTIAL_MARK)
            return lock
        except BaseException:
            lock.close()
            raise


def _not_ours(temporary: Path) -> CheckpointError:
    return CheckpointError(
        f"{temporary} is needed as a temporary directory, but something that Pagoda did not write has its name. Move "
        "it, or name another directory to write to."
    )


def empty(descriptor: int, keep: str = "", last: str = "") -> None:
    """Delete the content of an open directory except `keep`, with `last` at the end. Does not follow symbolic links."""
    for name in sorted(os.listdir(descriptor), key=last.__eq__):
        if name == keep:
            continue
        if stat.S_ISDIR(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode):
            shutil.rmtree(name, dir_fd=descriptor)
        else:
            os.unlink(name, dir_fd=descriptor)


@dataclass(frozen=True)
class Removable:
    """A checkpoint that can be deleted with its pages, because its directory contains only what Pagoda wrote."""

    directory: Path
    checkpoint_id: str
    references: Sequence[dict[str, Any]]
    """References to its pages on SSD, one for each rank."""

    @staticmethod
    def of(directory: Path) -> "Removable":
        """Raises CheckpointError with the reason if a checkpoint must be kept: its directory is a symbolic link or
        contains something that Pagoda did not write, or its manifest cannot be read."""
        if directory.is_symlink():
            raise CheckpointError(f"{directory} is kept: it is a symbolic link")
        manifest = read_manifest(directory)
        checkpoint_id, hashes = manifest.get("id"), manifest.get("hashes")
        if not isinstance(checkpoint_id, str) or not CHECKPOINT_ID.fullmatch(checkpoint_id):
            raise CheckpointError(f"{directory} is kept: its manifest has no id")
        own = {MANIFEST, PARTIAL_MARK, *(f"{file}.safetensors" for file in hashes or ())}
        try:
            others = sorted({*os.listdir(directory)} - own)
        except OSError as error:
            raise CheckpointError(f"{directory} is kept: it cannot be read ({error.strerror or error})") from error
        if others:
            raise CheckpointError(f"{directory} is kept: {', '.join(others[:3])} in it is not part of the checkpoint")
        return Removable(directory, checkpoint_id, _references(manifest))

    def retire(self) -> None:
        """Remove its name durably, so that a partial checkpoint never exists under it. Raises StorageError."""
        with _deleting(self.directory):
            self.directory.rename(removed(self.directory))
            sync_directory(self.directory.parent)

    def forget(self, places: Sequence[str | Path]) -> None:
        """Free its pages in the SSD directories `places`: delete the commits that keep them. Raises StorageError."""
        for reference in self.references:
            forget_commit(reference, self.checkpoint_id, places)

    def delete(self) -> None:
        """Delete the files of a retired checkpoint, the manifest last. Raises StorageError."""
        nameless = removed(self.directory)
        with _deleting(self.directory):
            with inside(nameless.parent, nameless.name) as descriptor:
                empty(descriptor, last=MANIFEST)
            nameless.rmdir()


def remove(directory: Path) -> None:
    """Delete a checkpoint, and free its pages if this process has their store open.

    If a crash interrupts this, `remove_leftovers` deletes the rest, or the next opening of the SSD directories does.
    Raises CheckpointError if it must be kept (see `Removable.of`), and StorageError.
    """
    remove_leftovers(directory.parent, ())
    removable = Removable.of(directory)
    removable.retire()
    removable.forget(())
    removable.delete()


def remove_leftovers(parent: Path, places: Sequence[str | Path]) -> None:
    """Finish interrupted deletions of the checkpoints in a directory."""
    for name in sorted(os.listdir(parent)) if parent.is_dir() else ():
        original = parent / name[1:].removesuffix(".removed")
        if name == removed(original).name:
            with suppress(CheckpointError, StorageError):
                found = Removable.of(parent / name)
                leftover = Removable(original, found.checkpoint_id, found.references)
                leftover.forget(places)
                leftover.delete()


def removables(directories: Sequence[Path]) -> list[Removable]:
    """The checkpoints among `directories` that can be deleted. The others are kept."""
    found = []
    for directory in directories:
        with suppress(CheckpointError):
            found.append(Removable.of(directory))
    return found


def _deleting(directory: Path) -> AbstractContextManager[None]:
    return storage_errors(f"The checkpoint {directory} could not be deleted")


def _references(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """The manifest's references to pages. Raises CheckpointError if they are malformed."""
    try:
        found = [rank["reference"] for rank in manifest.get("paged", {}).get("ranks", ())]
        for reference in found:
            Reference.from_json(reference)
    except (StorageError, AttributeError, LookupError, TypeError) as error:
        raise CheckpointError(f"the description of its pages is damaged: {error}") from error
    return found


def check_absent(directory: Path) -> None:
    """Raises CheckpointError if `directory` exists."""
    if os.path.lexists(directory):
        raise CheckpointError(f"{directory} exists already, and Pagoda does not overwrite it. Name another directory.")


def write_manifest(directory: Path, content: dict[str, Any]) -> None:
    """Write and sync the manifest, with a hash of its content."""
    content = json.loads(json.dumps(content))  # the form in which it will be read
    whole = {"format": FORMAT, "version": VERSION, "hash": hash_of(content), **content}
    write_durably(directory / MANIFEST, json.dumps(whole).encode())


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a checkpoint. Raises CheckpointError if it is missing, damaged, or not of this format."""
    path = directory / MANIFEST
    try:
        content = dict(json.loads(read_regular(path, most_bytes=_MOST_BYTES)))
        stored = {key: value for key, value in content.items() if key not in ("format", "version", "hash")}
        hash_now = hash_of(stored)
    except OSError as error:
        raise CheckpointError(
            f"{directory} is not a checkpoint: {path.name} cannot be read ({error.strerror or error}). Name a "
            "directory that save_checkpoint has written, or for a command, a run of `pagoda train`"
        ) from error
    except (ValueError, TypeError, RecursionError) as error:  # not an object, or nested too deeply
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if content.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a Pagoda manifest")
    if content.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has version {content.get('version')!r:.80}; this Pagoda reads version {VERSION}. Resume or export "
            "it with the Pagoda that wrote it."
        )
    if content.get("hash") != hash_now:
        raise CheckpointError(f"{path} is damaged: its hash does not match. Use another checkpoint")
    return stored
