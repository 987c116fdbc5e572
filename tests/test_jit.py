"""Kernels are compiled once for all processes that start together, and again if anything that they contain changes."""

import inspect
import shutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import llvmlite
import numba
import pytest
import torch
from forked import ended, fork
from numba.core.registry import CPUDispatcher

from pagoda import jit
from pagoda.memory.ssd import hashes
from pagoda.optim import adafactor_kernels, kernels
from pagoda.optim.arithmetic import FP32, PLAIN
from pagoda.optim.gradient_kernels import gradient_kernels

SOURCE = """
from pagoda.jit import kernel

@kernel
def double(x):
    return x + x
"""
PART = """
from pagoda.jit import part

@part
def changed(x):
    return {}
"""
INLINING = """
from pagoda.jit import kernel
from part_to_inline import changed

@kernel
def through(x):
    return changed(x)
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


def test_a_kernel_is_compiled_again_if_what_it_inlines_from_another_file_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "kernel_that_inlines.py").write_text(INLINING)
    for body, result, compiled in (("x + x", 6.0, 1), ("x * x * 1.0", 9.0, 1), ("x + x", 6.0, 0)):
        (tmp_path / "part_to_inline.py").write_text(PART.format(body))

        def call(result: float = result, compiled: int = compiled) -> None:
            through = import_module("kernel_that_inlines").through
            assert through(3.0) == result
            assert sum(through.stats.cache_misses.values()) == compiled

        assert ended(fork(call)) == 0


def test_a_kernels_cache_depends_on_the_compiler_and_on_the_arithmetic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = Path(jit.__file__).parent
    shutil.copy(package / "jit.py", tmp_path)
    shutil.copytree(package / "optim", tmp_path / "optim")
    monkeypatch.setattr(jit, "__file__", str(tmp_path / "jit.py"))

    def sources() -> str:
        return jit._sources.__wrapped__(package / "memory" / "ssd")

    seen = {sources()}
    for file in (tmp_path / "jit.py", tmp_path / "optim" / "arithmetic.py"):
        file.write_text(file.read_text() + "#\n")
        seen.add(sources())
    for compiler in (numba, llvmlite):
        monkeypatch.setattr(compiler, "__version__", "0.0")
        seen.add(sources())
    assert len(seen) == 5
    assert sources() in seen


def _inlined(kernel: Any) -> Iterator[Any]:
    """What a kernel, and all that it inlines, refer to outside themselves."""
    todo, seen = [kernel.py_func], set()
    while todo:
        outside = inspect.getclosurevars(todo.pop())
        for value in (*outside.globals.values(), *outside.nonlocals.values()):
            if id(value) not in seen:
                seen.add(id(value))
                yield value
                if isinstance(value, CPUDispatcher):
                    todo.append(value.py_func)


def test_kernels_inline_only_what_their_cache_depends_on() -> None:
    rules = (*PLAIN, "of 8-bit moments")
    used: list[Any] = [kernels.compiled(name, FP32, FP32, elsewhere, False) for name in rules for elsewhere in (0, 1)]
    used += [*gradient_kernels(torch.bfloat16), kernels.halves(torch.bfloat16, True)]
    used += [value for module in (adafactor_kernels, hashes) for value in vars(module).values()]
    used = [value for value in used if isinstance(value, CPUDispatcher)]
    package = Path(jit.__file__).parent
    counted = {package / "jit.py", *(package / "optim").glob("*.py"), Path(hashes.__file__)}
    inlined = [value for kernel in used for value in _inlined(kernel)]
    files = {Path(inspect.getfile(value.py_func)) for value in inlined if isinstance(value, CPUDispatcher)}
    assert len(used) > 10
    assert package / "optim" / "arithmetic.py" in files
    assert files <= counted


def test_all_that_is_cached_on_disk_is_compiled_by_one_module() -> None:
    package = Path(jit.__file__).parent
    assert [path.name for path in package.rglob("*.py") if "njit(cache=True" in path.read_text()] == ["jit.py"]
