"""What a run may use of each tier: `Memory`."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pagoda.errors import ConfigError, StorageError
from pagoda.memory.page import PAGE_ALIGN, PAGE_BYTES
from pagoda.memory.ram import free_ram
from pagoda.memory.sizes import directory_and_size, parse_bytes
from pagoda.memory.ssd.record import bytes_of_stores
from pagoda.parallel.world import World
from pagoda.plan.options import Split
from pagoda.plan.placement import Budgets

HOST_SHARE = 0.8
"""Share of the RAM that is free now which a host budget left open may take; the rest is for activations."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """How much memory training state may use, per tier. Sizes are bytes or text such as "20GiB".

    Budgets cover pages: weights, gradients, optimizer state and the buffers they stream through. Activations and
    what torch allocates for them come on top.

    Raises ConfigError for a size, page size or device that cannot be used.
    """

    device: str | None = None
    """"SIZE": memory of the current CUDA GPU for pages, beside what activations need. None: compute is the CPU and
    reads weights in host RAM. "cpu:SIZE": a separate arena in RAM stands in for a GPU's memory."""
    host: str | int | None = None
    """Host RAM for pages; None takes 80% of what is free now, or of what control groups leave (a container's limit)."""
    ssd: str | os.PathLike[str] | None = None
    """"DIR" or "DIR:SIZE": a directory on an SSD, and how much of it to use (by default what is free). Several, with
    commas between them, share the pages out over their drives: "DIR1:SIZE1,DIR2:SIZE2", or "DIR1,DIR2:SIZE" with the
    size of all together. One optimizer at a time can use a directory."""
    page_size: str | int | None = None
    """Unit of allocation and movement, a multiple of 4096; None chooses the largest that wastes little, up to 4 MiB."""
    unit_limit: str | int | None = None
    """Most bytes of weights fetched together; None chooses."""
    split: Split | None = None
    """How host RAM is divided where not everything fits it; None chooses."""
    activations: str | int | None = None
    """What graphs may keep, beside pages, where compute runs; wrap(activations="auto") keeps to it. None takes 80% of
    what is free beside pages."""

    def __post_init__(self) -> None:
        self.budgets()
        _ = self.activation_bytes
        page = self.page_bytes
        if page is not None and (page % PAGE_ALIGN or page & (page - 1)):
            raise ConfigError(f"memory.page_size is {page}; it must be a power of two and a multiple of {PAGE_ALIGN}.")

    @property
    def page_bytes(self) -> int | None:
        return None if self.page_size is None else parse_bytes(self.page_size, "memory.page_size")

    @property
    def activation_bytes(self) -> int | None:
        return None if self.activations is None else parse_bytes(self.activations, "memory.activations")

    @property
    def unit_bytes(self) -> int | None:
        return None if self.unit_limit is None else parse_bytes(self.unit_limit, "memory.unit_limit")

    @property
    def ssd_directories(self) -> Mapping[Path, int | None]:
        """Directories of the SSD tier, with the most bytes of each, None for no limit; empty when there are none."""
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
        # Whole pages on every drive, so that what all hold is the sum of what each holds.
        page = self.page_bytes or PAGE_BYTES
        return {path: None if size is None else size // page * page for path, size in zip(paths, sizes, strict=True)}

    @property
    def torch_device(self) -> torch.device:
        """Where compute runs: the CPU, or the GPU that is current. Raises ConfigError when there is none."""
        if self.device is None or self.device.startswith("cpu:"):
            return torch.device("cpu")
        if not torch.cuda.is_available():
            raise ConfigError(
                f"memory.device is {self.device!r}, but torch finds no CUDA GPU here: leave it out to compute on the "
                "CPU, or use 'cpu:SIZE' for a separate arena that stands in for a GPU's memory."
            )
        return torch.device("cuda", torch.cuda.current_device())

    def of_rank(self, world: World) -> "Memory":
        """The same for one of several ranks: budgets left open are its share of what its node has, and its directories
        are below those given, made if need be."""
        host = self.host if self.host is not None else int(free_ram() * HOST_SHARE) // world.local_size
        parts = []
        for path, size in self.ssd_directories.items():
            mine = path / f"rank-{world.rank}"
            if size is None:
                size = _free_disk(path) // world.local_size
            try:
                mine.mkdir(exist_ok=True)
            except OSError as error:
                raise StorageError(f"The directory '{mine}' of a rank cannot be made: {error.strerror}.") from error
            parts.append(f"{mine}:{size}")
        return replace(self, host=host, ssd=",".join(parts) or None)

    def budgets(self) -> Budgets:
        """Bytes per tier; what was left open is read from the machine."""
        host = parse_bytes(self.host, "memory.host") if self.host is not None else int(free_ram() * HOST_SHARE)
        device = None
        if self.device is not None:
            size = self.device.removeprefix("cpu:")
            if not size[:1].isdigit():
                raise ConfigError(
                    f"memory.device is {self.device!r}; give SIZE, such as '20GiB' of a GPU's memory, or 'cpu:SIZE' "
                    "for an arena in RAM that stands in for one."
                )
            device = parse_bytes(size, "memory.device")
        if self.ssd is None:
            return Budgets(host, device)
        sizes = self.ssd_directories.items()
        return Budgets(host, device, sum(_free_disk(path) if size is None else size for path, size in sizes))


def _free_disk(directory: Path) -> int:
    """Bytes that page stores may take: what is free, and what those that are there have."""
    try:
        os.scandir(directory).close()  # disk_usage takes files too
        return shutil.disk_usage(directory).free + bytes_of_stores(directory)
    except OSError as error:
        raise StorageError(
            f"The SSD directory '{directory}' cannot be used: {error.strerror}. Create it, or change memory.ssd."
        ) from error
