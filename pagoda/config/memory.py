"""`Memory`: how much of each tier a run may use. `Split`: what a GPU updates and is home to."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from pagoda.config.settings import Settings, is_finite, require, require_count
from pagoda.errors import ConfigError
from pagoda.memory.page import PAGE_ALIGN, PAGE_BYTES
from pagoda.memory.sizes import directory_and_size, parse_bytes

Size = Annotated[str | int | None, tyro.conf.arg(metavar="SIZE")]
"""Bytes, or text such as "20GiB" (multiples of 1024) or "20GB" (multiples of 1000)."""


FIRST_SHARE = 0.5
"""Share of a device's memory that pages may take until it is known what else needs it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """What a GPU does besides computing. The planner's first choice is `Split(device_home_share=None)`. `pagoda train
    --plan search` tries others.

    Raises ConfigError for a share that is out of range.
    """

    device_update_share: float = 0.0
    """Largest share of the parameters that the GPU updates. Their states pass through it, block by block, while the CPU
    updates the others. Muon and `Optim` need 0 or 1, because their bits differ on a GPU."""
    device_home_share: float | None = 0.0
    """Largest share of the GPU's memory that is home to states and gradients, which are updated there. The memory that
    leases and the update ring need does not count. By itself, this makes the GPU home to whole units. With
    `device_update_share`, if RAM holds the rest, the GPU is home to weights first, then to gradients, then to moments
    of the parameters that it updates. None: it is home to whole units as far as all weights of the others can still be
    leased at once. If not all can, it is home to mostly frozen units, such as layers with adapters."""
    device_speculated_share: float = 0.75
    """Of the parameters that the GPU updates, the largest share that may have a second version of their weights there,
    so that they are updated before it is known whether gradients are clipped. A larger share keeps the link busy for
    more of backward; a smaller one leaves more of the GPU's memory to other states. By default, the rest passes during
    the next forward, which takes about a quarter of a step. It matters if both other shares are above 0. Parameters
    whose weights the GPU is not home to are not limited."""

    def __post_init__(self) -> None:
        for name in ("device_update_share", "device_home_share", "device_speculated_share"):
            share = getattr(self, name)
            in_range = is_finite(share) and 0 <= share <= 1
            open_ = share is None and name == "device_home_share"
            require(in_range or open_, f"split.{name}", share, "from 0 to 1")


@dataclass(frozen=True, kw_only=True)
class Memory(Settings):
    """Where training state may live, and how much of it. Sizes are bytes, or text: 20GiB (multiples of 1024) or 20GB
    (multiples of 1000).

    Budgets cover pages: weights, gradients, optimizer state and the buffers through which they pass. Activations that
    are not offloaded, and other memory of torch, come in addition. With several ranks, sizes are those of each rank,
    and the ranks of a node share what is left open.

    Raises ConfigError for a size, a page size or a device that cannot be used.
    """

    device: Annotated[str | None, tyro.conf.arg(metavar="SIZE")] = None
    """SIZE: compute on the current CUDA GPU, and use that much of its memory for pages. cpu:SIZE: compute on the CPU,
    with separate RAM in place of a GPU's memory, to test without a GPU. By default the CPU computes, with weights in
    host RAM. `pagoda train` takes the GPU's free memory by default, if there is a GPU."""
    host: Size = None
    """RAM for pages. By default 80% of the free RAM, or in a container, 80% of what its limit leaves free."""
    ssd: Annotated[str | Path | None, tyro.conf.arg(metavar="DIR[:SIZE][,DIR[:SIZE]...]")] = None
    """Existing directory on an SSD for the state that does not fit in RAM, and how much space to use. By default all
    free space. To spread pages over several drives, name a directory on each, separated by commas. Then give each a
    size, or give only the last one a size, which is the total of all. One optimizer at a time can use a directory."""
    page_size: Size = None
    """Size of a page: a power of two and a multiple of 4096. By default the largest that wastes little in padding, up
    to 4MiB."""
    unit_limit: Size = None
    """Most bytes of weights in a unit, which is fetched as a whole. By default the planner chooses."""
    embedding_limit: Size = None
    """Embeddings whose weights take more bytes than this are looked up on the CPU: rows go to the GPU, and their
    gradients come back, but never the weights. No other module may use these weights, and there must be one rank.
    Without a limit, this is done for embeddings that are larger than any other parameter, if the GPU cannot hold
    them. Only `nn.Embedding` counts, not `nn.EmbeddingBag`."""
    split: Annotated[Split | None, tyro.conf.Suppress] = None
    """What the GPU updates and is home to. By default the planner chooses."""
    activations: Size = None
    """With activations "auto": memory for activations, in addition to pages. By default 80% of what pages leave
    free."""
    adapt_after: int | None = None
    """Number of steps after which homes of states are chosen again, once, from what these steps have left free: the
    GPU then holds more states, or fewer. The size of `device` is then for everything on the GPU; until then pages take
    half of it. Without `host`, RAM is measured too. Later steps must need no more memory than these. No result changes.
    By default homes stay. `pagoda train` sets 2 if it chooses `device`."""
    ssd_checkpoints: Annotated[int | None, tyro.conf.Suppress] = None
    """Number of checkpoints that keep their pages on SSD instead of copying them. Training then writes to other pages,
    so each of these checkpoints takes as much SSD space as the weights and moments there. 0: every checkpoint copies
    the state on SSD. By default 1 if that fits, otherwise 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        several = "the path of a directory, or text with commas between several"
        require(isinstance(self.ssd, str | Path | None), "memory.ssd", self.ssd, several)
        require(isinstance(self.split, Split | None), "memory.split", self.split, "a pagoda.Split")
        _ = self.host_bytes, self.device_bytes, self.activation_bytes, self.unit_bytes, self.ssd_directories
        _ = self.embedding_bytes
        page = self.page_bytes
        if page is not None:
            fits = page > 0 and page % PAGE_ALIGN == 0 and page & (page - 1) == 0
            require(fits, "memory.page_size", page, f"a power of two and a multiple of {PAGE_ALIGN}")
        if self.adapt_after is not None:
            require_count("memory.adapt_after", self.adapt_after, 1)
        if self.ssd_checkpoints is not None:
            require_count("memory.ssd_checkpoints", self.ssd_checkpoints, 0)

    @property
    def host_bytes(self) -> int | None:
        return self._bytes("host")

    @property
    def page_bytes(self) -> int | None:
        return self._bytes("page_size")

    @property
    def activation_bytes(self) -> int | None:
        return self._bytes("activations")

    @property
    def unit_bytes(self) -> int | None:
        return self._bytes("unit_limit")

    @property
    def embedding_bytes(self) -> int | None:
        return self._bytes("embedding_limit")

    @property
    def arena_for_device(self) -> bool:
        """Whether an arena in RAM stands in for a GPU's memory."""
        return self.device is not None and self.device.startswith("cpu:")

    @property
    def device_bytes(self) -> int | None:
        if self.device is None:
            return None
        size = self.device.removeprefix("cpu:") if isinstance(self.device, str) else ""
        if not size[:1].isdigit():
            raise ConfigError(
                f"memory.device is {self.device!r}; give SIZE, such as '20GiB' of a GPU's memory, or 'cpu:SIZE' "
                "for an arena in RAM that stands in for one."
            )
        return parse_bytes(size, "memory.device")

    @property
    def device_pages(self) -> int | None:
        """Most bytes of the device for pages in the first steps."""
        whole = self.device_bytes
        return whole if whole is None or self.adapt_after is None else int(whole * FIRST_SHARE)

    @property
    def ssd_directories(self) -> Mapping[Path, int | None]:
        """Directories of the SSD tier -> most bytes, or None for no limit. Empty without an SSD tier."""
        if self.ssd is None:
            return {}
        parts = [directory_and_size(part) for part in os.fspath(self.ssd).split(",")]
        paths = [Path(directory) for directory, _ in parts]
        sizes = [parse_bytes(size, "memory.ssd") if size else None for _, size in parts]
        if not all(directory for directory, _ in parts) or len({path.resolve() for path in paths}) < len(paths):
            raise ConfigError(f"memory.ssd is {self.ssd!r}: name each directory once, with commas between them.")
        if len(parts) == 1:
            return dict(zip(paths, sizes, strict=True))
        if sizes[-1] is not None and not any(sizes[:-1]):
            sizes = [sizes[-1] // len(parts)] * len(parts)
        if any(sizes) and not all(sizes):
            raise ConfigError(
                f"memory.ssd is {self.ssd!r}: give every directory a size, or the last one the size of all, or none."
            )
        # Each drive holds whole pages, so that the total is the sum over drives.
        page = self.page_bytes or PAGE_BYTES
        return {path: None if size is None else size // page * page for path, size in zip(paths, sizes, strict=True)}

    def _bytes(self, name: str) -> int | None:
        size = getattr(self, name)
        return None if size is None else parse_bytes(size, f"memory.{name}")
