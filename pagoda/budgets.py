"""The memory that this machine gives to a run: budgets, the device for compute, and each rank's share."""

import errno
import os
import shutil
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from pagoda.config.memory import Memory
from pagoda.errors import ConfigError, StorageError
from pagoda.memory.files import storage_errors
from pagoda.memory.ram import filesystem_in_ram, free_ram
from pagoda.memory.ssd.record import bytes_of_stores
from pagoda.mesh.world import World
from pagoda.plan.second_placement import SecondPlacement
from pagoda.plan.tiers import Budgets

HOST_SHARE = 0.8
"""Share of the free RAM that an open host budget may take. Activations need the rest."""


def budgets_of(memory: Memory) -> Budgets:
    """Bytes per tier. Open budgets are read from the machine.

    Raises StorageError for an SSD directory that cannot be used.
    """
    host = int(free_ram() * HOST_SHARE) if memory.host_bytes is None else memory.host_bytes
    return Budgets(host, memory.device_pages, ssd_budget(memory))


def second_placement(memory: Memory, first: Budgets) -> SecondPlacement | None:
    """When homes are chosen again, and from what. None if they stay. `first`: the budgets of all ranks."""
    if memory.adapt_after is None:
        return None
    host = int(first.host / HOST_SHARE) if memory.host is None else None
    return SecondPlacement(memory.adapt_after, memory.device_bytes, host)


def ssd_budget(memory: Memory, ranks: int = 1) -> int | None:
    """Bytes of the SSD tier of one of several ranks that share the drives, or None if there is none. A size that was
    given is that of each rank. Raises StorageError for a directory that cannot be used, and warns of one in RAM."""
    sizes = memory.ssd_directories.items()
    for path, _ in sizes:
        _warn_if_in_ram(path)
    return sum(_free_disk(path) // ranks if size is None else size for path, size in sizes) if sizes else None


def compute_device(memory: Memory) -> torch.device:
    """Where compute runs: the CPU, or the current GPU. Raises ConfigError if there is none."""
    if memory.device is None or memory.arena_for_device:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"memory.device is {memory.device!r}, but torch finds no CUDA GPU here: leave it out to compute on the "
            "CPU, or use 'cpu:SIZE' for a separate arena that stands in for a GPU's memory."
        )
    return torch.device("cuda", torch.cuda.current_device())


def memory_of_rank(memory: Memory, world: World) -> Memory:
    """The memory of one of several ranks. An open budget is its share of the node. Its directories are created below
    the given ones. With several nodes, checkpoints are not kept in place unless the user asked for it."""
    host = memory.host if memory.host is not None else int(free_ram() * HOST_SHARE) // world.local_size
    sizes = {
        path: _free_disk(path) // world.local_size if size is None else size
        for path, size in memory.ssd_directories.items()
    }
    ssd = own_directories(sizes, f"rank-{world.rank}") or None
    kept = memory.ssd_checkpoints
    if kept is None and world.nodes > 1:
        kept = 0  # other nodes may have drives that nobody else sees
    return replace(memory, host=host, ssd=ssd, ssd_checkpoints=kept)


def own_directories(sizes: Mapping[Path, int | None], name: str) -> str:
    """`memory.ssd` with a directory of this name, which is made, in each of these. Raises StorageError, and ConfigError
    if one has a share of no page."""
    for path, size in sizes.items():
        mine = path / name
        if size == 0:
            raise ConfigError(f"memory.ssd leaves '{mine}' less than a page: give '{path}' a larger size")
        with storage_errors(f"The directory '{mine}' cannot be used"):
            mine.mkdir(exist_ok=True)
            if mine.is_symlink():
                raise OSError(errno.ELOOP, "it is a symbolic link", str(mine))
    return as_setting({path / name: size for path, size in sizes.items()})


def as_setting(sizes: Mapping[Path, int | None]) -> str:
    """`memory.ssd` for these directories, with the bytes of each."""
    return ",".join(str(path) if size is None else f"{path}:{size}" for path, size in sizes.items())


def _warn_if_in_ram(directory: Path) -> None:
    with suppress(OSError):  # `_free_disk` raises it
        if (kind := filesystem_in_ram(directory)) is not None:
            warnings.warn(
                f"memory.ssd: the directory '{directory}' is in RAM (its filesystem is {kind}), so its pages take RAM "
                "in addition to memory.host. Name a directory on a drive, or raise memory.host instead.",
                stacklevel=2,
            )


def _free_disk(directory: Path) -> int:
    """Bytes that page stores may take: the free bytes, and the bytes of existing stores."""
    try:
        os.scandir(directory).close()  # disk_usage takes files too
        return shutil.disk_usage(directory).free + bytes_of_stores(directory)
    except OSError as error:
        raise StorageError(
            f"The SSD directory '{directory}' cannot be used: {error.strerror}. Create it, or change memory.ssd."
        ) from error
