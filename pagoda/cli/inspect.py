"""`pagoda inspect`: what page stores keep in a directory on an SSD, and whether it is still what was written."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from rich.console import Console

from pagoda.errors import ConfigError, StorageError
from pagoda.memory.commits import Commit, StoreRecord, stores_in
from pagoda.memory.committed import CommittedPages
from pagoda.memory.sizes import format_bytes

_DAMAGED = 1


@dataclass(frozen=True, kw_only=True)
class InspectConfig:
    """Show the page stores in a directory on an SSD: their commits, the checkpoints these belong to, and space."""

    directory: Annotated[Path, tyro.conf.Positional]
    """Directory that --memory.ssd named."""
    verify: bool = False
    """Read every committed page and report those that are not what was written; then the exit code is 1."""


def run_inspect(config: InspectConfig, console: Console) -> int:
    """Shows what is there, verifies it if asked to, and returns the exit code."""
    if not config.directory.is_dir():
        raise ConfigError(f"{config.directory} is not a directory")
    damaged = 0
    stores = stores_in(config.directory)
    for record, stripe in stores:
        damaged += _show(record, stripe, config.verify, console)
    if not stores:
        _say(console, f"no page store in {config.directory}")
    return _DAMAGED if damaged else 0


def _show(record: StoreRecord, stripe: int, verify: bool, console: Console) -> int:
    """Prints one store; returns how many of its pages and page tables are damaged."""
    slots, page = sum(map(sum, record.portions)), record.page_bytes
    where = f", stripe {stripe + 1} of {len(record.directories)}" if len(record.directories) > 1 else ""
    _say(console, f"store {record.id}{where}: {slots} slots of {format_bytes(page)}")
    if stripe:
        _say(console, f"  its page tables are in {record.folders[0]}")
        return 0
    tables: dict[str, Commit] = {}
    damaged = 0
    for name in record.commit_ids():
        try:
            tables[name] = Commit.read(record.commit_path(name))
        except StorageError as error:
            damaged += 1
            _say(console, f"  {error}")
    for name, commit in tables.items():
        gone = "" if Path(commit.checkpoint).exists() else " (gone)"
        size = format_bytes(len(commit.table.written) * page)
        _say(console, f"  commit {name}: {size} of {commit.checkpoint}{gone}")
        if verify:
            damaged += _verify(record, commit, console)
    _say(console, "  " + _space(tables, slots, page))
    return damaged


def _verify(record: StoreRecord, commit: Commit, console: Console) -> int:
    """Reads every page of a commit; prints the damaged ones and returns how many there are."""
    try:
        with CommittedPages(record, commit) as pages:
            found = list(pages.damaged())
    except StorageError as error:
        found = [str(error)]
    for what in found:
        _say(console, f"    {what}")
    _say(console, f"    {len(found)} damaged" if found else "    every page is as it was written")
    return len(found)


def _space(tables: Mapping[str, Commit], slots: int, page: int) -> str:
    kept = [commit.table.written for commit in tables.values()]
    pinned = len(np.unique(np.concatenate(kept))) if kept else 0
    return (
        f"{format_bytes(pinned * page)} kept by commits, {format_bytes((slots - pinned) * page)} free or in use by a "
        "running process"
    )


def _say(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, highlight=False, markup=False)
