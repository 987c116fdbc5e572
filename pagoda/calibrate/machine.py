"""Calibrates this machine. Everything is measured in turn, so that measurements do not disturb each other."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from pagoda.calibrate.cpu import measure_cpu
from pagoda.calibrate.drive import check_directory, measure_drive
from pagoda.calibrate.gpu import measure_gpu, measure_link
from pagoda.calibrate.meter import Effort, Meter, cpu_cores, cpu_name
from pagoda.calibrate.ranks import measure_collectives, shared
from pagoda.distributed.world import World, joined, launched
from pagoda.simulate.hardware import Hardware


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
        measured = _alone(host, compute, name, ssd, world) if world.rank == 0 else None
        hardware = shared(measured, world)
        intra, inter = measure_collectives(compute, world)
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
            cpu=measure_cpu(host, torch.get_num_threads()),
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
