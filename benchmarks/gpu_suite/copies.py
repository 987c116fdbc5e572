"""Copies: how fast RAM and the device are joined, what lanes reach of that beside compute, and how idle the GPU is."""

import json
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from gpu_suite.common import WARM_UP, Machine, Named, drawn_quickly, release
from pagoda.runtime.device import PAST, Event, open_device
from training import Paged

_REPEATS = 20
_WAYS = {"h2d": "HtoD", "d2h": "DtoH"}


def copies(machine: Machine) -> Named:
    """Bytes per second of page-locked copies each way, what a step's copies reach of it, and the GPU's idle share."""
    alone = bandwidth(machine, busy=False)
    yield "bytes_per_s", alone
    yield "busy_bytes_per_s", bandwidth(machine, busy=True)
    reached, idle = step_profile(machine)
    yield "step_bytes_per_s", reached
    yield "step_share", {way: reached[way] / alone[way] for way in reached}
    yield "gpu_idle_share", idle


def bandwidth(machine: Machine, busy: bool) -> dict[str, float]:
    """Bytes per second each way by itself, beside matrix products if `busy`."""
    device, piece = open_device(machine.device), machine.sizes.piece_bytes
    host, gpu = device.host_arena(piece), device.arena(piece)
    ram, memory = host.tensor(0, piece, torch.uint8), gpu.tensor(0, piece, torch.uint8)
    ways: dict[str, Callable[[], Event]] = {
        "h2d": partial(device.copy_in, memory, ram, PAST),
        "d2h": partial(device.copy_out, ram, memory, PAST),
    }
    size, products = (8192, 200) if machine.gpu else (64, 2)
    matrix = torch.ones(size, size, dtype=torch.bfloat16, device=machine.device)
    rates = {}
    for way, move in ways.items():
        for _ in range(3):
            move().synchronize()
        machine.now()
        for _ in range(products * busy):
            matrix @ matrix
        start = time.perf_counter()
        for _ in range(_REPEATS):
            move().synchronize()
        rates[way] = _REPEATS * piece / (time.perf_counter() - start)
        machine.now()
    host.close()
    gpu.close()
    release(machine)
    return rates


def step_profile(machine: Machine) -> tuple[dict[str, float], float | None]:
    """Bytes per second of each way's copies in a training step, while one is under way, and the GPU's idle share."""
    load = replace(machine.workload, layers=machine.sizes.few_layers)
    with drawn_quickly():
        paged = Paged(load, machine.memory(machine.sizes.few))
    try:
        batches = load.batches(machine.device)
        for ids in islice(batches, WARM_UP):
            paged.step(ids)
        if machine.gpu:
            return _profiled(machine, paged, next(batches))
        paged.optimizer.trace_next_step()
        paged.step(next(batches))
        timeline = paged.optimizer.timeline
        assert timeline is not None
        rates = {way: timeline.bytes_moved[way] / timeline.busy_s[way] for way in _WAYS if timeline.busy_s.get(way)}
        return rates, None
    finally:
        paged.close()
        release(machine)


def _profiled(machine: Machine, paged: Paged, ids: torch.Tensor) -> tuple[dict[str, float], float]:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    machine.now()
    with torch.profiler.profile(activities=activities) as profile:
        paged.step(ids)
        machine.now()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return copy_rates(events), idle_share(events)


def copy_rates(events: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Bytes per second of each way's copies, in a Chrome trace of torch's profiler."""
    rates = {}
    for way, name in _WAYS.items():
        found = [e for e in events if e.get("cat") == "gpu_memcpy" and name in e["name"]]
        seconds = sum(event["dur"] for event in found) / 1e6
        if seconds:
            rates[way] = sum(event["args"]["bytes"] for event in found) / seconds
    return rates


def idle_share(events: Iterable[dict[str, Any]]) -> float:
    """Share of the time from the first to the last kernel in which none runs."""
    kernels = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "kernel")
    if not kernels:
        return 1.0
    busy, reached = 0.0, kernels[0][0]
    for start, end in kernels:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return 1.0 - busy / (reached - kernels[0][0])
