"""Directories that a framework fills, with a checkpoint of Pagoda in each: they have their name once complete."""

import logging
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pagoda.checkpoint.directory import Removable, remove_leftovers
from pagoda.checkpoint.paged import with_ranks
from pagoda.errors import CheckpointError, StorageError
from pagoda.integrations import seals
from pagoda.memory.files import TEMPORARY, storage_errors, sync_directory
from pagoda.memory.identity import MANIFEST, STATE, partial, removed, unfinished
from pagoda.memory.lock import Lock

_log = logging.getLogger("pagoda")


class Staged:
    """A directory while it is being written. Its methods raise StorageError."""

    def __init__(self, directory: Path, places: Sequence[str | Path]) -> None:
        """`places`: the SSD directories of the run."""
        self.directory, self._places = directory, places
        self.path = unfinished(directory)
        """Where its files are written."""
        self._lock: Lock | None = None

    @property
    def state(self) -> Path:
        """Pagoda's checkpoint in it."""
        return self.path / STATE

    @property
    def replaced(self) -> Path:
        """Where a directory of the same name is put, to be deleted."""
        return removed(self.directory)

    def create(self) -> None:
        """Create it, empty, and lock it. Remains of an interrupted run are deleted.

        Raises CheckpointError if its name is that of something without a seal.
        """
        self.close()
        check_replaceable(self.directory)
        with storage_errors(f"{self.directory} could not be written"):
            delete(partial(self.directory), self._places)
            delete(self.replaced, self._places)
            self.path.mkdir(parents=True)
            self._lock = Lock(partial(self.directory))
            seals.begin(self.path)
            sync_directory(self.directory.parent)

    def complete(self, replaces: Sequence[Path] = ()) -> None:
        """Seal it, give it its name durably, and mark the directories that it replaces as no longer complete. If this
        fails, it is deleted. Raises like `create`."""
        written = self.path
        try:
            check_replaceable(self.directory)
            seals.seal(self.path)
            with storage_errors(f"{self.directory} could not be written"):
                if os.path.lexists(self.directory):
                    seals.begin(self.directory)
                    self.directory.rename(self.replaced)
                self.path.rename(self.directory)
                written = self.directory
                sync_directory(self.directory.parent)
        except BaseException:
            shutil.rmtree(written, ignore_errors=True)
            raise
        self.close()
        with storage_errors(f"{self.directory} is complete, but what it replaces could not be marked"):
            partial(self.directory).rmdir()
            for old in replaces:
                seals.begin(old)

    def close(self) -> None:
        """Unlock it. Idempotent."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def removable(directories: Sequence[Path]) -> list[Path]:
    """The directories that may be deleted. Those in which Pagoda's own checkpoint has other files are kept, with a
    warning."""
    found = []
    for directory in directories:
        try:
            if (directory / STATE).exists():
                Removable.of(directory / STATE)
            found.append(directory)
        except CheckpointError as error:
            _log.warning("%s was not deleted: %s", directory, error)
    return found


def delete(directory: Path, places: Sequence[str | Path]) -> None:
    """Delete a directory of a framework, and free the pages of the checkpoints in it, which are in the SSD directories
    `places`. It may be one that was begun, or not exist. One without a seal stays. Raises OSError and StorageError."""
    inner = directory / directory.name[1:].removesuffix(".partial")
    if directory.is_symlink() or not (_is_ours(directory) or _is_ours(inner)):
        return
    for place in (directory, inner):
        for manifest in place.glob(f"*/{MANIFEST}"):  # without one, there are no pages
            with suppress(CheckpointError):
                Removable.of(manifest.parent).retire()
        remove_leftovers(place, with_ranks(places))
    shutil.rmtree(directory)


def check_replaceable(directory: Path) -> None:
    """Raises CheckpointError if a checkpoint with this path would replace something without a seal."""
    if os.path.lexists(directory) and (directory.is_symlink() or not _is_ours(directory)):
        raise CheckpointError(
            f"{directory} was not written by Pagoda, and a checkpoint would replace it: move it, or name another "
            "directory for the run."
        )


def _is_ours(directory: Path) -> bool:
    """Whether a directory has a seal, or nothing but the beginning of one."""
    names = set(os.listdir(directory)) if directory.is_dir() else {""}
    return seals.SEAL in names or names <= {seals.SEAL + TEMPORARY}


def name_complete(run: Path, prefix: str) -> None:
    """Give their names to directories that an interrupted run has completed. One that another process writes stays."""
    for path in sorted(run.glob(f".{prefix}*.partial")):
        staged = Staged(path.with_name(path.name[1:].removesuffix(".partial")), ())
        with suppress(BlockingIOError, CheckpointError, StorageError):
            Lock(path).close()
            seals.check(staged.path)
            staged.complete()


def delete_remains(run: Path, prefix: str, places: Sequence[str | Path]) -> None:
    """Delete what an interrupted run has begun, and what it was deleting. The SSD directories `places` are open, so the
    pages of a checkpoint that was never completed are free already. What another process writes stays."""
    for path in run.glob(f".{prefix}*.partial"):
        with suppress(BlockingIOError):
            Lock(path).close()
            delete_if_possible(path, places)
    for path in (*run.glob(f".{prefix}*.removed"), *filter(seals.is_begun, run.glob(f"{prefix}*"))):
        delete_if_possible(path, places)


def delete_if_possible(path: Path, places: Sequence[str | Path]) -> None:
    """Delete a directory as `delete` does. If that fails, it stays, with a warning."""
    try:
        delete(path, places)
    except (OSError, StorageError) as error:
        _log.warning("%s was not deleted: %s", path, error)
