"""Deleting what a checkpoint that is no more keeps on SSD."""

import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pagoda.errors import StorageError
from pagoda.memory.identity import checkpoint_id_of
from pagoda.memory.ssd.commits import Reference
from pagoda.memory.ssd.lock import DirectoryLock
from pagoda.memory.ssd.record import locate
from pagoda.memory.ssd.tier import live

_log = logging.getLogger("pagoda")


def forget_commit(reference: Mapping[str, Any], checkpoint_id: str, directories: Sequence[str | Path] = ()) -> None:
    """Delete a commit of a checkpoint that is no more, durably, so that its slots are free; deletes the store too if
    that was its last and nobody has it open. Raises StorageError when that fails.

    Looks in `directories` only. A commit stays if it is not there, if it belongs to another checkpoint, if a checkpoint
    with this id is still where it was saved (then a copy was deleted), or if somebody else has its directories open.
    """
    wanted = Reference.from_json(reference)
    tier = live.get(wanted.store)
    record = tier.record if tier is not None else locate(wanted.store, [Path(directory) for directory in directories])
    if record is None:
        _log.warning(
            "the pages of checkpoint %s are not in the SSD directories of this run, and are kept: pagoda gc %s",
            checkpoint_id,
            " ".join(wanted.directories),
        )
        return
    if wanted.commit not in record.commit_ids():
        return
    mine = [directory for other in [*live.values()] for directory in other.record.directories]
    try:
        lock = DirectoryLock([d for d in record.directories if not any(os.path.samefile(d, own) for own in mine)])
    except StorageError:
        return  # a rank that has them open forgets its own; else `pagoda gc` finds it
    with contextlib.closing(lock):
        try:
            commit = record.read_commit(wanted.commit)
        except StorageError as error:
            _log.warning("%s; it is kept", error)
            return
        if commit.checkpoint_id != checkpoint_id:
            _log.warning("%s belongs to another checkpoint, and is kept", record.commit_path(wanted.commit))
        elif checkpoint_id_of(Path(commit.checkpoint)) == checkpoint_id:
            _log.warning("the pages of %s are kept: what was deleted is a copy of it", commit.checkpoint)
        elif tier is not None:
            tier.forget(wanted.commit)
        else:
            record.remove_commit(wanted.commit)
            if not record.commit_ids():
                record.remove()
