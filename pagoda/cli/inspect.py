"""`pagoda inspect`: shows the page stores or checkpoints in a directory, and verifies that nothing is damaged."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
from rich.console import Console

from pagoda.checkpoint.reader import SavedCheckpoint
from pagoda.config.commands import InspectConfig
from pagoda.console import say
from pagoda.errors import CheckpointError, ConfigError, StorageError
from pagoda.memory.identity import MANIFEST, STATE
from pagoda.memory.sizes import format_bytes
from pagoda.memory.ssd.commits import Commit
from pagoda.memory.ssd.committed import CommittedPages
from pagoda.memory.ssd.orphans import why_orphaned
from pagoda.memory.ssd.record import StoreRecord, stores_in, unknown_in
from pagoda.train.run_dir import RunCheckpoint, RunDir

_DAMAGED = 1


def run(config: InspectConfig, console: Console) -> int:
    """Show the directory's content, and verify it if the user asks for that. Returns the exit code."""
    if not config.directory.is_dir():
        what = "of a run, of a checkpoint, or of pages (--memory.ssd)"
        raise ConfigError(f"{config.directory} is not a directory: name the one {what}")
    for inner in (config.directory, config.directory / STATE):
        if (inner / MANIFEST).exists():
            return _DAMAGED if _show_checkpoint(inner, config.verify, console) else 0
    checkpoints = RunDir(config.directory).all_checkpoints()
    if checkpoints:
        found = sum(_show_checkpoint(c.state, config.verify, console) for c in checkpoints)
        found += sum(_show_seal(c, console) for c in checkpoints) if config.verify else 0
        return _DAMAGED if found else 0
    damaged = 0
    stores = stores_in(config.directory)
    for record, stripe in stores:
        damaged += _show(record, stripe, config.verify, console)
    say(console, *unknown_in(config.directory))
    if not stores:
        say(console, f"no page store and no checkpoint in {config.directory}")
    return _DAMAGED if damaged else 0


def _show_checkpoint(directory: Path, verify: bool, console: Console) -> int:
    """Print one checkpoint. Returns the number of its damaged tensors, or 1 if it cannot be read at all."""
    try:
        with SavedCheckpoint(directory) as checkpoint:
            say(console, f"checkpoint {directory}: {max(checkpoint.manifest['steps'].values(), default=0)} updates")
            for state in (*checkpoint.states, *checkpoint.apart):
                specs = checkpoint.specs(state).values()
                on_ssd = checkpoint.pages.tensors.get(state, {}) if checkpoint.pages else {}
                size = format_bytes(sum(spec.nbytes for spec in specs))
                say(console, f"  {state}: {len(specs)} tensors, {size}; {len(on_ssd)} are pages on SSD")
            found = list(checkpoint.damage()) if verify else []
    except CheckpointError as error:
        found = [str(error)]
    return _report(console, "  ", found, "every tensor is as it was written" if verify else None)


def _show_seal(checkpoint: RunCheckpoint, console: Console) -> int:
    """Print what is wrong with the trainer's files of a checkpoint. Returns 1 if something is."""
    from pagoda.integrations import seals

    try:
        seals.check(checkpoint.path)
    except CheckpointError as error:
        say(console, f"  {error}")
        return 1
    return 0


def _show(record: StoreRecord, stripe: int, verify: bool, console: Console) -> int:
    """Print one store. Returns the number of its damaged pages and page tables."""
    slots, page = sum(map(sum, record.portions)), record.page_bytes
    where = f", stripe {stripe + 1} of {len(record.directories)}" if len(record.directories) > 1 else ""
    say(console, f"store {record.id}{where}: {slots} slots of {format_bytes(page)}")
    if stripe:
        say(console, f"  its page tables are in {record.folders[0]}")
        return 0
    try:
        names = record.commit_ids()
    except StorageError as error:
        say(console, f"  {error}")
        return 1
    damaged, kept = 0, []
    for name in names:
        try:
            commit = record.read_commit(name)
        except StorageError as error:
            damaged += 1
            say(console, f"  {error}")
            continue
        kept.append(commit.table.written)
        gone = "" if why_orphaned(commit) is None else " (missing: see pagoda gc)"
        size = format_bytes(len(commit.table.written) * page)
        say(console, f"  commit {name}: {size} of {commit.checkpoint}{gone}")
        if verify:
            damaged += _verify(record, commit, console)
    pinned = len(np.unique(np.concatenate(kept))) if kept else 0
    free = f"{format_bytes((slots - pinned) * page)} free or in use by a running process"
    say(console, f"  {format_bytes(pinned * page)} kept by commits, {free}")
    return damaged


def _verify(record: StoreRecord, commit: Commit, console: Console) -> int:
    """Read every page of a commit and print the damaged ones. Returns their number."""
    try:
        with closing(CommittedPages(record, commit)) as pages:
            found = list(pages.damaged())
    except StorageError as error:
        found = [str(error)]
    return _report(console, "    ", found, "every page is as it was written")


def _report(console: Console, indent: str, found: Sequence[str], fine: str | None) -> int:
    """Print what is damaged and how many things are. If nothing is, print `fine` (None: print no summary). Returns the
    number."""
    say(console, *(indent + what for what in found))
    if fine is not None:
        say(console, indent + (f"{len(found)} damaged" if found else fine))
    return len(found)
