"""The figures of README.md that are no times of this machine are what their benchmarks give now: `make test-all`.

`tests/test_figures.py` compares the pages with benchmarks/results; this runs the benchmarks again.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST = 0.02
"""The largest share by which a figure may differ."""


def rerun(script: str, out: Path, *arguments: str) -> Any:
    """What a benchmark finds now."""
    command = [sys.executable, str(ROOT / "benchmarks" / script), "--out", str(out), *arguments]
    subprocess.run(command, check=True, cwd=ROOT)
    return json.loads(out.read_text())


def committed(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def differing(old: Any, new: Any, place: str = "") -> Iterator[str]:
    """What differs by more than `MOST`, by place."""
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        for key, value in old.items():
            yield from differing(value, new[key], f"{place}.{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, pair in enumerate(zip(old, new, strict=True)):
            yield from differing(*pair, f"{place}[{number}]")
    elif isinstance(old, int | float) and isinstance(new, int | float):
        if abs(new - old) > MOST * abs(old):
            yield f"{place}: {old} is now {new}"
    elif old != new:
        yield f"{place}: {old!r} is now {new!r}"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_cards_train_what_the_table_says(tmp_path: Path) -> None:
    """Their times are simulated, and do not depend on this machine."""
    assert [*differing(committed("cards"), rerun("cards.py", tmp_path / "cards.json"))] == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_model_beyond_memory_has_the_plan_that_is_said_and_stays_within_its_limit(tmp_path: Path) -> None:
    """The peak itself varies with what else the machine does, by 9% between two runs."""
    arguments = ("--ssd", str(tmp_path), "--models", "llama-1b")
    (now,) = rerun("beyond_memory.py", tmp_path / "beyond_memory.json", *arguments)
    (then,) = (one for one in committed("beyond_memory") if one["model"] == "llama-1b")
    assert now["exit"] == 0
    figures = ("plan_bytes", "limit")
    assert [*differing({key: then[key] for key in figures}, {key: now[key] for key in figures})] == []


def test_a_figure_that_has_changed_is_named() -> None:
    old = {"a": [1.0, {"b": 100}], "c": "x"}
    assert [*differing(old, {"a": [1.01, {"b": 102}], "c": "x"})] == []
    assert [*differing(old, {"a": [1.03, {"b": 97}], "c": "y"})] == [
        ".a[0]: 1.0 is now 1.03",
        ".a[1].b: 100 is now 97",
        ".c: 'x' is now 'y'",
    ]
    assert [*differing(old, {"a": [1.0]})] == [": {'a': [1.0, {'b': 100}], 'c': 'x'} is now {'a': [1.0]}"]
