"""benchmarks/gpu.py runs all of its code without a GPU, so that the first run on one measures instead of failing."""

import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gpu
from gpu_suite.copies import copy_rates, idle_share

BENCHMARKS = Path(gpu.__file__).parent


def numbers(figures: Any) -> Iterator[float]:
    """Every number in figures, however deep."""
    if isinstance(figures, dict | list):
        for value in figures.values() if isinstance(figures, dict) else figures:
            yield from numbers(value)
    elif isinstance(figures, int | float):
        yield figures


def rehearse(sections: tuple[str, ...], tmp_path: Path) -> dict[str, Any]:
    """Each in a process of its own, as on a GPU."""
    out = tmp_path / "gpu.json"
    gpu.main(sections, smoke=True, out=out)
    found = gpu.read(out)
    assert set(sections) == set(found)
    assert all(map(math.isfinite, numbers(found)))
    return found


SHORT = ("machine", "pinning", "modes", "copies", "kernels", "same", "baselines")
STEPS = ("homes", "few", "accumulation", "homes_clipped", "few_clipped", "step", "limited")
LONG = ("bits", "largest", "largest_8bit")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_rehearsal_has_figures_of_the_short_sections(tmp_path: Path) -> None:
    found = rehearse(SHORT, tmp_path)
    assert {"d2h"} <= set(found["copies"]["step_share"]) <= {"h2d", "d2h"}  # weights may come before the step begins
    assert found["modes"]["same"]
    assert found["same"]["same"]
    assert "missing" in found["baselines"]["deepspeed"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_rehearsal_has_figures_of_steps(tmp_path: Path) -> None:
    found = rehearse(STEPS, tmp_path)
    assert len(found["step"]["share_of_plain"]) == 2
    assert found["homes"]["plan"]["at_home"]
    assert found["accumulation"]["share"] > 0
    assert all(found[section]["32 tokens"]["share_of_bound"] > 0 for section in ("homes", "few"))
    runs = [figures for of in found.values() for figures in of.values() if isinstance(figures, dict)]
    runs = [run for run in runs if "within_plan" in run]
    assert len(runs) == 2 * 4 + 2 + 2 + 1
    for run in runs:
        assert run["within_plan"]
        assert run["tokens_per_s"] > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_rehearsal_has_figures_of_the_long_sections(tmp_path: Path) -> None:
    found = rehearse(LONG, tmp_path)
    different = {kernel: count for kernel, count in found["bits"].items() if kernel != "took_s"}
    assert len(different) == 12
    assert set(different.values()) == {0}
    for run in (found["largest"], found["largest_8bit"]):
        assert run["falling"]
        assert run["within_plan"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_rehearsal_predicts_seven_configurations(tmp_path: Path) -> None:
    found = rehearse(("predict",), tmp_path)["predict"]
    errors = [run["error"] for run in found.values() if isinstance(run, dict) and "error" in run]
    assert len(errors) == 7
    assert found["worst"] == max(map(abs, errors))


FAILING = """
import time
import gpu, tyro

def hanging(machine):
    yield "first", 1
    time.sleep(600)

def raising(machine):
    yield "first", 1
    raise ValueError("the GPU is gone")

gpu.SECTIONS |= {"kernels": gpu.Section(hanging, 0), "bits": gpu.Section(raising, 0)}
tyro.cli(gpu.main)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "said"), [("kernels", ("Timeout", "in hanging")), ("bits", ("in raising", "the GPU is gone"))]
)
def test_a_section_that_hangs_or_fails_says_where_and_keeps_its_figures(
    section: str, said: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, out = tmp_path / "failing.py", tmp_path / "gpu.json"
    script.write_text(FAILING)
    monkeypatch.setattr(gpu, "__file__", str(script))
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS), prepend=os.pathsep)
    failed = gpu.run_process(section, ["--smoke"], 30.0, out)
    assert failed is not None
    assert all(words in failed for words in said)
    assert gpu.read(out) == {section: {"first": 1}}


def test_sections_for_which_no_time_is_left_say_so(tmp_path: Path) -> None:
    found = gpu.run_apart(("bits", "kernels"), ["--smoke"], 1, time.monotonic() + 5, tmp_path / "gpu.json")
    assert found == {section: {"failed": "left out: no time"} for section in ("bits", "kernels")}


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
