"""Page tables whose checkpoints are not where they were saved, and stores without page tables: what `pagoda gc`
lists."""

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pagoda.errors import StorageError
from pagoda.memory.files import may_exist
from pagoda.memory.identity import MANIFEST, being_removed, checkpoint_id_of, never_completed
from pagoda.memory.sizes import format_bytes
from pagoda.memory.ssd.commits import Commit
from pagoda.memory.ssd.record import COMMITS, RECORD, StoreRecord, bytes_of_store, locate, stores_in
from pagoda.memory.ssd.slots import slots_of


@dataclass(frozen=True)
class Orphan:
    """Something in an SSD directory that seems to be no longer needed."""

    store: StoreRecord
    commit: Commit | None
    """None: the orphan is the whole store, which has no page tables."""
    why: str
    written: float
    """The time at which it was written, in seconds since 1970."""
    nbytes: int
    """Its share of the bytes that deleting all orphans of the store frees."""


def why_orphaned(commit: Commit, keep: Collection[str] = ()) -> str | None:
    """Why a commit seems to be no longer needed. None if its checkpoint is in the directory in which it was saved, also
    under another name, such as those that a run gives to checkpoints that it leaves behind.

    `keep`: ids of checkpoints that are known to be elsewhere.
    """
    place = Path(commit.checkpoint)
    there = checkpoint_id_of(place)
    if commit.checkpoint_id in keep or there == commit.checkpoint_id:
        return None
    if why := why_abandoned(commit):
        return why
    if any(checkpoint_id_of(other) == commit.checkpoint_id for other in place.parent.glob("*")):
        return None
    if there is not None:
        return "another checkpoint is at that path: this one was moved or deleted"
    if may_exist(place / MANIFEST):
        return None  # damaged or out of reach, perhaps this one
    if place.parent.is_dir():
        return "it is not at that path: it was moved or deleted"
    return f"{place.parent} is not there: it was moved or deleted, or its volume is not mounted"


def why_abandoned(commit: Commit) -> str | None:
    """Why a commit can never be needed again. None if that is not certain."""
    if never_completed(Path(commit.checkpoint), commit.checkpoint_id):
        return "it was never completed"
    if being_removed(Path(commit.checkpoint), commit.checkpoint_id):
        return "Pagoda was deleting it"
    return None


def orphans_in(directory: Path, keep: Collection[str] = ()) -> Iterator[Orphan]:
    """Orphans in one directory, the oldest store first. Damaged page tables are not orphans."""
    for store, stripe in stores_in(directory):
        if stripe:
            continue  # page tables are with the first stripe
        try:
            names = store.commit_ids()
        except StorageError:
            continue
        if not names:
            size = bytes_of_store(directory, store.id)
            yield Orphan(store, None, "it keeps no checkpoint", _written(store, RECORD), size)
        commits = store.readable_commits()
        lost = {commit.commit: why for commit in commits if (why := why_orphaned(commit, keep)) is not None}
        kept = slots_of(commit.table for commit in commits if commit.commit not in lost)
        for commit in commits:
            if commit.commit in lost:
                alone = np.setdiff1d(commit.table.written, kept)
                written = _written(store, os.path.join(COMMITS, commit.commit))
                yield Orphan(store, commit, lost[commit.commit], written, len(alone) * store.page_bytes)
                kept = np.union1d(kept, alone)


def drop(orphans: Sequence[Orphan], directories: Sequence[Path]) -> Iterator[StoreRecord]:
    """Delete orphans, and the stores in `directories` that have no page tables afterwards. The caller must hold the
    locks.

    Yields the stores that are not deleted completely, because a part is in none of the given directories or because a
    folder contains something else. Raises StorageError.
    """
    for orphan in orphans:
        if orphan.commit is not None:
            orphan.store.remove_commit(orphan.commit.commit)
    for store in dict.fromkeys(orphan.store for orphan in orphans):
        if not store.commit_ids():
            whole = locate(store.id, [store.directories[0], *directories])
            if whole is None or not whole.remove():
                yield store


def gc_hint(directories: Iterable[Path], stores: bool = True) -> str:
    """A sentence for errors about too little room: what `pagoda gc` would free. Empty if it would free nothing.

    `stores`: also count stores that keep no checkpoint.
    """
    directories = list(directories)
    orphans = [orphan for directory in directories for orphan in orphans_in(directory)]
    nbytes = sum(orphan.nbytes for orphan in orphans if stores or orphan.commit is not None)
    if not nbytes:
        return ""
    return (
        f" {format_bytes(nbytes)} are kept for checkpoints that are not where they were saved: "
        f"pagoda gc {' '.join(map(str, directories))} lists them, and deletes them if you wish."
    )


def _written(store: StoreRecord, name: str) -> float:
    try:
        return os.lstat(store.folders[0] / name).st_mtime
    except OSError:
        return 0.0
