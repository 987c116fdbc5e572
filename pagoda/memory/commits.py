"""What a page store leaves on disk: one record of its geometry, and a page table for every commit.

    DIR/pagoda-ID/store.json      id, page size, directories, slots on each; one in every directory of the store
    DIR/pagoda-ID/pages           the slots of that directory
    DIR/pagoda-ID/commits/COMMIT  one page table; only in the store's first directory

A commit is there as a whole or not at all: its table is written beside, synced and renamed. A store is worth keeping
as long as it has a commit; a commit, as long as the checkpoint it belongs to exists.
"""

import contextlib
import json
import logging
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from pagoda.errors import StorageError
from pagoda.memory.slots import PageTable

_log = logging.getLogger("pagoda")

_PREFIX = "pagoda-"
_RECORD, _PAGES, _COMMITS = "store.json", "pages", "commits"
_FORMAT, _VERSION = "pagoda-pages", 1
_TEMPORARY = ".tmp"


@dataclass(frozen=True)
class StoreRecord:
    """Identity and geometry of a store."""

    id: str
    page_bytes: int
    directories: tuple[Path, ...]
    """Where its stripes are, in order."""
    portions: tuple[tuple[int, ...], ...]
    """Slots on each directory, one entry for each time the store grew."""

    @staticmethod
    def new(directories: Sequence[Path], page_bytes: int, portion: Sequence[int]) -> "StoreRecord":
        absolute = tuple(directory.resolve() for directory in directories)
        return StoreRecord(secrets.token_hex(8), page_bytes, absolute, (tuple(portion),))

    @property
    def folders(self) -> tuple[Path, ...]:
        """The store's own folder in each of its directories."""
        return tuple(directory / f"{_PREFIX}{self.id}" for directory in self.directories)

    @property
    def pages_paths(self) -> tuple[Path, ...]:
        return tuple(folder / _PAGES for folder in self.folders)

    def commit_path(self, commit: str) -> Path:
        return self.folders[0] / _COMMITS / commit

    def commit_ids(self) -> list[str]:
        """Ids of the commits on disk, oldest first."""
        return sorted(_names(self.folders[0] / _COMMITS))

    def make_folders(self) -> None:
        """Create the store's folders, which are durable after `write`."""
        for folder in self.folders:
            with _storage_errors(f"{folder} cannot be created"):
                folder.mkdir(exist_ok=True)
        with _storage_errors(f"{self.folders[0]} cannot be written"):
            (self.folders[0] / _COMMITS).mkdir(exist_ok=True)

    def write(self) -> None:
        """Write the record durably into every directory, the first one last: that one is what a store is found by."""
        for stripe in reversed(range(len(self.directories))):
            fields = {
                "format": _FORMAT,
                "version": _VERSION,
                "id": self.id,
                "page_bytes": self.page_bytes,
                "directories": [str(directory) for directory in self.directories],
                "stripe": stripe,
                "portions": self.portions,
            }
            folder = self.folders[stripe]
            write_durably(folder / _RECORD, json.dumps(fields).encode())
            sync_directory(folder.parent)

    def remove(self) -> None:
        """Delete the store's files. What a crash leaves of them is deleted by the next `sweep`."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.folders[0] / _RECORD)
        for folder in reversed(self.folders):
            shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class Commit:
    """One page table on disk, and the checkpoint that it is part of."""

    store: str
    commit: str
    page_bytes: int
    checkpoint: str
    """Absolute path of the checkpoint's directory."""
    table: PageTable

    def to_bytes(self) -> bytes:
        """A line of JSON, slots, hashes, and the xxh3_64 of all that."""
        fields = {"format": _FORMAT, "version": _VERSION, "pages": len(self.table.slots)}
        fields |= {k: v for k, v in self.__dict__.items() if k != "table"}
        body = json.dumps(fields).encode() + b"\n"
        body += self.table.slots.astype("<i8").tobytes() + self.table.hashes.astype("<u8").tobytes()
        return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")

    @staticmethod
    def read(path: Path) -> "Commit":
        """Raises StorageError when the file is missing, truncated or damaged."""
        with _storage_errors(f"the page table {path} cannot be read"):
            content = path.read_bytes()
        body, checksum = content[:-8], content[-8:]
        if xxhash.xxh3_64_intdigest(body).to_bytes(8, "little") != checksum:
            raise StorageError(f"the page table {path} is truncated or damaged; use another checkpoint")
        line, _, arrays = body.partition(b"\n")
        fields = json.loads(line)
        if fields.pop("version") != _VERSION:
            raise StorageError(f"the page table {path} has a version that this Pagoda does not read")
        del fields["format"]
        pages = fields.pop("pages")
        slots = np.frombuffer(arrays, "<i8", pages).astype(np.int64)
        hashes = np.frombuffer(arrays, "<u8", pages, 8 * pages).astype(np.uint64)
        return Commit(**fields, table=PageTable(slots, hashes))


@dataclass(frozen=True)
class Reference:
    """What a checkpoint's manifest says of its pages."""

    store: str
    commit: str
    page_bytes: int
    pages: int
    directories: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "directories": list(self.directories)}

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> "Reference":
        """Raises StorageError for what `to_json` cannot have written."""
        try:
            return Reference(
                str(fields["store"]),
                str(fields["commit"]),
                int(fields["page_bytes"]),
                int(fields["pages"]),
                tuple(map(str, fields["directories"])),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise StorageError(f"{fields!r} is not a reference to committed pages") from error


def locate(reference: Reference, directories: Sequence[Path] = ()) -> StoreRecord | None:
    """The store of a reference, in `directories` or where it was when it was written; None if it is not there."""
    places = [*map(Path, directories), *map(Path, reference.directories)]
    found: dict[int, Path] = {}
    record: StoreRecord | None = None
    for place in places:
        read = _read(place / f"{_PREFIX}{reference.store}")
        if read is not None:
            found.setdefault(read[1], place.resolve())
            record = read[0] if read[1] == 0 else record
    if record is None or set(found) != set(range(len(record.directories))):
        return None
    return replace(record, directories=tuple(found[stripe] for stripe in range(len(found))))


def stores_in(directory: Path) -> list[tuple[StoreRecord, int]]:
    """(store, number of the stripe that is here) of every store in a directory, oldest first."""
    found = []
    for name in _names(directory):
        read = _read(directory / name) if name.startswith(_PREFIX) else None
        if read is not None:
            record, stripe = read
            places = (*record.directories[:stripe], directory.resolve(), *record.directories[stripe + 1 :])
            found.append((replace(record, directories=places), stripe))
    return sorted(found, key=lambda pair: (pair[0].folders[pair[1]] / _RECORD).stat().st_mtime_ns)


def bytes_of_stores(directory: Path, but: str = "") -> int:
    """Bytes that page files with names take in a directory, without those of the store `but`."""
    files = Path(directory).glob(f"{_PREFIX}*/{_PAGES}")
    return sum(path.stat().st_blocks * 512 for path in files if path.parent.name != f"{_PREFIX}{but}")


def sweep(directory: Path) -> None:
    """Delete what nobody needs: commits whose checkpoint is gone, stores without commits, what crashes left.

    Call it under the directory's lock. A checkpoint counts as gone when its parent directory exists without it. A
    stripe is deleted when the store's first directory is there and has nothing of the store.
    """
    for name in _names(directory):
        folder = directory / name
        if not name.startswith(_PREFIX) or not folder.is_dir():
            continue
        read = _read(folder)
        if read is None:
            if (folder / _RECORD).exists() or _names(folder / _COMMITS):
                _log.warning("%s has no %s that this Pagoda can read; left alone", folder, _RECORD)
            else:
                shutil.rmtree(folder, ignore_errors=True)
            continue
        record, stripe = read
        if stripe:
            first = record.directories[0]
            if first.is_dir() and not _names(record.folders[0] / _COMMITS):
                shutil.rmtree(folder, ignore_errors=True)
            continue
        record = replace(record, directories=(directory.resolve(), *record.directories[1:]))
        for commit in record.commit_ids():
            _drop_if_gone(record.commit_path(commit))
        for leftover in (record.folders[0] / _COMMITS).glob(f"*{_TEMPORARY}"):
            leftover.unlink(missing_ok=True)
        if not record.commit_ids():
            record.remove()


def remove_commit(record: StoreRecord, commit: str) -> None:
    """Delete a page table durably; one that is not there is none. Raises StorageError."""
    path = record.commit_path(commit)
    with _storage_errors(f"the page table {path} cannot be deleted"):
        path.unlink(missing_ok=True)
    if path.parent.is_dir():
        sync_directory(path.parent)


def write_durably(path: Path, content: bytes) -> None:
    """Replace a file's content: after a crash at any instant it has the old content or the new. Raises StorageError."""
    beside = path.with_name(path.name + _TEMPORARY)
    with _storage_errors(f"{path} cannot be written"):
        try:
            with beside.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable. Raises StorageError."""
    with _storage_errors(f"{directory} cannot be synced"):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _drop_if_gone(path: Path) -> None:
    """Delete a page table whose checkpoint is gone; one that cannot be read stays, for `Commit.read` to report."""
    try:
        checkpoint = Path(Commit.read(path).checkpoint)
    except StorageError as error:
        _log.warning("%s", error)
        return
    if checkpoint.parent.is_dir() and not checkpoint.exists():
        _log.warning("checkpoint %s is gone; its pages on SSD are free again", checkpoint)
        path.unlink()
        sync_directory(path.parent)


def _read(folder: Path) -> tuple[StoreRecord, int] | None:
    """The record in a store's folder and the number of its stripe; None when there is none that can be read."""
    try:
        fields = json.loads((folder / _RECORD).read_bytes())
        if fields["format"] != _FORMAT or fields["version"] != _VERSION:
            return None
        record = StoreRecord(
            fields["id"],
            fields["page_bytes"],
            tuple(map(Path, fields["directories"])),
            tuple(map(tuple, fields["portions"])),
        )
        return record, fields["stripe"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _names(directory: Path) -> list[str]:
    """Names in a directory, without those of files being written; none when it does not exist."""
    try:
        return [name for name in os.listdir(directory) if not name.endswith(_TEMPORARY)]
    except (FileNotFoundError, NotADirectoryError):
        return []


@contextlib.contextmanager
def _storage_errors(what: str) -> Iterator[None]:
    """Turn the system's errors into StorageErrors that say what could not be done."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"{what}: {error.strerror}") from error
