"""Checkpoints of Pagoda inside directories that a framework overwrites."""

import re
from collections.abc import Callable
from pathlib import Path

from pagoda.checkpoint.directory import remove
from pagoda.errors import CheckpointError
from pagoda.optimizer import PagedOptimizer


class States:
    """Numbered checkpoints in a directory, `NAME-1` and so on: the new one is complete before the old one goes."""

    def __init__(self, directory: Path, name: str = "pagoda") -> None:
        self._directory = directory
        self._name = re.compile(rf"{name}-(\d+)")
        self._new = f"{name}-{{}}"

    def save(self, optimizer: PagedOptimizer, agree: Callable[[str], str] = lambda name: name) -> str:
        """Save all state of an optimizer; its name in the directory. On several ranks each calls it, and `agree` gives
        all of them what the first rank has. Raises as `save_checkpoint`."""
        self._directory.mkdir(parents=True, exist_ok=True)
        name = agree(self._new.format(max(self._numbers(), default=0) + 1))
        optimizer.save_checkpoint(self._directory / name)
        return name

    def newest(self) -> Path:
        """The last one. Raises CheckpointError where there is none."""
        numbers = self._numbers()
        if not numbers:
            raise CheckpointError(f"{self._directory} has no state of Pagoda: it was saved without paging.")
        return self._directory / self._new.format(max(numbers))

    def keep_newest(self) -> None:
        """Delete all but the last one."""
        for number in self._numbers()[:-1]:
            remove(self._directory / self._new.format(number))

    def _numbers(self) -> list[int]:
        names = [path.name for path in self._directory.iterdir()] if self._directory.is_dir() else []
        return sorted(int(found[1]) for name in names if (found := self._name.fullmatch(name)))
