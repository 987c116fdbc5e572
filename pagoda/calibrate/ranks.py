"""Several processes, where torchrun started them: who they are, and how fast they gather."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pagoda.calibrate.meter import Meter
from pagoda.plan.hardware import Figure, Hardware

_REPEATS = 5
_GPU_FACTOR = 16


@dataclass(frozen=True)
class Ranks:
    """This process among those that torchrun started; one of one without it."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1

    @property
    def nodes(self) -> int:
        return self.world // self.local_world


def launched() -> Ranks:
    """The ranks that torchrun's environment describes."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return Ranks(*(int(os.environ[name]) for name in names)) if all(name in os.environ for name in names) else Ranks()


@contextmanager
def joined(ranks: Ranks) -> Iterator[None]:
    """A process group of all ranks, for as long as this is open, unless there is one already."""
    if ranks.world == 1 or dist.is_initialized():
        yield
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def measure_collectives(meter: Meter, ranks: Ranks, device: torch.device) -> tuple[Figure | None, Figure | None]:
    """(inside the node, between nodes), None where there is nobody to talk to. Every rank must call it."""
    intra = inter = None
    if ranks.local_world > 1:
        meter.report(f"all-gather of {ranks.local_world} ranks in this node")
        node = ranks.rank // ranks.local_world
        groups = [range(n * ranks.local_world, (n + 1) * ranks.local_world) for n in range(ranks.nodes)]
        intra = meter.figure(_gathers(meter, groups, node, device), f"all-gather of {ranks.local_world} ranks")
    if ranks.nodes > 1:
        meter.report(f"all-gather of {ranks.nodes} nodes")
        # Every rank gathers with its like of other nodes, all at once: together they use all of a node's network.
        groups = [range(local, ranks.world, ranks.local_world) for local in range(ranks.local_world)]
        rates = _gathers(meter, groups, ranks.local_rank, device)
        inter = meter.figure([rate * ranks.local_world for rate in rates], f"all-gather of {ranks.nodes} nodes")
    return intra, inter


def shared(hardware: Hardware | None, ranks: Ranks) -> Hardware:
    """Rank 0's hardware, on every rank."""
    box = [None if hardware is None else hardware.to_json()]
    if ranks.world > 1:
        dist.broadcast_object_list(box)
    assert box[0] is not None, "rank 0 has measured"
    return Hardware.from_json(box[0], "the hardware that rank 0 measured")


def _gathers(meter: Meter, groups: list[range], mine: int, device: torch.device) -> list[float]:
    """Bytes per second that each rank sends in all-gathers of group number `mine`, while other groups gather too."""
    group = [dist.new_group(list(group)) for group in groups][mine]
    count = len(groups[mine])
    nbytes = meter.effort.gathered_bytes * (_GPU_FACTOR if device.type == "cuda" else 1) // count
    part = torch.ones(nbytes, dtype=torch.uint8, device=device)
    whole = torch.empty(nbytes * count, dtype=torch.uint8, device=device)
    rates = []
    for _ in range(_REPEATS + 1):
        dist.all_reduce(torch.zeros(1))
        start = time.perf_counter()
        dist.all_gather_into_tensor(whole, part, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        rates.append(nbytes * (count - 1) / (time.perf_counter() - start))
    return rates[1:]
