"""Settings that several commands share."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from pagoda.errors import ConfigError
from pagoda.memory.page import PAGE_ALIGN
from pagoda.memory.sizes import parse_bytes
from pagoda.plan.batch_tiles import BatchTiles

if TYPE_CHECKING:
    from pagoda.tiers import Memory

PlanMode = Literal["usual", "search"]
"""Whether a run takes the planner's first choice, or the fastest of several plans by simulation."""
_Size = Annotated[str | None, tyro.conf.arg(metavar="SIZE")]


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """Where training state may live and how much of it. Sizes read like 20GiB (1024s) or 20GB (1000s)."""

    device: _Size = None
    """Memory for weights in use: a size on the GPU, or cpu:SIZE for a CPU arena that stands in for one."""
    host: _Size = None
    """RAM for training state. By default chosen from what is free."""
    ssd: Annotated[str | None, tyro.conf.arg(metavar="DIR[:SIZE][,DIR[:SIZE]...]")] = None
    """Existing directory for the state that does not fit RAM, with an optional limit. Several share it out over their
    drives: each with a limit, or the last with that of all."""
    page_size: _Size = None
    """Bytes per page. By default chosen by the planner."""
    unit_limit: _Size = None
    """Largest weights fetched together. By default chosen by the planner."""
    activations: _Size = None
    """What --activations auto may keep where compute runs. By default 80% of what is free beside the pages."""

    def build(self) -> "Memory":
        """The library's memory description.

        Raises:
            ConfigError: a size or directory that cannot be used.
        """
        from pagoda.tiers import Memory

        return Memory(
            device=self.device,
            host=self.host,
            ssd=self.ssd,
            page_size=self.page_size,
            unit_limit=self.unit_limit,
            activations=self.activations,
        )


@dataclass(frozen=True, kw_only=True)
class StatesConfig:
    """Settings of an optimizer that may decide what it keeps."""

    options: tuple[str, ...] = ()
    """Other settings of the optimizer, as NAME=VALUE: momentum=0.9 nesterov=true."""
    moments: Literal["fp32", "bf16", "8bit"] = "fp32"
    """What AdamW's moments are kept in: fp32 (exact, 8 bytes a parameter), bf16 (stochastically rounded, 4), or 8bit
    (quantized in blocks of 256, 2). The last two change the algorithm."""


def check_batch_tiles(tiles: BatchTiles | None) -> None:
    """Raises ConfigError for a count that is none."""
    if isinstance(tiles, int):
        require(tiles >= 1, "batch_tiles", tiles, "must be at least 1, or auto")


def check_tile_limit(limit: str | None) -> None:
    """Raises ConfigError for a size that is none, or so small that a tile would have nothing in it."""
    if limit is not None:
        require(
            parse_bytes(limit, "tile_limit") >= PAGE_ALIGN, "tile_limit", limit, f"must be at least {PAGE_ALIGN} bytes"
        )


def require(holds: bool, name: str, value: object, rule: str) -> None:
    """Raises ConfigError, naming the setting's flag, unless `holds`."""
    if not holds:
        raise ConfigError(f"{flag(name)} is {value}: it {rule}")


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")
