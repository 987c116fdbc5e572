"""benchmarks/gpu.py runs all of its code without a GPU, so that the first run on one measures instead of failing."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gpu
from gpu_suite.copies import copy_rates, idle_share


def numbers(figures: Any) -> Iterator[float]:
    """Every number in figures, however deep."""
    if isinstance(figures, dict | list):
        for value in figures.values() if isinstance(figures, dict) else figures:
            yield from numbers(value)
    elif isinstance(figures, int | float):
        yield figures


def rehearse(sections: tuple[str, ...], tmp_path: Path) -> dict[str, Any]:
    out = tmp_path / "gpu.json"
    gpu.main(sections, smoke=True, out=out)
    found: dict[str, Any] = json.loads(out.read_text())
    assert set(sections) <= set(found)
    assert all(map(math.isfinite, numbers(found)))
    return found


SHORT = ("copies", "step", "baselines")
LONG = ("bits", "whole", "limited", "largest", "largest_8bit")


@pytest.mark.slow
def test_a_rehearsal_has_figures_of_the_short_sections(tmp_path: Path) -> None:
    found = rehearse(SHORT, tmp_path)
    assert {"d2h"} <= set(found["copies"]["step_share"]) <= {"h2d", "d2h"}  # weights may come before the step begins
    assert len(found["step"]["share_of_plain"]) == 2
    for run in found["step"]["paged"].values():
        assert run["within_plan"]
        assert run["tokens_per_s"] > 0
    assert "missing" in found["baselines"]["deepspeed"]


@pytest.mark.slow
def test_a_rehearsal_has_figures_of_the_long_sections(tmp_path: Path) -> None:
    found = rehearse(LONG, tmp_path)
    different = {kernel: count for kernel, count in found["bits"].items() if kernel != "took_s"}
    assert len(different) == 12
    assert set(different.values()) == {0}
    for run in (found["whole"], found["limited"]["limited"]):
        assert run["within_plan"]
        assert run["tokens_per_s"] > 0
    for run in (found["largest"], found["largest_8bit"]):
        assert run["falling"]
        assert run["within_plan"]


@pytest.mark.slow
def test_a_rehearsal_predicts_eight_configurations(tmp_path: Path) -> None:
    found = rehearse(("predict",), tmp_path)["predict"]
    runs = [run for run in found.values() if isinstance(run, dict)]
    assert len(runs) == 8
    assert found["worst"] == max(abs(run["error"]) for run in runs)


def event(category: str, start: float, duration: float, name: str = "", nbytes: int = 0) -> dict[str, Any]:
    """One of a Chrome trace of torch's profiler; times in microseconds."""
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "args": {"bytes": nbytes}}


def test_a_profile_says_how_fast_copies_were_and_how_idle_the_gpu() -> None:
    events = [
        event("gpu_memcpy", 0, 100, "Memcpy HtoD (Pinned -> Device)", 5_000_000),
        event("gpu_memcpy", 200, 300, "Memcpy HtoD (Pinned -> Device)", 15_000_000),
        event("gpu_memcpy", 0, 10, "Memcpy DtoD (Device -> Device)", 7),
        event("kernel", 10, 40),
        event("kernel", 30, 30),
        event("kernel", 80, 30),
        event("cpu_op", 0, 1000),
        {"ph": "M", "name": "process_name"},
    ]
    assert copy_rates(events) == {"h2d": pytest.approx(5e10)}
    assert idle_share(events) == pytest.approx(0.2)
    assert idle_share([]) == 1.0
