"""Calibrates this machine, and what ranks started by torchrun gather. Everything is measured in turn, so that
measurements do not disturb each other."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from pagoda.calibrate.cpu import measure_cpu
from pagoda.calibrate.drive import check_directory, measure_drive
from pagoda.calibrate.matmul import matmul_rate
from pagoda.calibrate.meter import Effort, Meter, cpu_cores, cpu_name, now
from pagoda.memory.cuda import CudaArena, PinnedArena
from pagoda.mesh.world import World, joined, launched
from pagoda.optim import AdamW
from pagoda.plan.lanes import update_threads
from pagoda.runtime.device import PAST, CudaDevice
from pagoda.simulate.hardware import DeviceSpeeds, Figure, Hardware, Link

_GATHERS = 5
_GPU_FACTOR = 16


_TOKENS = 8192
_WIDTH = 4096
_UPDATED = 64 << 20
"""Number of updated parameters, of 14 bytes each."""
_COPIED = 1 << 30


def measure_gpu(meter: Meter) -> DeviceSpeeds:
    """All figures of the meter's GPU."""
    properties = torch.cuda.get_device_properties(meter.device)
    bf16 = matmul_rate(meter, torch.bfloat16, _TOKENS, _WIDTH)
    fp32 = matmul_rate(meter, torch.float32, _TOKENS // 4, _WIDTH)
    meter.report("memory of the GPU, and updates on it")
    return DeviceSpeeds(
        memory_bytes=meter.reading(properties.total_memory, "all of the GPU's memory, as CUDA reports it"),
        memory_bytes_per_s=_memory_rate(meter),
        bf16=bf16,
        fp32=fp32,
        update_params_per_s=_update_rate(meter),
    )


def _memory_rate(meter: Meter) -> Figure:
    source, target = (torch.ones(_COPIED, dtype=torch.uint8, device=meter.device) for _ in range(2))
    return meter.rate(2.0 * _COPIED, lambda: target.copy_(source), "a copy, read and written")


def _update_rate(meter: Meter) -> Figure:
    rule, device = AdamW(), meter.device
    states = [torch.zeros(_UPDATED, dtype=state.dtype, device=device) for state in rule.states("bf16")]
    gradient = torch.ones(_UPDATED, dtype=torch.bfloat16, device=device)
    kernel = CudaDevice(device).update_kernel(rule, "bf16")
    note = "AdamW on the split master, Pagoda's kernel"
    return meter.rate(_UPDATED, lambda: kernel(states, gradient, rule.scalars(1)), note)


def measure_link(meter: Meter) -> Link:
    """Rates of copies from and to page-locked RAM, as the runtime copies, with one GPU."""
    meter.report("copies between RAM and the GPU")
    nbytes = meter.effort.copy_bytes
    device = CudaDevice(meter.device)
    host, gpu = PinnedArena(2 * nbytes), CudaArena(2 * nbytes, meter.device)
    down_from, up_to = (host.tensor(i * nbytes, nbytes, torch.uint8) for i in range(2))
    down_to, up_from = (gpu.tensor(i * nbytes, nbytes, torch.uint8) for i in range(2))

    def both() -> None:
        device.copy_in(down_to, down_from, PAST)
        device.copy_out(up_to, up_from, PAST)

    try:
        return Link(
            h2d_bytes_per_s=meter.rate(nbytes, lambda: device.copy_in(down_to, down_from, PAST)),
            d2h_bytes_per_s=meter.rate(nbytes, lambda: device.copy_out(up_to, up_from, PAST)),
            both_bytes_per_s=meter.rate(2.0 * nbytes, both),
        )
    finally:
        host.close()
        gpu.close()


def calibrate(
    ssd: Path | None, device: torch.device, report: Callable[[str], None] = lambda _: None, effort: Effort | None = None
) -> Hardware:
    """Measure this machine. Takes less than a minute.

    Under torchrun, every rank calls it. All ranks get the same figures: what rank 0 measured alone, and what all
    measured together.

    Args:
      ssd: a directory on the drive to measure, which is left as it was; None measures no drive.
      device: where compute runs: a GPU (its link is measured too) or the CPU.
      report: called with the name of each measurement before it starts.
      effort: how much is measured. The default gives steady figures.

    Raises StorageError if the directory does not exist or has too little space, or if its drive fails.
    """
    effort = effort or Effort()
    world = launched()
    gpu = device.type == "cuda"
    if gpu and world.size > 1:
        device = torch.device("cuda", world.local_rank)
    if ssd is not None:
        check_directory(ssd, effort.file_bytes)  # on every rank, before any waits for another
    name = torch.cuda.get_device_name(device) if gpu else cpu_name()
    with joined(world):
        host, compute = Meter(cpu_name(), effort, report), Meter(name, effort, report, device)
        measured = [_alone(host, compute, name, ssd, world) if world.rank == 0 else None]
        if world.size > 1:
            dist.broadcast_object_list(measured)
        (hardware,) = measured
        assert hardware is not None, "rank 0 has measured"
        intra, inter = _collectives(compute, world)
    return replace(
        hardware,
        gpus_per_node=world.local_size,
        intra_node_bytes_per_s=intra,
        inter_node_bytes_per_s=inter,
    )


def _alone(host: Meter, compute: Meter, name: str, ssd: Path | None, world: World) -> Hardware:
    """Measure what one process can measure alone."""
    gpu = compute.device.type == "cuda"
    with _threads(cpu_cores() if world.size > 1 else torch.get_num_threads()):
        return Hardware(
            name=name,
            cpu=measure_cpu(host, update_threads(torch.get_num_threads())),
            device=measure_gpu(compute) if gpu else None,
            link=measure_link(compute) if gpu else None,
            ssd=None if ssd is None else measure_drive(host, ssd),
        )


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Inside, torch uses `count` threads. torchrun gives each rank one thread, but a node's figures are those of all
    its cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _collectives(meter: Meter, world: World) -> tuple[Figure | None, Figure | None]:
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
    for _ in range(_GATHERS + 1):
        dist.all_reduce(torch.zeros(1))
        start = time.perf_counter()
        dist.all_gather_into_tensor(whole, part, group=group)
        rates.append(nbytes * (count - 1) / (now(device) - start))
    return rates[1:]
