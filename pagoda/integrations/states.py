"""Writes state and models into directories that a framework overwrites."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from pagoda.checkpoint.directory import remove
from pagoda.checkpoint.export import export
from pagoda.checkpoint.pretrained import INDEX, SINGLE
from pagoda.errors import CheckpointError
from pagoda.optimizer import PagedOptimizer


class States:
    """Numbered checkpoints in a directory: `NAME-1` and so on. The new one is complete before the old one is
    deleted."""

    def __init__(self, directory: Path, name: str = "pagoda") -> None:
        self._directory = directory
        self._name = re.compile(rf"{name}-(\d+)")
        self._new = f"{name}-{{}}"

    def save(self, optimizer: PagedOptimizer, agree: Callable[[str], str] = lambda name: name) -> str:
        """Save all state of an optimizer, and return the checkpoint's name. Every rank must call it. `agree` gives all
        ranks the first rank's name. Raises the errors of `save_checkpoint`."""
        self._directory.mkdir(parents=True, exist_ok=True)
        name = agree(self._new.format(max(self._numbers(), default=0) + 1))
        optimizer.save_checkpoint(self._directory / name)
        return name

    def newest(self) -> Path:
        """The last checkpoint. Raises CheckpointError if there is none."""
        numbers = self._numbers()
        if not numbers:
            raise CheckpointError(f"{self._directory} has no Pagoda checkpoint: it was saved without paging.")
        return self._directory / self._new.format(max(numbers))

    def keep_newest(self) -> None:
        """Delete all checkpoints except the last one."""
        for number in self._numbers()[:-1]:
            remove(self._directory / self._new.format(number))

    def _numbers(self) -> list[int]:
        names = [path.name for path in self._directory.iterdir()] if self._directory.is_dir() else []
        return sorted(int(found[1]) for name in names if (found := self._name.fullmatch(name)))


@contextmanager
def exported_into(directory: Path, model: nn.Module, **settings: Any) -> Iterator[None]:
    """Write a model's files in pieces. After the block, which may write other files in the directory, they replace
    older ones there. Every rank must call it. The settings and errors are those of `export`."""
    directory.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".pagoda-", dir=directory) as folder:
        export(model, Path(folder, "model"), **settings)
        yield
        for file in Path(folder, "model").glob("*"):
            os.replace(file, directory / file.name)
            if file.name == INDEX:  # a single file of an earlier save would be loaded instead of the shards
                (directory / SINGLE).unlink(missing_ok=True)
