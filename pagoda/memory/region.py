"""A region: consecutive pages of an arena."""

from dataclasses import dataclass, field
from typing import Self

import torch

from pagoda.memory.arena import Arena
from pagoda.memory.page import PageRun


@dataclass(eq=False)
class Region:
    """Pages [start, start + count) of an arena, for one purpose or not yet divided.

    The layout is decided when a run is set up: `take` permanently allocates pages one after another. Pages whose use
    changes during a step have a region of their own, and the scheduler decides what each `part` of it is used for.

    NOT thread-safe for `take`. Everything else is thread-safe.
    """

    name: str
    """For messages."""
    arena: Arena
    page_bytes: int
    start: int
    count: int
    poisoned: bool = False
    """The debug mode, in which unused pages hold NaN (0xFF bytes). It reveals leases that are used after their end."""
    _taken: int = field(default=0, init=False)

    @classmethod
    def of(cls, name: str, arena: Arena, page_bytes: int, *, poison: bool = False) -> Self:
        """All whole pages of an arena. With `poison`, touches all the memory at once."""
        region = cls(name, arena, page_bytes, 0, arena.nbytes // page_bytes, poison)
        region.poison()
        return region

    @property
    def nbytes(self) -> int:
        return self.count * self.page_bytes

    def take(self, pages: int) -> "Region":
        """Take the next free pages. Raises ValueError if there are too few."""
        self._taken += pages
        return self.part(PageRun(self._taken - pages, pages))

    def part(self, run: PageRun) -> "Region":
        """The pages of a run, counted from this region's first page. Raises ValueError if they are not in the
        region."""
        if run.start < 0 or run.count < 0 or run.stop > self.count:
            raise ValueError(f"{run} is not inside the {self.count} pages of tier {self.name!r}")
        return Region(self.name, self.arena, self.page_bytes, self.start + run.start, run.count, self.poisoned)

    def tensor(self, dtype: torch.dtype, numel: int | None = None, offset: int = 0) -> torch.Tensor:
        """`numel` elements (all by default) at byte `offset`, shape [numel], with a storage object of their own.

        Raises ValueError if they are not in the region, or the offset is not a multiple of the element size.
        """
        numel = (self.nbytes - offset) // dtype.itemsize if numel is None else numel
        self._check(offset, numel * dtype.itemsize)
        return self.arena.tensor(self.start * self.page_bytes + offset, numel, dtype)

    def view(self, offset: int = 0, nbytes: int | None = None) -> memoryview:
        """The bytes [offset, offset + nbytes) (all by default), writable. Raises ValueError if they are not in the
        region."""
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
                f"{nbytes} bytes at offset {offset} are not inside the {self.nbytes} bytes of tier {self.name!r}"
            )
