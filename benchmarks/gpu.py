"""On an NVIDIA GPU: what Pagoda reaches of the machine, in one run.

    python benchmarks/gpu.py [--sections copies homes ...] [--ssd DIR] [--minutes 12] [--out FILE]
    python benchmarks/gpu.py --smoke

The most valuable sections come first:

machine    names, sizes and versions
pinning    how fast RAM is page-locked
modes      whether every mode runs, at a tiny size; modes that must have the same bits have them
copies     copy bandwidth each way, alone and during matrix products; the share of it that a step's copies reach; the
           GPU's idle share
kernels    the GPU's update kernel
same       a few steps have the same bits wherever states live and are updated
homes      llama-8b, half of it at home on the device, beside forward and backward alone; without clipping
few        all states in RAM, few units on the device, beside the same; without clipping
accumulation  one and four micro-batches with gradients in RAM
homes_clipped, few_clipped  with clipping
predict    predicted and measured steps of seven configurations, calibrated now
limited    12B parameters with 8-bit moments in 22 GiB of device memory, beside forward and backward alone
step       0%, 30% and 60% of the updates on the device, compared with plain PyTorch with as many layers as the GPU's
           memory holds
baselines  DeepSpeed ZeRO-3 and FSDP2, states in RAM, where they are installed
bits       elements in which CPU and GPU differ after an update, by kernel: must be 0
largest    12B parameters with fp32 moments on device, RAM and SSD: five steps with updates during backward, or the
           plan's refusal
largest_8bit  the same with 20B parameters and 8-bit moments

The sizes are for a GPU with 80 GB and 128 GiB of RAM. Each section is a process of its own with a time limit. Shortly
before it, the process prints where every thread is. Figures are in --out as soon as they are measured, also those of a
section that fails later. With --minutes, sections that are left out say so. `--smoke` runs the same code at tiny sizes
on a CPU, with an arena in RAM that stands in for the GPU: a rehearsal, whose figures mean nothing.
"""

import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import tyro
from rich.console import Console
from rich.table import Table

from gpu_suite import bits, steps as of_steps
from gpu_suite.baselines import baselines
from gpu_suite.common import REAL, SMOKE, Figures, Machine, Named
from gpu_suite.copies import copies
from gpu_suite.machine import machine, pinning
from gpu_suite.modes import modes
from gpu_suite.predict import predict
from pagoda.errors import ConfigError
from script import write
from turns import ENVIRONMENT

_LEAST_S = 10.0
"""No section starts with less time."""
_TO_END_S = 5.0
"""After its limit, a section's process has this long to print where its threads are and to end."""
_PATIENCE = 10
"""Factor of the limits of a rehearsal, for slow machines."""
_LINES = 30
"""Lines of a failed process that are kept with the figures."""


class Section(NamedTuple):
    """A part of the benchmark."""

    run: Callable[[Machine], Named]
    limit_s: float


SECTIONS = {
    "machine": Section(machine, 40),
    "pinning": Section(pinning, 60),
    "modes": Section(modes, 120),
    "copies": Section(copies, 90),
    "kernels": Section(bits.kernels, 40),
    "same": Section(bits.same, 90),
    "homes": Section(of_steps.homes, 180),
    "few": Section(of_steps.few, 150),
    "accumulation": Section(of_steps.accumulation, 180),
    "homes_clipped": Section(of_steps.homes_clipped, 120),
    "few_clipped": Section(of_steps.few_clipped, 120),
    "predict": Section(predict, 300),
    "limited": Section(of_steps.limited, 180),
    "step": Section(of_steps.step, 240),
    "baselines": Section(baselines, 240),
    "bits": Section(bits.bits, 120),
    "largest": Section(of_steps.largest, 300),
    "largest_8bit": Section(of_steps.largest_8bit, 300),
}


def main(
    sections: tuple[str, ...] = tuple(SECTIONS),
    model: str | None = None,
    host: str | None = None,
    ssd: Path | None = None,
    steps: int | None = None,
    smoke: bool = False,
    out: Path | None = None,
    traces: Path | None = None,
    minutes: float | None = None,
    here: bool = False,
    until: float | None = None,
) -> None:
    """Run the sections and print a table of their figures. Exits with 1 if one has failed.

    Args:
        sections: which, in this order.
        model: a built-in shape instead of the 8B one.
        host: RAM for pages, instead of what a section needs.
        ssd: a directory on an SSD, for the largest models.
        steps: measured steps of each variant.
        smoke: tiny sizes, on the CPU.
        out: where to write the figures as JSON, as soon as they are measured.
        traces: a directory for a timeline of a step of each run.
        minutes: time for all sections.
        here: run the sections in this process, and add their figures to those in `out`.
        until: time of `time.monotonic` at which this process prints where its threads are, and ends.
    """
    if not smoke and not torch.cuda.is_available():
        raise ConfigError("torch finds no CUDA GPU here: --smoke rehearses on the CPU")
    if here:
        if until is not None:
            faulthandler.dump_traceback_later(max(1.0, until - time.monotonic()), exit=True)
        sizes = SMOKE if smoke else REAL
        sizes = replace(sizes, model=model or sizes.model, steps=steps or sizes.steps)
        device = torch.device("cpu") if smoke else torch.device("cuda", torch.cuda.current_device())
        run_here(sections, Machine(sizes, device, host or ("256MiB" if smoke else None), ssd, traces), out)
        return
    given = {"model": model, "host": host, "ssd": ssd, "steps": steps, "traces": traces}
    options = [f"--{name}={value}" for name, value in given.items() if value is not None] + ["--smoke"] * smoke
    end = time.monotonic() + 60 * minutes if minutes is not None else float("inf")
    with tempfile.TemporaryDirectory() as temporary:
        results = run_apart(sections, options, _PATIENCE if smoke else 1, end, out or Path(temporary) / "gpu.json")
    show(results)
    if any("failed" in figures for figures in results.values()):
        raise SystemExit(1)


def run_here(sections: Sequence[str], on: Machine, out: Path | None) -> None:
    """Run sections in this process."""
    results = read(out)
    for section in sections:
        start, figures = time.perf_counter(), results.setdefault(section, {})
        for name, value in SECTIONS[section].run(on):
            figures[name] = value
            write(out, results)
        figures["took_s"] = time.perf_counter() - start
        write(out, results)


def run_apart(
    sections: Sequence[str], options: Sequence[str], patience: int, end: float, out: Path
) -> dict[str, Figures]:
    """Run each section in a process of its own, until the time `end`. Returns the figures."""
    write(out, {})
    for section in sections:
        limit = min(patience * SECTIONS[section].limit_s, end - time.monotonic())
        failed = run_process(section, options, limit, out) if limit >= _LEAST_S else "left out: no time"
        results = read(out)
        if failed is not None:
            results.setdefault(section, {})["failed"] = failed
            write(out, results)
    return read(out)


def run_process(section: str, options: Sequence[str], limit_s: float, out: Path) -> str | None:
    """Run a section in a process. Returns the last lines that it printed if it failed."""
    until = time.monotonic() + limit_s
    command = [sys.executable, __file__, "--here", "--sections", section, f"--until={until}", f"--out={out}"]
    print(f"{section} (at most {limit_s:.0f} s)", flush=True)
    last: deque[str] = deque(maxlen=_LINES)
    environment = {**os.environ, **ENVIRONMENT}
    with subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True, env=environment) as process:
        killer = threading.Timer(limit_s + _TO_END_S, process.kill)
        killer.start()
        assert process.stderr is not None
        for line in process.stderr:
            print(line, end="", file=sys.stderr, flush=True)
            last.append(line)
        code = process.wait()
        killer.cancel()
    return None if code == 0 else f"exit code {code}: {''.join(last)}"


def read(out: Path | None) -> dict[str, Figures]:
    """The figures so far."""
    if out is None or not out.exists():
        return {}
    found: dict[str, Figures] = json.loads(out.read_text())
    return found


def show(results: dict[str, Figures]) -> None:
    """Print a table."""
    table = Table("section", "figure", "value")
    for section, figures in results.items():
        for figure, value in figures.items():
            table.add_row(section, figure, f"{value:.4g}" if isinstance(value, float) else json.dumps(value, indent=1))
    Console().print(table)


if __name__ == "__main__":
    tyro.cli(main)
