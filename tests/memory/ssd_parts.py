"""What tests of the SSD tier share: patterned pages, and where a page lies on disk."""

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Self

from rich.console import Console

from pagoda.cli import gc, inspect
from pagoda.config.commands import GcConfig, InspectConfig
from pagoda.memory.arena import Arena
from pagoda.memory.identity import MANIFEST, new_checkpoint_id
from pagoda.memory.page import PageRun
from pagoda.memory.ssd.committed import open_commit
from pagoda.memory.ssd.tier import PageSnapshot, SSDTier

PAGE = 4096
RUN = PageRun(0, 4)
"""All pages of most tests."""
Reference = dict[str, Any]


class Tier(SSDTier):
    """A tier that ends with a block, and can keep every run that it has handed out as it is."""

    _runs: tuple[PageRun, ...] = ()

    def alloc(self, pages: int) -> PageRun:
        run = super().alloc(pages)
        self._runs = (*self._runs, run)
        return run

    def freeze_all(self) -> PageSnapshot:
        frozen = self.snapshot()
        for run in self._runs:
            frozen.add(run)
        return frozen

    def commit(self, checkpoint: Path) -> Reference:
        """Commit every run for a checkpoint, which is there then."""
        with closing(self.freeze_all()) as frozen:
            return frozen.commit(*make_checkpoint(checkpoint))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def pattern(pages: int, seed: int) -> memoryview:
    """Whole pages of bytes that differ with seed and place."""
    view = Arena(pages * PAGE).view(0, pages * PAGE)
    view[:] = bytes((seed * 37 + k // PAGE + k) % 251 for k in range(pages * PAGE))
    return view


def loaded(tier: SSDTier, run: PageRun) -> memoryview:
    """A whole run, as it reads now."""
    into = Arena(run.count * PAGE).view(0, run.count * PAGE)
    tier.load(run, 0, into)
    return into


def kept(directories: Sequence[Path], *checkpoints: Path, pages: int = 4, spare: int = 8) -> list[Reference]:
    """What refers to `pattern(pages, 1)` in the first checkpoint, and so on, in a store that is closed again."""
    with Tier(dict.fromkeys(directories), pages, PAGE, spare) as tier:
        run, found = tier.alloc(pages), []
        for seed, checkpoint in enumerate(checkpoints, 1):
            tier.store(run, 0, pattern(pages, seed))
            found.append(tier.commit(checkpoint))
        return found


def committed(reference: Reference, run: PageRun, directories: Sequence[Path] = ()) -> memoryview:
    """A whole run, as a commit has it."""
    into = Arena(run.count * PAGE).view(0, run.count * PAGE)
    with closing(open_commit(reference, directories)) as pages:
        pages.load(run, 0, into)
    return into


def run_gc(directory: Path) -> int:
    """`pagoda gc DIR --yes`, without parsing that, which takes longer than all else; its exit code."""
    return gc.run(GcConfig(directories=(directory,), yes=True), Console(quiet=True))


def run_inspect(directory: Path, verify: bool = False) -> int:
    """`pagoda inspect DIR`, likewise."""
    return inspect.run(InspectConfig(directory=directory, verify=verify), Console(quiet=True))


def names(directory: Path) -> list[str]:
    """Every file and folder below a directory."""
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def make_directory(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def make_checkpoint(directory: Path) -> tuple[Path, str]:
    """A checkpoint directory and its id, so that what is committed for it is not taken for an orphan."""
    checkpoint_id = new_checkpoint_id()
    make_directory(directory)
    (directory / MANIFEST).write_text(json.dumps({"id": checkpoint_id}))
    return directory, checkpoint_id
