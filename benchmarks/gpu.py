"""On an NVIDIA GPU: copies, step time against plain PyTorch, and prediction against measurement, in one run.

    python benchmarks/gpu.py [--sections copies step predict] [--model llama-1b] [--ssd DIR] [--out FILE]

Each section ends well inside ten minutes. `--device cpu:SIZE` runs the same code on a machine without a GPU, with an
arena in RAM that stands in for one: a rehearsal, whose figures mean nothing.
"""

import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import nn

import pagoda
from pagoda.calibrate import ComputeProfiler, calibrate
from pagoda.plan.compute import Compute
from pagoda.plan.planner import Options, make_plan
from pagoda.plan.simulate import simulate
from pagoda.runtime.construct import describe
from pagoda.runtime.device import PAST, Device, open_device
from training import Paged, Plain, Workload

PIECE = 64 << 20


@dataclass(frozen=True)
class Settings:
    """What every section measures with."""

    workload: Workload
    device: str
    host: str | None
    ssd: Path | None
    steps: int

    @property
    def memory(self) -> pagoda.Memory:
        return pagoda.Memory(device=self.device, host=self.host, ssd=None if self.ssd is None else str(self.ssd))


def ended(device: torch.device) -> float:
    """The time, once the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def copies(settings: Settings) -> dict[str, object]:
    """Bytes per second of the device's copies each way, alone and beside matrix products."""
    torch_device = settings.memory.torch_device
    device = open_device(torch_device)
    host = device.host_arena(2 * PIECE)
    gpu = device.arena(2 * PIECE)
    size = 8192 if torch_device.type == "cuda" else 512
    matrix = torch.ones(size, size, dtype=torch.bfloat16, device=torch_device)

    def rate(busy: bool, move: Callable[[], None]) -> float:
        for _ in range(3):
            move()
        if busy:
            for _ in range(200 if torch_device.type == "cuda" else 2):
                matrix @ matrix
        start = time.perf_counter()
        for _ in range(20):
            move()
        return 20 * PIECE / (time.perf_counter() - start)

    ram, memory = host.tensor(0, PIECE, torch.uint8), gpu.tensor(0, PIECE, torch.uint8)
    ways: dict[str, Callable[[], None]] = {
        "h2d": lambda: device.copy_in(memory, ram, PAST).synchronize(),
        "d2h": lambda: device.copy_out(ram, memory, PAST).synchronize(),
    }
    result = {way: {"alone": rate(False, move), "busy": rate(True, move)} for way, move in ways.items()}
    _close(device, host, gpu)
    return {"bytes_per_s": result, "busy_share": {way: r["busy"] / r["alone"] for way, r in result.items()}}


def _close(device: Device, *arenas: object) -> None:
    ended(device.torch_device)
    for arena in arenas:
        arena.close()  # type: ignore[attr-defined]


def plain_steps(settings: Settings) -> list[float]:
    """Seconds of steps of plain PyTorch with everything on the device."""
    return timed(settings, Plain(settings.workload, settings.memory.torch_device))


def paged_steps(settings: Settings) -> tuple[list[float], dict[str, object]]:
    """Seconds of steps under Pagoda, and what its last step says of itself."""
    paged = Paged(settings.workload, settings.memory)
    try:
        seconds = timed(settings, paged)
        stats = paged.optimizer.stats
        said = {"stall_s": dict(stats.stall_s), "peak_bytes": dict(stats.peak_bytes), "faults": stats.faults}
    finally:
        paged.close()
    return seconds, said


def timed(settings: Settings, trainer: Plain | Paged) -> list[float]:
    """Seconds of each step after three that warm up."""
    device = settings.memory.torch_device
    seconds = []
    for ids in islice(settings.workload.batches(device), 3 + settings.steps):
        start = ended(device)
        trainer.step(ids)
        seconds.append(ended(device) - start)
    return seconds[3:]


def step(settings: Settings) -> dict[str, object]:
    """Pagoda's step against plain PyTorch's with everything on the device."""
    plain_s = statistics.median(plain_steps(settings))
    gc.collect()
    seconds, said = paged_steps(settings)
    paged_s = statistics.median(seconds)
    parameters = sum(p.numel() for p in _meta(settings).parameters())
    flops = 6 * parameters * settings.workload.tokens
    return {
        "plain_s": plain_s,
        "paged_s": paged_s,
        "share_of_plain": plain_s / paged_s,
        "tokens_per_s": settings.workload.tokens / paged_s,
        "tflop_per_s": flops / paged_s / 1e12,
        **said,
    }


def predict(settings: Settings) -> dict[str, object]:
    """The simulated step on this machine, calibrated now, against the measured one."""
    memory = settings.memory
    hardware = calibrate(settings.ssd, memory.torch_device)
    load = settings.workload
    profiler = ComputeProfiler(load.model, batch_size=load.batch_size, seq_len=load.seq_len, device=memory.torch_device)
    profile = profiler.measure()
    root = describe(_meta(settings))
    plan = make_plan(root, pagoda.AdamW().states("bf16"), memory.budgets(), Options(clipping=True))
    predicted = simulate(plan, hardware, Compute.from_profile(profile, root).of_step(root, plan))
    seconds, _ = paged_steps(settings)
    measured = statistics.median(seconds)
    return {"predicted_s": predicted.step_s, "measured_s": measured, "error": predicted.step_s / measured - 1}


def _meta(settings: Settings) -> nn.Module:
    with torch.device("meta"):
        return settings.workload.build()


SECTIONS: dict[str, Callable[[Settings], dict[str, object]]] = {"copies": copies, "step": step, "predict": predict}


def main(
    sections: tuple[str, ...] = tuple(SECTIONS),
    model: str = "llama-1b",
    batch_size: int = 8,
    seq_len: int = 2048,
    device: str = "20GiB",
    host: str | None = None,
    ssd: Path | None = None,
    steps: int = 5,
    out: Path | None = None,
) -> None:
    """Run the sections and print a table of their figures."""
    settings = Settings(Workload(model, batch_size, seq_len), device, host, ssd, steps)
    torch_device = settings.memory.torch_device
    name = torch.cuda.get_device_name(torch_device) if torch_device.type == "cuda" else "CPU arena"
    results: dict[str, object] = {
        "machine": name,
        "torch": torch.__version__,
        "model": model,
        "tokens": settings.workload.tokens,
    }
    table = Table("section", "figure", "value", title=name)
    for section in sections:
        figures = SECTIONS[section](settings)
        results[section] = figures
        for figure, value in figures.items():
            table.add_row(section, figure, f"{value:.4g}" if isinstance(value, float) else json.dumps(value))
        if out is not None:  # after each section: a later one may run out of time
            out.write_text(json.dumps(results, indent=1) + "\n")
    Console().print(table)


if __name__ == "__main__":
    tyro.cli(main)
