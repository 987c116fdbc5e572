"""A region: pages of a memory tier for one purpose, whose use is decided elsewhere."""

import torch

from pagoda.memory.page import Run
from pagoda.memory.tier import MemoryTier


class Region:
    """Pages [0, pages), taken from a tier at once: for leases, or for gradient buffers."""

    def __init__(self, tier: MemoryTier, pages: int) -> None:
        self._tier = tier
        self._pages = tier.alloc(pages)
        self.page_bytes = tier.page_bytes

    def tensor(self, run: Run, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """The first `numel` elements of a run, shape [numel], with a storage object of their own."""
        return self._tier.tensor(self._pages, dtype, numel, run.start * self.page_bytes)

    def view(self, run: Run) -> memoryview:
        """The bytes of a run, writable."""
        return self._tier.view(self._pages, run.start * self.page_bytes, run.count * self.page_bytes)

    def poison(self, run: Run) -> None:
        """Nothing uses a run any more: in debug mode it holds NaN from now on."""
        if self._tier.poison:
            start = (self._pages.start + run.start) * self.page_bytes
            self._tier.arena.poison(start, run.count * self.page_bytes)
