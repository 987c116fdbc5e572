"""Repeats measurements and takes their median and spread."""

import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from pagoda.simulate.hardware import Figure

T = TypeVar("T")

CPU = torch.device("cpu")
_LEAST_REPEATS = 3
_MOST_REPEATS = 15
_LEAST_TURNS = 5
_LEAST_SHARE, _LEAST_S = 1e-3, 1e-6
"""Least values, because a figure must be above zero."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much a calibration measures. The defaults take about a minute on two cores."""

    figure_s: float = 1.0
    """Least seconds of repeats for a figure."""
    params: int = 32 << 20
    """Parameters that an update runs over: far more than fit in caches."""
    copy_bytes: int = 256 << 20
    tokens: int = 1024
    """Tokens of the transformer block on a CPU."""
    width: int = 1024
    """Hidden size of that block."""
    file_bytes: int = 4 << 30
    """Size of the page file that SSD streams use: larger than a drive's own RAM."""
    gathered_bytes: int = 64 << 20
    """Total bytes of one all-gather between CPU ranks. GPUs gather sixteen times as much."""


class Meter:
    """Turns samples into figures that say when and on which machine they were measured."""

    def __init__(self, on: str, effort: Effort, report: Callable[[str], None], device: torch.device = CPU) -> None:
        self.device = device
        """Where the measured work runs."""
        self.effort = effort
        self.report = report
        """Called with the name of each measurement before it starts."""
        self._source = f"measured {time.strftime('%Y-%m-%d')} on {on}"

    def figure(self, samples: Sequence[float], note: str = "") -> Figure:
        """The median of samples above zero. The spread is their range divided by the median."""
        median = statistics.median(samples)
        return Figure(median, self._said(note), (max(samples) - min(samples)) / median)

    def share(self, samples: Sequence[float], least: float, note: str) -> Figure:
        """The median of shares of one whole, but at least `least`. The spread is their range."""
        value = max(_LEAST_SHARE, least, statistics.median(samples))
        return Figure(value, self._said(note), max(samples) - min(samples))

    def reading(self, value: float, note: str) -> Figure:
        """A value that the system reports."""
        return Figure(value, self._said(note))

    def rate(self, amount: float, work: Callable[[], object], note: str = "") -> Figure:
        """`amount` per second of `work`, until it has ended on the device. The first call is not counted."""

        def rate() -> float:
            start = now(self.device)
            work()
            return amount / (now(self.device) - start)

        work()
        return self.figure(repeated(rate, _LEAST_REPEATS, _MOST_REPEATS, self.effort.figure_s), note)

    def difference(self, less: Callable[[], float], more: Callable[[], float], note: str) -> Figure:
        """The seconds that `more` returns minus the seconds that `less` returns. The two take turns."""

        def lost() -> float:
            without = less()
            return max(_LEAST_S, more() - without)

        return self.figure(repeated(lost, _LEAST_TURNS, math.inf, self.effort.figure_s), note)

    def _said(self, note: str) -> str:
        return f"{self._source}: {note}" if note else self._source


def repeated(sample: Callable[[], T], least: int, most: float, seconds: float) -> list[T]:
    """What `sample` returns, called for this many seconds: at least `least` and at most `most` times."""
    samples: list[T] = []
    end = time.perf_counter() + seconds
    while len(samples) < least or (len(samples) < most and time.perf_counter() < end):
        samples.append(sample())
    return samples


def now(device: torch.device) -> float:
    """A time in seconds, taken once all work of a device has ended."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def cpu_name() -> str:
    """The processor's name, as the system reports it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def cpu_cores() -> int:
    """Number of processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
