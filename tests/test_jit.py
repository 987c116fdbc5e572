"""Kernels are compiled once for all processes that start together."""

from importlib import import_module
from pathlib import Path

import pytest
from forked import ended, fork

SOURCE = """
from pagoda.jit import kernel

@kernel
def double(x):
    return x + x
"""


def test_processes_that_need_a_kernel_at_once_compile_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernel_to_compile.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    double = import_module("kernel_to_compile").double

    def call() -> None:
        assert double(1.5) == 3.0
        with (tmp_path / "compiled").open("a") as compiled:
            compiled.write("x" * sum(double.stats.cache_misses.values()))

    assert [ended(child) for child in [fork(call) for _ in range(3)]] == [0, 0, 0]
    assert (tmp_path / "compiled").read_text() == "x"
