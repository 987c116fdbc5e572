"""`pagoda gc`: deletes the pages that an SSD directory keeps for checkpoints that are gone, if the user agrees."""

import os
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from rich.console import Console

from pagoda.checkpoint.paged import with_ranks
from pagoda.config.commands import GcConfig
from pagoda.console import say
from pagoda.errors import ConfigError
from pagoda.memory.identity import MANIFEST, checkpoint_id_of
from pagoda.memory.sizes import format_bytes
from pagoda.memory.ssd.lock import lock_directories
from pagoda.memory.ssd.orphans import Orphan, drop, orphans_in, why_orphaned
from pagoda.memory.ssd.record import unknown_in

_DECLINED = 1


def run(config: GcConfig, console: Console) -> int:
    """List what looks orphaned, ask, and delete it. Returns the exit code.

    Raises ConfigError if a directory is missing, or if a path of --keep contains no checkpoint. Raises StorageError if
    a directory is in use, or if something cannot be deleted.
    """
    if not config.directories:
        raise ConfigError("name the directories to look in, as --memory.ssd named them: pagoda gc DIR")
    keep = {checkpoint_id for path in config.keep for checkpoint_id in _checkpoints_below(path)}
    directories = list({os.path.realpath(path): path for path in with_ranks(config.directories)}.values())
    with lock_directories(directories):
        for directory in directories:
            say(console, *(f"{reason}; the folder is left alone" for reason in unknown_in(directory)))
        orphans = [orphan for directory in directories for orphan in orphans_in(directory, keep)]
        if not orphans:
            say(console, f"nothing looks orphaned in {_listed(directories)}")
            return 0
        for orphan in orphans:
            say(console, *_described(orphan))
        total = format_bytes(sum(orphan.nbytes for orphan in orphans))
        say(console, f"Where a checkpoint was moved, keep its pages: pagoda gc {_listed(directories)} --keep PATH")
        if not (config.yes or _agrees(f"Delete these {len(orphans)}, {total} in all, for good? [y/N] ")):
            say(console, "nothing was deleted")
            return _DECLINED
        # A checkpoint may have been moved back since the user was asked. Then its pages are kept.
        orphans = [o for o in orphans if o.commit is None or why_orphaned(o.commit, keep)]
        partly = list(drop(orphans, directories))
        for store in partly:
            say(
                console,
                f"{store.name} keeps no checkpoint any more, but not all of it could be deleted: name all of its "
                f"directories (it was last used in {_listed(store.directories)}), and look what else is in them",
            )
        kept = {store.id for store in partly}
        deleted = sum(o.nbytes for o in orphans if o.commit is not None or o.store.id not in kept)
        say(console, f"deleted: {format_bytes(deleted)}")
    return 0


def _checkpoints_below(path: Path) -> Iterator[str]:
    """Ids of the checkpoints in a directory and below it, also where links lead."""

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise ConfigError(f"--keep {path}: {error.filename} cannot be read: {error.strerror}; nothing was deleted")

    ids: list[str] = []
    seen: set[str] = set()
    for place, folders, files in os.walk(path, onerror=refuse, followlinks=True):
        if (real := os.path.realpath(place)) in seen:  # links may lead in a circle
            folders.clear()
            continue
        seen.add(real)
        if MANIFEST in files and (id_ := checkpoint_id_of(Path(place))) is not None:
            ids.append(id_)
    if not ids:
        raise ConfigError(f"--keep {path}: there is no checkpoint at this path; nothing was deleted")
    yield from ids


def _described(orphan: Orphan) -> Iterator[str]:
    when = datetime.fromtimestamp(orphan.written).isoformat(" ", "seconds")
    if orphan.commit is None:
        yield f"store {orphan.store.folders[0]}, {when}, {format_bytes(orphan.nbytes)}: {orphan.why}"
    else:
        yield f"pages {orphan.store.commit_path(orphan.commit.commit)}, {when}, {format_bytes(orphan.nbytes)}"
        yield f"  of checkpoint {orphan.commit.checkpoint}: {orphan.why}"


def _agrees(question: str) -> bool:
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _listed(directories: Sequence[Path]) -> str:
    return " ".join(map(str, directories))
