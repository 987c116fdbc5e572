"""Measures how fast several processes, started by torchrun, gather data."""

import time

import torch
import torch.distributed as dist

from pagoda.calibrate.meter import Meter, now
from pagoda.distributed.world import World
from pagoda.simulate.hardware import Figure, Hardware

_REPEATS = 5
_GPU_FACTOR = 16


def measure_collectives(meter: Meter, world: World) -> tuple[Figure | None, Figure | None]:
    """Rates within a node and between nodes. A rate is None if there is no other process. Every rank must call this."""
    intra = inter = None
    if world.local_size > 1:
        meter.report(f"all-gather of {world.local_size} ranks in this node")
        node = world.rank // world.local_size
        groups = [range(n * world.local_size, (n + 1) * world.local_size) for n in range(world.nodes)]
        intra = meter.figure(_gathers(meter, groups, node), f"all-gather of {world.local_size} ranks")
    if world.nodes > 1:
        meter.report(f"all-gather of {world.nodes} nodes")
        # Each rank gathers with the ranks of its number on other nodes, all at once. Together they use the whole
        # network of a node.
        groups = [range(local, world.size, world.local_size) for local in range(world.local_size)]
        rates = _gathers(meter, groups, world.local_rank)
        inter = meter.figure([rate * world.local_size for rate in rates], f"all-gather of {world.nodes} nodes")
    return intra, inter


def shared(hardware: Hardware | None, world: World) -> Hardware:
    """Rank 0's hardware, on every rank."""
    box = [None if hardware is None else hardware.to_json()]
    if world.size > 1:
        dist.broadcast_object_list(box)
    assert box[0] is not None, "rank 0 has measured"
    return Hardware.from_json(box[0], "the hardware that rank 0 measured")


def _gathers(meter: Meter, groups: list[range], mine: int) -> list[float]:
    """Bytes per second that each rank sends in all-gathers of group number `mine`, while the other groups gather
    too."""
    device = meter.device
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
        rates.append(nbytes * (count - 1) / (now(device) - start))
    return rates[1:]
