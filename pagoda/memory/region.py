"""A region: consecutive pages of an arena, all of it or a part."""

from dataclasses import dataclass, field
from typing import Self

import torch

from pagoda.memory.arena import Arena
from pagoda.memory.page import Run


@dataclass(eq=False)
class Region:
    """Pages [start, start + count) of an arena, for one purpose, or still to be divided among several.

    What lies where is decided when a run is set up: `take` hands pages out one after the other, for good. Pages whose
    use changes during a step are a region of their own, and the scheduler says which `part` of it is for what.

    NOT thread-safe as far as `take` goes; everything else is.
    """

    name: str
    """For messages."""
    arena: Arena
    page_bytes: int
    start: int
    count: int
    poisoned: bool = False
    """The debug mode in which pages that nothing uses hold NaN (0xFF bytes): a lease used after its end then shows."""
    _taken: int = field(default=0, init=False)

    @classmethod
    def of(cls, name: str, arena: Arena, page_bytes: int, *, poison: bool = False) -> Self:
        """All whole pages of an arena. With `poison` it touches all the memory at once."""
        region = cls(name, arena, page_bytes, 0, arena.nbytes // page_bytes, poison)
        region.poison()
        return region

    @property
    def nbytes(self) -> int:
        return self.count * self.page_bytes

    @property
    def address(self) -> int:
        """The address of the first byte."""
        return self.arena.address + self.start * self.page_bytes

    def take(self, pages: int) -> "Region":
        """The next pages that nobody has taken. Raises ValueError when there are too few."""
        self._taken += pages
        return self.part(Run(self._taken - pages, pages))

    def part(self, run: Run) -> "Region":
        """The pages of a run, which counts from this region's first page. Raises ValueError when they leave it."""
        if run.start < 0 or run.count < 0 or run.stop > self.count:
            raise ValueError(f"asked for {run} of {self.count} pages in tier {self.name!r}")
        return Region(self.name, self.arena, self.page_bytes, self.start + run.start, run.count, self.poisoned)

    def tensor(self, dtype: torch.dtype, numel: int | None = None, offset: int = 0) -> torch.Tensor:
        """`numel` elements at byte `offset`, all by default, shape [numel], with a storage object of their own.

        Raises ValueError when they leave the region, or the offset is not a multiple of the element size.
        """
        numel = (self.nbytes - offset) // dtype.itemsize if numel is None else numel
        self._check(offset, numel * dtype.itemsize)
        return self.arena.tensor(self.start * self.page_bytes + offset, numel, dtype)

    def view(self, offset: int = 0, nbytes: int | None = None) -> memoryview:
        """Bytes [offset, offset + nbytes), all by default, writable. Raises ValueError when they leave the region."""
        nbytes = self.nbytes - offset if nbytes is None else nbytes
        self._check(offset, nbytes)
        return self.arena.view(self.start * self.page_bytes + offset, nbytes)

    def poison(self) -> None:
        """In debug mode, fill these pages with NaN. Call it when they are no longer used."""
        if self.poisoned:
            self.arena.poison(self.start * self.page_bytes, self.nbytes)

    def _check(self, offset: int, nbytes: int) -> None:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(
                f"asked for {nbytes} bytes at offset {offset} of {self.nbytes} bytes in tier {self.name!r}"
            )
