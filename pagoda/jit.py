"""Compiles functions with Numba: without the GIL, with strict arithmetic, and cached on disk if possible."""

import fcntl
import hashlib
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import llvmlite
import numba
import numpy as np
from numba import njit

_P = ParamSpec("_P")
_R = TypeVar("_R")

# error_model="numpy": a division by zero gives inf as in torch; Python's check would keep the loop scalar.
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False, "fastmath": False}


def kernel(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile a function that Python calls. Of processes that need it at once, one compiles it: the others wait, and
    load what that one has cached. It may inline functions and constants of its own folder and of `pagoda.optim`.

    The cache's name contains all that the machine code depends on and that Numba does not compare: `_sources`, and
    for a nested function the values of its closure. So machine code of one version is never found under the name of
    another, whichever processes compile at once, and wherever one of them is killed.
    """
    for cell in function.__closure__ or ():
        function.__qualname__ += f"_{cell.cell_contents}"
    lock = f"{function.__module__}.{function.__qualname__}.lock"
    function.__qualname__ += f"_{_sources(Path(function.__code__.co_filename).parent)}"
    try:
        compiled = cast(Any, njit(cache=True, no_cfunc_wrapper=True, **OPTIONS)(function))
    except RuntimeError:  # Numba found no writable folder for its cache: compile once per process instead
        return cast(Callable[_P, _R], njit(**OPTIONS)(function))
    compiled.compile = partial(_compile_alone, compiled.compile, f"{compiled.stats.cache_path}/{lock}")
    return cast(Callable[_P, _R], compiled)


@cache
def _sources(folder: Path) -> str:
    """A hash of the compiler's versions and of all sources that kernels of `folder` may inline. Numba's cache compares
    the kernel's own file, and the CPU's features."""
    here = Path(__file__)
    versions = f"{numba.__version__} {llvmlite.__version__} {np.__version__}"
    hashed = hashlib.sha256(versions.encode())
    for file in (here, *sorted({*here.with_name("optim").glob("*.py"), *folder.glob("*.py")})):
        source = file.read_bytes()
        hashed.update(f"{file.name} {len(source)} ".encode() + source)
    return hashed.hexdigest()[:16]


def _compile_alone(compile_for: Callable[[Any], Any], lock: str, signature: Any) -> Any:
    """Compile a kernel, or load it from the cache, while no other process does."""
    with ExitStack() as held:
        with suppress(OSError):  # a folder or a file system without locks: each process compiles
            file = held.enter_context(open(lock, "ab"))
            fcntl.flock(file, fcntl.LOCK_EX)
            held.callback(fcntl.flock, file, fcntl.LOCK_UN)  # also for children that have a copy of the file
        return compile_for(signature)


def part(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile a function that kernels inline, so that their cache has its code."""
    return cast(Callable[_P, _R], njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **OPTIONS)(function))
