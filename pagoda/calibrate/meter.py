"""Measuring: repeats of the same work, their median and their spread."""

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pagoda.simulate.hardware import Figure

_LEAST_REPEATS = 3
_MOST_REPEATS = 15
_LEAST_TURNS = 5
_LEAST_SHARE, _LEAST_S = 1e-3, 1e-6
"""A figure is above zero."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much a calibration does; by default as much as fits a minute on two cores."""

    figure_s: float = 1.0
    """Seconds of repeats behind a figure, at least."""
    params: int = 32 << 20
    """Parameters that updates run over: far more than caches hold."""
    copy_bytes: int = 256 << 20
    tokens: int = 1024
    """Tokens of the transformer block that a CPU computes."""
    width: int = 1024
    """Its hidden size."""
    file_bytes: int = 4 << 30
    """Page file that SSD streams run over: more than a drive's own RAM."""
    gathered_bytes: int = 64 << 20
    """What one all-gather of CPU ranks gathers in all; GPUs take sixteen times as much."""


class Meter:
    """Turns samples into figures that say when and on what they were measured."""

    def __init__(self, on: str, effort: Effort, report: Callable[[str], None]) -> None:
        self.effort = effort
        self.report = report
        """Called with what is measured next."""
        self._source = f"measured {time.strftime('%Y-%m-%d')} on {on}"

    def figure(self, samples: Sequence[float], note: str = "") -> Figure:
        """The median of samples above zero; the spread is their range as a share of it."""
        median = statistics.median(samples)
        return Figure(median, self._said(note), (max(samples) - min(samples)) / median)

    def share(self, samples: Sequence[float], least: float, note: str) -> Figure:
        """The median of shares of one whole, or what is known to be the least; the spread is their range."""
        value = max(_LEAST_SHARE, least, statistics.median(samples))
        return Figure(value, self._said(note), max(samples) - min(samples))

    def reading(self, value: float, note: str) -> Figure:
        """What the system says of itself."""
        return Figure(value, self._said(note))

    def rate(self, amount: float, work: Callable[[], object], note: str = "") -> Figure:
        """`amount` per second of `work`, which has ended when it returns; the first call is not counted."""
        work()
        samples: list[float] = []
        end = time.perf_counter() + self.effort.figure_s
        while len(samples) < _LEAST_REPEATS or (len(samples) < _MOST_REPEATS and time.perf_counter() < end):
            start = time.perf_counter()
            work()
            samples.append(amount / (time.perf_counter() - start))
        return self.figure(samples, note)

    def difference(self, less: Callable[[], float], more: Callable[[], float], note: str) -> Figure:
        """Seconds that `more` returns above those that `less` returns; they take turns."""
        samples: list[float] = []
        end = time.perf_counter() + self.effort.figure_s
        while len(samples) < _LEAST_TURNS or time.perf_counter() < end:
            without = less()
            samples.append(max(_LEAST_S, more() - without))
        return self.figure(samples, note)

    def _said(self, note: str) -> str:
        return f"{self._source}: {note}" if note else self._source


def cpu_name() -> str:
    """The processor's name, as the system gives it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def cpu_cores() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
