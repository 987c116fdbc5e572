"""The world: the processes that torchrun started, and this process's rank."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 600.0
"""Seconds that a rank waits for the others before it gives up. PAGODA_RANK_TIMEOUT overrides it."""


@dataclass(frozen=True, slots=True)
class World:
    """This process and others that torchrun started, by default all of them. Without torchrun, a world of one
    process."""

    rank: int = 0
    """This process's index among them."""
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    """The number of processes on this node, which have consecutive ranks."""
    first: int = 0
    """The global rank (torchrun's RANK) of the first process."""
    apart: int = 1
    """The distance between the global ranks of neighbours."""

    def global_rank(self, rank: int) -> int:
        """The global rank of a rank of this world."""
        return self.first + rank * self.apart

    @property
    def nodes(self) -> int:
        return self.size // self.local_size


def launched() -> World:
    """The world that torchrun's environment describes."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return World(*(int(os.environ[name]) for name in names)) if all(name in os.environ for name in names) else World()


def was_restarted() -> bool:
    """Whether torchrun has restarted these processes because some of them failed."""
    return _attempt() > 0


def may_be_restarted() -> bool:
    """Whether torchrun restarts these processes if some of them fail."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


def rank_timeout_s() -> float:
    """Seconds that a rank waits for the others before it gives up."""
    return float(os.environ.get("PAGODA_RANK_TIMEOUT", TIMEOUT_S))


def computes_on(world: World) -> str:
    """The type of each process's own device: "cuda" if there are enough GPUs, otherwise "cpu"."""
    return "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= world.local_size else "cpu"


def join(world: World) -> None:
    """Create the default process group if the world has several processes: gloo for the CPU and NCCL for GPUs. Later
    calls do nothing.

    If each process of a node can have its own GPU, it gets the GPU of its local rank.
    """
    if world.size > 1 and not dist.is_initialized():
        if computes_on(world) == "cuda":
            torch.cuda.set_device(world.local_rank)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        timeout = timedelta(seconds=rank_timeout_s())
        if was_restarted() and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
            store = _store_of_attempt(timeout)
            dist.init_process_group(backend, timeout=timeout, store=store, rank=world.rank, world_size=world.size)
        else:
            dist.init_process_group(backend, timeout=timeout)


def _attempt() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _store_of_attempt(timeout: timedelta) -> Any:
    """The store in which the ranks of this attempt find each other: torchrun's own store, with a prefix for the
    attempt.

    torch (2.13) uses one store for all attempts and does not distinguish them. Without the prefix, restarted ranks
    would look for each other at the addresses of ranks that have ended.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    return dist.PrefixStore(f"attempt-{_attempt()}", store)  # type: ignore[attr-defined]


@contextmanager
def joined(world: World) -> Iterator[None]:
    """A context in which a process group of all ranks exists. Creates one if there is none."""
    mine = world.size > 1 and not dist.is_initialized()
    join(world)
    try:
        yield
    finally:
        if mine:
            dist.destroy_process_group()
