"""The world: the processes that torchrun started, and this one's place among them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 600.0
"""Seconds that a rank waits for the others before it gives up, unless PAGODA_RANK_TIMEOUT says otherwise."""


@dataclass(frozen=True, slots=True)
class World:
    """This process among some of those that torchrun started, by default all; one of one without it."""

    rank: int = 0
    """This process's place among them."""
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    """Processes on this node, of consecutive ranks."""
    first: int = 0
    """Torchrun's number for the first of them."""
    apart: int = 1
    """How far their numbers are apart."""

    def number(self, rank: int) -> int:
        """Torchrun's number for one of them."""
        return self.first + rank * self.apart

    @property
    def nodes(self) -> int:
        return self.size // self.local_size


def launched() -> World:
    """The world that torchrun's environment describes."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return World(*(int(os.environ[name]) for name in names)) if all(name in os.environ for name in names) else World()


def was_restarted() -> bool:
    """Whether torchrun has started these processes anew, as some of them failed."""
    return _attempt() > 0


def may_be_restarted() -> bool:
    """Whether torchrun starts these processes anew if some of them fail."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


def rank_timeout_s() -> float:
    """Seconds that a rank waits for the others before it gives up."""
    return float(os.environ.get("PAGODA_RANK_TIMEOUT", TIMEOUT_S))


def computes_on(world: World) -> str:
    """Type of the device that each process has for itself: "cuda" where there are GPUs enough, else "cpu"."""
    return "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= world.local_size else "cpu"


def join(world: World) -> None:
    """Make the default process group of a world of several, gloo for the CPU and NCCL for GPUs; once is enough.

    Where each process of a node can have a GPU of its own, it gets that of its local rank.
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
    """Where the ranks of this attempt find each other: torchrun's own store, under a name of the attempt.

    torch (2.13) has one store for all attempts and tells them not apart, so ranks that were started anew would look for
    each other at the addresses of those that have ended.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    return dist.PrefixStore(f"attempt-{_attempt()}", store)  # type: ignore[attr-defined]


@contextmanager
def joined(world: World) -> Iterator[None]:
    """A process group of all ranks, for as long as this is open, unless there is one already."""
    mine = world.size > 1 and not dist.is_initialized()
    join(world)
    try:
        yield
    finally:
        if mine:
            dist.destroy_process_group()
