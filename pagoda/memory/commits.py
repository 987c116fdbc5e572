"""What a page store leaves on disk: one record of its geometry, and a page table for every commit.

    DIR/pagoda-ID/store.json      id, page size, directories, slots on each; one in every directory of the store
    DIR/pagoda-ID/pages           the slots of that directory
    DIR/pagoda-ID/commits/COMMIT  one page table; only in the store's first directory

A record is believed only if each field has its form and its id is the one in the folder's name. The directories that it
names are hints for reading; nothing is ever written or deleted along them.

A commit is there as a whole or not at all: its table is written beside, synced and renamed. It names the checkpoint it
belongs to by the checkpoint's id; the path is a hint for messages.
"""

import contextlib
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from pagoda.errors import StorageError
from pagoda.memory.files import (
    TEMPORARY,
    inside,
    read_regular,
    replace_file,
    storage_errors,
    sync_descriptor,
)
from pagoda.memory.forms import FormError, check
from pagoda.memory.identity import CHECKPOINT_ID
from pagoda.memory.page import PAGE_ALIGN
from pagoda.memory.slots import UNWRITTEN, PageTable

PREFIX = "pagoda-"
RECORD, PAGES, COMMITS = "store.json", "pages", "commits"
STORE_ID = re.compile(r"[0-9a-f]{16}")
COMMIT_ID = re.compile(r"[0-9a-f]{16}-[0-9a-f]{8}")
_HASH = re.compile(r"[0-9a-f]{32}")
_FORMAT, _VERSION = "pagoda-pages", 2
_MOST_SLOTS = 1 << 32


def _page_size(value: object) -> bool:
    """a multiple of 4096 bytes"""
    return type(value) is int and 0 < value < 1 << 40 and value % PAGE_ALIGN == 0


def _place(value: object) -> bool:
    """an absolute path"""
    return isinstance(value, str) and "\0" not in value and os.path.isabs(value)


def _named_place(value: object) -> bool:
    """an absolute path with a name"""
    return _place(value) and bool(Path(str(value)).name)


_RECORD_FORM = {"id": STORE_ID, "page_bytes": _page_size, "directories": [_place], "stripe": int, "portions": [[int]]}
_COMMIT_FORM = {
    "pages": int,
    "store": STORE_ID,
    "commit": COMMIT_ID,
    "page_bytes": _page_size,
    "checkpoint_id": CHECKPOINT_ID,
    "checkpoint": _named_place,
}
_REFERENCE_FORM = {
    "store": STORE_ID,
    "commit": COMMIT_ID,
    "page_bytes": _page_size,
    "pages": int,
    "table": _HASH,
    "directories": [_place],
}


@dataclass(frozen=True)
class StoreRecord:
    """Identity and geometry of a store."""

    id: str
    page_bytes: int
    directories: tuple[Path, ...]
    """Where its stripes are, in order; as read from a file, where they were."""
    portions: tuple[tuple[int, ...], ...]
    """Slots on each directory, one entry for each time the store grew."""

    @staticmethod
    def new(directories: Sequence[Path], page_bytes: int, portion: Sequence[int]) -> "StoreRecord":
        absolute = tuple(directory.resolve() for directory in directories)
        return StoreRecord(secrets.token_hex(8), page_bytes, absolute, (tuple(portion),))

    @property
    def name(self) -> str:
        """What the store's folder in each of its directories is called."""
        return f"{PREFIX}{self.id}"

    @property
    def folders(self) -> tuple[Path, ...]:
        """The store's own folder in each of its directories."""
        return tuple(directory / self.name for directory in self.directories)

    @property
    def pages_paths(self) -> tuple[Path, ...]:
        return tuple(folder / PAGES for folder in self.folders)

    @property
    def pages_of_files(self) -> tuple[int, ...]:
        """Slots in each directory."""
        return tuple(map(sum, zip(*self.portions, strict=True)))

    def commit_path(self, commit: str) -> Path:
        """Where a page table is, for messages."""
        return self.folders[0] / COMMITS / commit

    def commit_ids(self) -> list[str]:
        """Ids of the commits on disk, oldest first. Raises StorageError when that cannot be told."""
        folder = self.folders[0] / COMMITS
        with storage_errors(f"{folder} cannot be read"):
            try:
                with inside(self.directories[0], self.name, COMMITS) as commits:
                    return sorted(filter(COMMIT_ID.fullmatch, os.listdir(commits)))
            except FileNotFoundError:
                return []

    def content(self, stripe: int) -> bytes:
        """What the record in one of the directories says."""
        fields = {"format": _FORMAT, "version": _VERSION, "id": self.id, "page_bytes": self.page_bytes}
        directories = [str(directory) for directory in self.directories]
        return json.dumps({**fields, "directories": directories, "stripe": stripe, "portions": self.portions}).encode()

    def is_written(self, stripe: int) -> bool:
        """Whether the record on disk says what this one does."""
        try:
            with inside(self.directories[stripe], self.name) as folder:
                return read_regular(RECORD, dir_fd=folder, follow=False) == self.content(stripe)
        except OSError:
            return False

    def write(self) -> None:
        """Write the record durably into every directory, the first one last: that one is what a store is found by.

        Creates the store's folders. Raises StorageError.
        """
        for stripe in reversed(range(len(self.directories))):
            with storage_errors(f"{self.folders[stripe]} cannot be written"), inside(self.directories[stripe]) as top:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(self.name, dir_fd=top)
                with inside(self.directories[stripe], self.name) as folder:
                    if stripe == 0:
                        with contextlib.suppress(FileExistsError):
                            os.mkdir(COMMITS, dir_fd=folder)
                    replace_file(folder, RECORD, self.content(stripe))
                sync_descriptor(top, self.folders[stripe])

    def write_commit(self, commit: str, content: bytes) -> None:
        """Write a page table durably. Raises StorageError; then there is no such table."""
        what = f"the page table {self.commit_path(commit)} cannot be written"
        with storage_errors(what), inside(self.directories[0], self.name, COMMITS) as commits:
            try:
                replace_file(commits, commit, content)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(commit, dir_fd=commits)
                raise

    def read_commit(self, commit: str) -> "Commit":
        """A page table of this store. Raises StorageError when it is missing, truncated, damaged or another's."""
        path = self.commit_path(commit)
        what = f"the page table {path} cannot be read"
        with storage_errors(what), inside(self.directories[0], self.name, COMMITS) as commits:
            content = read_regular(commit, dir_fd=commits, follow=False)
        found = Commit.from_bytes(content, path)
        if (found.store, found.commit, found.page_bytes) != (self.id, commit, self.page_bytes):
            raise StorageError(f"{path} is the page table of commit {found.commit} of store {found.store}")
        if len(found.table.slots) and found.table.slots.max() >= sum(self.pages_of_files):
            raise StorageError(f"the page table {path} is damaged: it names slots that its store does not have")
        return found

    def remove_commit(self, commit: str) -> None:
        """Delete a page table durably; one that is not there is none. Raises StorageError."""
        with storage_errors(f"the page table {self.commit_path(commit)} cannot be deleted"):
            try:
                with inside(self.directories[0], self.name, COMMITS) as commits:
                    os.unlink(commit, dir_fd=commits)
                    sync_descriptor(commits, self.commit_path(commit))
            except FileNotFoundError:
                return

    def remove(self) -> bool:
        """Delete the store's own files, in every directory whose record says that they are this store's; returns
        whether all of it is gone.

        The records of several stripes must also agree that these belong together: one may be a copy, and the others are
        needed by the original. Whatever else is in the folders stays, and so do the folders then. For the holder of the
        directories' locks.
        """
        for stripe, directory in reversed([*enumerate(self.directories)]):
            with contextlib.suppress(OSError), inside(directory) as top:
                with inside(directory, self.name) as folder:
                    if self.is_written(stripe) if len(self.directories) > 1 else _says(folder, self.id, stripe):
                        for name in (PAGES, RECORD + TEMPORARY):
                            _unlink_regular(folder, name)
                        with contextlib.suppress(OSError):
                            os.rmdir(COMMITS, dir_fd=folder)
                        _unlink_regular(folder, RECORD)
                os.rmdir(self.name, dir_fd=top)  # refused unless it is empty
        return not any(map(os.path.lexists, self.folders))


@dataclass(frozen=True)
class Commit:
    """One page table on disk, and the checkpoint that it is part of."""

    store: str
    commit: str
    page_bytes: int
    checkpoint_id: str
    checkpoint: str
    """Absolute path at which the checkpoint was saved; it may have been moved since."""
    table: PageTable

    def to_bytes(self) -> bytes:
        """A line of JSON, slots, hashes, and the xxh3_64 of all that."""
        fields = {"format": _FORMAT, "version": _VERSION, "pages": len(self.table.slots)}
        fields |= {k: v for k, v in self.__dict__.items() if k != "table"}
        body = json.dumps(fields).encode() + b"\n"
        body += self.table.slots.astype("<i8").tobytes() + self.table.hashes.astype("<u8").tobytes()
        return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")

    @staticmethod
    def from_bytes(content: bytes, path: Path) -> "Commit":
        """Raises StorageError when the content of `path` is truncated or damaged."""
        body, checksum = content[:-8], content[-8:]
        if xxhash.xxh3_64_intdigest(body).to_bytes(8, "little") != checksum:
            raise StorageError(f"the page table {path} is truncated or damaged; use another checkpoint")
        line, _, arrays = body.partition(b"\n")
        try:
            fields = _fields(line, _COMMIT_FORM)
            pages = fields.pop("pages")
            if len(arrays) != 16 * pages:
                raise FormError(f"it has {len(arrays)} bytes for {pages} pages")
        except ValueError as error:
            raise StorageError(f"the page table {path} cannot be used: {error}") from error
        slots = np.frombuffer(arrays, "<i8", pages).astype(np.int64)
        hashes = np.frombuffer(arrays, "<u8", pages, 8 * pages).astype(np.uint64)
        if pages and slots.min() < UNWRITTEN:
            raise StorageError(f"the page table {path} is damaged: it names negative slots")
        return Commit(**fields, table=PageTable(slots, hashes))


@dataclass(frozen=True)
class Reference:
    """What a checkpoint's manifest says of its pages."""

    store: str
    commit: str
    page_bytes: int
    pages: int
    table: str
    """xxh3_128 of the page table's file: another table in its place is refused."""
    directories: tuple[str, ...]
    """Where the store was."""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "directories": list(self.directories)}

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> "Reference":
        """Raises StorageError for what `to_json` cannot have written."""
        try:
            check(fields, _REFERENCE_FORM, "reference")
        except FormError as error:
            raise StorageError(f"{fields!r:.200} is not a reference to committed pages: {error}") from error
        return Reference(**{**fields, "directories": tuple(fields["directories"])})


def table_hash(content: bytes) -> str:
    """What binds a reference to the file of a page table."""
    return xxhash.xxh3_128_hexdigest(content)


def locate(store: str, places: Sequence[Path]) -> StoreRecord | None:
    """A store all of whose stripes are in `places`, the first of each; None if some are not."""
    found: dict[int, Path] = {}
    record: StoreRecord | None = None
    for place in places:
        try:
            read, stripe = read_store(place, store)
        except StorageError:
            continue
        if stripe not in found:
            found[stripe] = Path(os.path.realpath(place))
            record = read if stripe == 0 else record
    if record is None or set(found) != set(range(len(record.directories))):
        return None
    return replace(record, directories=tuple(found[stripe] for stripe in range(len(found))))


def stores_in(directory: Path) -> list[tuple[StoreRecord, int]]:
    """(store, number of the stripe that is here) of every store in a directory, oldest first."""
    found = []
    for store in _store_ids(directory):
        with contextlib.suppress(StorageError, OSError):
            record, stripe = read_store(directory, store)
            here = Path(os.path.realpath(directory))
            places = (*record.directories[:stripe], here, *record.directories[stripe + 1 :])
            written = os.lstat(directory / record.name / RECORD).st_mtime_ns
            found.append((written, replace(record, directories=places), stripe))
    return [(record, stripe) for _, record, stripe in sorted(found, key=lambda each: each[0])]


def unknown_in(directory: Path) -> Iterator[str]:
    """Why each folder that looks like a store is none that this Pagoda can use. Nobody deletes such a folder."""
    for name in sorted(_names(directory)):
        if name.startswith(PREFIX) and os.path.lexists(directory / name / RECORD):
            try:
                read_store(directory, name.removeprefix(PREFIX))
            except StorageError as error:
                yield str(error)
        elif STORE_ID.fullmatch(name.removeprefix(PREFIX)) and name.startswith(PREFIX):
            yield f"{directory / name} has no {RECORD}"


def read_store(directory: Path, store: str) -> tuple[StoreRecord, int]:
    """The record in a store's folder and the number of its stripe.

    Raises StorageError when there is none, the folder is a symbolic link, or a field does not have its form.
    """
    path = directory / f"{PREFIX}{store}" / RECORD
    with storage_errors(f"{path} cannot be read"), inside(directory, f"{PREFIX}{store}") as folder:
        content = read_regular(RECORD, dir_fd=folder, follow=False)
    try:
        fields = _fields(content, _RECORD_FORM)
        places, portions, stripe = fields["directories"], fields["portions"], fields["stripe"]
        if fields["id"] != store:
            raise FormError(f"id is {fields['id']}, which is not in the folder's name")
        if not portions or stripe >= len(places) or any(len(portion) != len(places) for portion in portions):
            raise FormError(f"stripe {stripe} of {len(places)} with the portions {portions!r:.80}")
        if sum(map(sum, portions)) > _MOST_SLOTS:
            raise FormError(f"portions has more than {_MOST_SLOTS} slots")
    except ValueError as error:
        raise StorageError(f"{path} is not the record of a store that this Pagoda can use: {error}") from error
    directories = tuple(map(Path, places))
    return StoreRecord(store, fields["page_bytes"], directories, tuple(map(tuple, portions))), stripe


def bytes_of_stores(directory: Path, but: str = "") -> int:
    """Bytes that page files with names take in a directory, without those of the store `but`."""
    found = 0
    for store in _store_ids(directory):
        with contextlib.suppress(OSError):
            status = os.lstat(Path(directory) / f"{PREFIX}{store}" / PAGES)
            found += status.st_blocks * 512 if stat.S_ISREG(status.st_mode) and store != but else 0
    return found


def remove_temporary_files(record: StoreRecord, stripe: int) -> None:
    """Delete what a crash left of files that were being written in the folder of a stripe: regular files whose names
    are those that `replace_file` gives them. For the holder of the directory's lock."""
    directory = record.directories[stripe]
    with contextlib.suppress(OSError), inside(directory, record.name) as folder:
        _unlink_regular(folder, RECORD + TEMPORARY)
    with contextlib.suppress(OSError), inside(directory, record.name, COMMITS) as commits:
        for name in os.listdir(commits):
            if name.endswith(TEMPORARY) and COMMIT_ID.fullmatch(name.removesuffix(TEMPORARY)):
                _unlink_regular(commits, name)


def _fields(content: bytes, form: dict[str, Any]) -> dict[str, Any]:
    """The fields of a JSON object of this format and version. Raises ValueError."""
    try:
        fields = json.loads(content)
    except RecursionError as error:
        raise FormError("it is nested too deeply") from error
    if not isinstance(fields, dict) or fields.pop("format", None) != _FORMAT:
        raise FormError(f"its format is not {_FORMAT!r}")
    version = fields.pop("version", None)
    if version != _VERSION or type(version) is not int:
        raise FormError(
            f"it has version {version!r:.80}, and this Pagoda uses version {_VERSION}. Use the Pagoda that wrote it, "
            "or delete it by hand when no checkpoint needs it"
        )
    check(fields, form)
    return fields


def _says(folder: int, store: str, stripe: int) -> bool:
    """Whether the record in an open folder is that of this stripe of this store."""
    try:
        fields = _fields(read_regular(RECORD, dir_fd=folder, follow=False), _RECORD_FORM)
    except (OSError, ValueError):
        return False
    return (fields["id"], fields["stripe"]) == (store, stripe)


def _unlink_regular(directory: int, name: str) -> None:
    """Delete a regular file in an open directory; anything else of that name stays."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISREG(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=directory)


def _store_ids(directory: Path) -> list[str]:
    """Ids in the names of folders that have the form of a store's."""
    names = (name for name in _names(directory) if name.startswith(PREFIX))
    return [store for name in names if STORE_ID.fullmatch(store := name.removeprefix(PREFIX))]


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []
