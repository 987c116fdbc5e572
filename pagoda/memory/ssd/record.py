"""The folders of a page store: reading, writing and deleting their files."""

import contextlib
import json
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pagoda.errors import StorageError
from pagoda.memory.files import TEMPORARY, inside, read_regular, replace_file, storage_errors, sync_descriptor
from pagoda.memory.json_forms import FormError
from pagoda.memory.ssd.commits import COMMIT_ID, FORMAT, RECORD_FORM, STORE_ID, VERSION, Commit, fields_of

PREFIX = "pagoda-"
RECORD, PAGES, COMMITS = "store.json", "pages", "commits"
_MOST_SLOTS = 1 << 32
_MOST_TABLE_BYTES = 1 << 34


@dataclass(frozen=True)
class StoreRecord:
    """Identity and geometry of a store."""

    id: str
    page_bytes: int
    directories: tuple[Path, ...]
    """Where its stripes are, in order. In a record read from a file: where they were."""
    portions: tuple[tuple[int, ...], ...]
    """Slots in each directory, with one entry for each time the store grew."""

    @property
    def name(self) -> str:
        """The name of the store's folder in each of its directories."""
        return f"{PREFIX}{self.id}"

    @property
    def folders(self) -> tuple[Path, ...]:
        """The store's own folder in each of its directories."""
        return tuple(directory / self.name for directory in self.directories)

    @property
    def pages_of_files(self) -> tuple[int, ...]:
        """Slots in each directory."""
        return tuple(map(sum, zip(*self.portions, strict=True)))

    def commit_path(self, commit: str) -> Path:
        """The path of a page table, for messages."""
        return self.folders[0] / COMMITS / commit

    def commit_ids(self) -> list[str]:
        """Ids of the commits on disk, oldest first. Raises StorageError if the folder cannot be read."""
        what = f"{self.folders[0] / COMMITS} cannot be read"
        with storage_errors(what), contextlib.suppress(FileNotFoundError), self._commits() as commits:
            return sorted(filter(COMMIT_ID.fullmatch, os.listdir(commits)))
        return []

    def readable_commits(self) -> list[Commit]:
        """The commits on disk, oldest first, except those whose page tables are damaged or cannot be read."""
        found = []
        with contextlib.suppress(StorageError):
            for commit in self.commit_ids():
                with contextlib.suppress(StorageError):
                    found.append(self.read_commit(commit))
        return found

    def is_written(self, stripe: int) -> bool:
        """Whether the record on disk equals this record."""
        with contextlib.suppress(OSError):  # includes StorageError
            return read_store(self.directories[stripe], self.id) == (self, stripe)
        return False

    def write(self) -> None:
        """Write the record durably to every directory. The first directory is last, because stores are found by its
        record.

        Creates the store's folders. Raises StorageError.
        """
        fields = {"format": FORMAT, "version": VERSION, "id": self.id, "page_bytes": self.page_bytes}
        fields["directories"] = [str(directory) for directory in self.directories]
        for stripe in reversed(range(len(self.directories))):
            with storage_errors(f"{self.folders[stripe]} cannot be written"), inside(self.directories[stripe]) as top:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(self.name, dir_fd=top)
                with inside(self.directories[stripe], self.name) as folder:
                    if stripe == 0:
                        with contextlib.suppress(FileExistsError):
                            os.mkdir(COMMITS, dir_fd=folder)
                    content = {**fields, "stripe": stripe, "portions": self.portions}
                    replace_file(folder, RECORD, json.dumps(content).encode())
                sync_descriptor(top, self.folders[stripe])

    def write_commit(self, commit: str, content: bytes) -> None:
        """Write a page table durably. Raises StorageError. The table then does not exist."""
        what = f"the page table {self.commit_path(commit)} cannot be written"
        with storage_errors(what), self._commits() as commits:
            try:
                replace_file(commits, commit, content)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(commit, dir_fd=commits)
                raise

    def read_commit(self, commit: str) -> Commit:
        """A page table of this store. Raises StorageError if it is missing, truncated, damaged or belongs to another
        store."""
        path = self.commit_path(commit)
        with storage_errors(f"the page table {path} cannot be read"), self._commits() as commits:
            content = read_regular(commit, dir_fd=commits, most_bytes=_MOST_TABLE_BYTES)
        found = Commit.from_bytes(content, path)
        if (found.store, found.commit, found.page_bytes) != (self.id, commit, self.page_bytes):
            raise StorageError(f"{path} is the page table of commit {found.commit} of store {found.store}")
        if len(found.table.slots) and found.table.slots.max() >= sum(self.pages_of_files):
            raise StorageError(f"the page table {path} is damaged: it names slots that its store does not have")
        return found

    def remove_commit(self, commit: str) -> None:
        """Delete a page table durably. Does nothing if it does not exist. Raises StorageError."""
        path = self.commit_path(commit)
        what = f"the page table {path} cannot be deleted"
        with storage_errors(what), contextlib.suppress(FileNotFoundError), self._commits() as commits:
            os.unlink(commit, dir_fd=commits)
            sync_descriptor(commits, path)

    def remove(self) -> bool:
        """Delete the store's own files in every directory whose record matches this store. Returns whether everything
        is gone.

        The records of several stripes must also agree that they belong together, because one may be a copy while the
        original needs the others. Any other file in the folders stays, and then the folders stay too. The caller must
        hold the locks of the directories.
        """
        for stripe, directory in reversed([*enumerate(self.directories)]):
            with contextlib.suppress(OSError), inside(directory) as top:
                with inside(directory, self.name) as folder, contextlib.suppress(OSError):
                    said, number = _record_in(folder, self.folders[stripe], self.id)
                    if number == stripe and (said == self or len(self.directories) == 1):
                        _unlink_regular(folder, PAGES, RECORD + TEMPORARY)
                        with contextlib.suppress(OSError):
                            os.rmdir(COMMITS, dir_fd=folder)
                        _unlink_regular(folder, RECORD)
                os.rmdir(self.name, dir_fd=top)  # fails unless it is empty
        return not any(map(os.path.lexists, self.folders))

    def _commits(self) -> contextlib.AbstractContextManager[int]:
        """The descriptor of the folder with the page tables."""
        return inside(self.directories[0], self.name, COMMITS)


def locate(store: str, places: Sequence[Path]) -> StoreRecord | None:
    """The store whose stripes are all in `places`. The first copy of each stripe counts. None if a stripe is
    missing."""
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
    """(store, number of the stripe in this directory) for every store in a directory, oldest first."""
    found = []
    for store in _ids(directory):
        with contextlib.suppress(OSError):  # includes StorageError
            record, stripe = read_store(directory, store)
            here = Path(os.path.realpath(directory))
            places = (*record.directories[:stripe], here, *record.directories[stripe + 1 :])
            written = os.lstat(directory / record.name / RECORD).st_mtime_ns
            found.append((written, replace(record, directories=places), stripe))
    return [(record, stripe) for _, record, stripe in sorted(found, key=lambda each: each[0])]


def unknown_in(directory: Path) -> Iterator[str]:
    """For each folder that looks like a store but cannot be used by this Pagoda: why. Such folders are never
    deleted."""
    for store in _ids(directory, of_any_form=True):
        folder = directory / f"{PREFIX}{store}"
        if os.path.lexists(folder / RECORD):
            try:
                read_store(directory, store)
            except StorageError as error:
                yield str(error)
        elif STORE_ID.fullmatch(store):
            yield f"{folder} has no {RECORD}"


def read_store(directory: Path, store: str) -> tuple[StoreRecord, int]:
    """The record in a store's folder, and the number of its stripe.

    Raises StorageError if there is no record, the folder is a symbolic link, or a field does not have its form.
    """
    path = directory / f"{PREFIX}{store}"
    with storage_errors(f"{path / RECORD} cannot be read"), inside(directory, f"{PREFIX}{store}") as folder:
        return _record_in(folder, path, store)


def _record_in(folder: int, path: Path, store: str) -> tuple[StoreRecord, int]:
    """Like `read_store`, for the open folder at `path`. Raises OSError too."""
    content = read_regular(RECORD, dir_fd=folder)
    try:
        fields = fields_of(content, RECORD_FORM)
        places, portions, stripe = fields["directories"], fields["portions"], fields["stripe"]
        if fields["id"] != store:
            raise FormError(f"id is {fields['id']}, which is not in the folder's name")
        if not portions or stripe >= len(places) or any(len(portion) != len(places) for portion in portions):
            raise FormError(f"stripe {stripe} of {len(places)} with the portions {portions!r:.80}")
        if sum(map(sum, portions)) > _MOST_SLOTS:
            raise FormError(f"portions has more than {_MOST_SLOTS} slots")
    except ValueError as error:
        raise StorageError(f"{path / RECORD} is not the record of a store that this Pagoda can use: {error}") from error
    directories = tuple(map(Path, places))
    return StoreRecord(store, fields["page_bytes"], directories, tuple(map(tuple, portions))), stripe


def bytes_of_stores(directory: Path, but: str = "") -> int:
    """Bytes of the named page files in a directory, except that of the store `but`."""
    return sum(bytes_of_store(directory, store) for store in _ids(directory) if store != but)


def bytes_of_store(directory: Path, store: str) -> int:
    """Bytes of a store's page file in a directory. 0 if there is none."""
    with contextlib.suppress(OSError):
        status = os.lstat(directory / f"{PREFIX}{store}" / PAGES)
        return status.st_blocks * 512 if stat.S_ISREG(status.st_mode) else 0
    return 0


def remove_temporary_files(record: StoreRecord, stripe: int) -> None:
    """Delete files that a crash left half-written in the folder of a stripe: regular files with the temporary names
    that `replace_file` uses. The caller must hold the directory's lock."""
    directory = record.directories[stripe]
    with contextlib.suppress(OSError), inside(directory, record.name) as folder:
        _unlink_regular(folder, RECORD + TEMPORARY)
    with contextlib.suppress(OSError), inside(directory, record.name, COMMITS) as commits:
        written = [name for name in os.listdir(commits) if name.endswith(TEMPORARY)]
        _unlink_regular(commits, *(name for name in written if COMMIT_ID.fullmatch(name.removesuffix(TEMPORARY))))


def _unlink_regular(directory: int, *names: str) -> None:
    """Delete regular files in an open directory. Anything else with these names stays."""
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISREG(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=directory)


def _ids(directory: Path, of_any_form: bool = False) -> list[str]:
    """The store ids in the names of a directory's folders, or with `of_any_form`, whatever follows the prefix."""
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return []
    ids = [name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX)]
    return [store for store in ids if of_any_form or STORE_ID.fullmatch(store)]
