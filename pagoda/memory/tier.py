"""A tier: a pool of pages over the bytes that hold them, in RAM here and on SSD in `ssd/tier.py`."""

import threading

import torch

from pagoda.errors import BudgetError, ConfigError
from pagoda.memory.arena import Arena
from pagoda.memory.page import Run
from pagoda.memory.pool import PagePool
from pagoda.memory.sizes import format_bytes


class Tier:
    """Pages that can be allocated, used and freed, by any thread.

    Invariants: `in_use_bytes <= peak_bytes <= capacity_bytes`, always; a run is touched only between `alloc`
    and `free` (every call checks that exactly this run is allocated).
    """

    def __init__(self, name: str, page_bytes: int, frames: int) -> None:
        self.name = name
        self.page_bytes = page_bytes
        self._pool = PagePool(frames)
        self._lock = threading.Lock()

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all pages."""
        return self._pool.frames * self.page_bytes

    @property
    def in_use_bytes(self) -> int:
        """Bytes of the pages allocated now."""
        return self._pool.in_use * self.page_bytes

    @property
    def peak_bytes(self) -> int:
        """Most bytes in use at once since creation."""
        return self._pool.peak * self.page_bytes

    def alloc(self, pages: int) -> Run:
        """`pages` contiguous pages, now. Raises BudgetError, naming the tier, when none are free."""
        with self._lock:
            run = self._pool.alloc(pages)
            if run is None:
                raise BudgetError(self._shortage(pages))
            return run

    def free(self, run: Run) -> None:
        """Give back a run. Raises ValueError when exactly this run is not allocated."""
        with self._lock:
            self._pool.free(run)

    def _check_allocated(self, run: Run) -> None:
        with self._lock:
            self._pool.check(run)

    def _check(self, run: Run, offset_bytes: int, nbytes: int) -> None:
        self._check_allocated(run)
        if offset_bytes < 0 or nbytes < 0 or offset_bytes + nbytes > run.count * self.page_bytes:
            raise ValueError(
                f"asked for {nbytes} bytes at offset {offset_bytes} of {run} in tier {self.name!r}, "
                f"which holds {run.count * self.page_bytes}"
            )

    def _shortage(self, pages: int) -> str:
        return (
            f"tier {self.name!r} has no {pages} contiguous pages free "
            f"({format_bytes(pages * self.page_bytes)} asked; {format_bytes(self.capacity_bytes)} in all, "
            f"{format_bytes(self.in_use_bytes)} in use, longest free run {self._pool.largest_free} pages); "
            "free or evict pages first, or give this tier more memory"
        )


class MemoryTier(Tier):
    """Pages in an arena. Frame i is the bytes [i * page_bytes, (i + 1) * page_bytes) of the arena."""

    def __init__(self, name: str, arena: Arena, page_bytes: int, *, poison: bool = False) -> None:
        """All whole pages of `arena`.

        `poison` is the debug mode in which every page not in use holds NaN (0xFF bytes), from the start and
        again after each `free`: a lease used after its end then shows. It touches all the memory at once.

        Raises ConfigError when the arena is smaller than one page.
        """
        frames = arena.nbytes // page_bytes
        if frames < 1:
            raise ConfigError(
                f"tier {name!r} has {format_bytes(arena.nbytes)}, less than one page of "
                f"{format_bytes(page_bytes)}; give it more memory or make pages smaller"
            )
        super().__init__(name, page_bytes, frames)
        self.arena = arena
        self.poison = poison
        if poison:
            arena.poison(0, self.capacity_bytes)

    def tensor(self, run: Run, dtype: torch.dtype, numel: int, offset_bytes: int = 0) -> torch.Tensor:
        """`numel` elements at byte `offset_bytes` of `run`, shape [numel], with their own storage object.

        Raises ValueError when they leave the run, or the offset is not a multiple of the element size.
        """
        self._check(run, offset_bytes, numel * dtype.itemsize)
        return self.arena.tensor(run.start * self.page_bytes + offset_bytes, numel, dtype)

    def view(self, run: Run, offset: int, nbytes: int) -> memoryview:
        """Bytes [offset, offset + nbytes) of `run`, writable. Raises ValueError when they leave the run."""
        self._check(run, offset, nbytes)
        return self.arena.view(run.start * self.page_bytes + offset, nbytes)

    def free(self, run: Run) -> None:
        """Give back a run, poisoned in debug mode. Raises ValueError unless exactly this run is allocated."""
        if self.poison:
            # Only what is really allocated, and before another thread can own it.
            self._check_allocated(run)
            self.arena.poison(run.start * self.page_bytes, run.count * self.page_bytes)
        super().free(run)
