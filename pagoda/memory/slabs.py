"""A page pool for contiguous leases of unequal size, free of external fragmentation."""

from collections.abc import Callable

import torch

from pagoda.memory.page import Run
from pagoda.memory.pool import PagePool
from pagoda.memory.tier import MemoryTier


class SlabPool:
    """Frames [0, frames) cut into slabs of `slab` frames, the size of the largest lease.

    A run never straddles two slabs, so pinned runs that touch k slabs leave every other slab usable by any
    lease: whoever has one slab more than it pins at once can always make room. Frames beyond the last whole
    slab form a smaller one. Pure bookkeeping, like PagePool, and used by planner and runtime alike.
    """

    def __init__(self, frames: int, slab: int) -> None:
        if slab <= 0 or frames < slab:
            raise ValueError(f"a slab pool of {frames} frames cannot hold a slab of {slab}")
        self.frames = frames
        self.slab = slab
        self._pools = [PagePool(min(slab, frames - first), first) for first in range(0, frames, slab)]
        self.in_use = 0
        self.peak = 0

    def alloc(self, count: int) -> Run | None:
        """`count` contiguous frames inside one slab, from the fullest slab that has them; None if there are none."""
        best = min(
            (pool for pool in self._pools if pool.largest_free >= count),
            key=lambda pool: pool.frames - pool.in_use,
            default=None,
        )
        if best is None:
            return None
        run = best.alloc(count)
        self.in_use += count
        self.peak = max(self.peak, self.in_use)
        return run

    def free(self, run: Run) -> None:
        """Give a run back."""
        self._pools[run.start // self.slab].free(run)
        self.in_use -= run.count

    def cheapest_window(self, count: int, price: Callable[[Run], float | None]) -> list[Run] | None:
        """Which runs to free so that `count` frames adjoin: the window whose dearest run is cheapest.

        `price` gives what evicting a run costs, None for a pinned one. None when no window can be had.
        """
        best: tuple[tuple[float, int], list[Run]] | None = None
        for pool in self._pools:
            if pool.frames < count:
                continue
            victims = pool.cheapest_window(count, price)
            if victims is None:
                continue
            prices = [price(run) or 0.0 for run in victims]
            cost = (max(prices, default=float("-inf")), sum(run.count for run in victims))
            if best is None or cost < best[0]:
                best = (cost, victims)
        return None if best is None else best[1]


class SlabRegion:
    """A slab pool over pages carved from a memory tier: leases and staging buffers with a fixed quota.

    Not thread-safe: its owner serialises calls.
    """

    def __init__(self, tier: MemoryTier, pages: int, slab: int) -> None:
        self._tier = tier
        self._region = tier.alloc(pages)
        self.pool = SlabPool(pages, slab)
        self.page_bytes = tier.page_bytes

    @property
    def peak_bytes(self) -> int:
        return self.pool.peak * self.page_bytes

    def tensor(self, run: Run, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """The first `numel` elements of a run, shape [numel], with a storage object of their own."""
        return self._tier.tensor(self._region, dtype, numel, run.start * self.page_bytes)

    def view(self, run: Run, offset: int, nbytes: int) -> memoryview:
        """The bytes [offset, offset + nbytes) of a run, writable."""
        return self._tier.view(self._region, run.start * self.page_bytes + offset, nbytes)

    def free(self, run: Run) -> None:
        """Give a run back, poisoned in debug mode."""
        if self._tier.poison:
            start = (self._region.start + run.start) * self.page_bytes
            self._tier.arena.poison(start, run.count * self.page_bytes)
        self.pool.free(run)
