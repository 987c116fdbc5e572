"""Compiles functions with Numba: without the GIL, with strict arithmetic, and cached on disk if possible."""

import fcntl
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast

from numba import njit

_P = ParamSpec("_P")
_R = TypeVar("_R")

# error_model="numpy": a division by zero gives inf as in torch; Python's check would keep the loop scalar.
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False, "fastmath": False}


def kernel(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile a function that Python calls. Of processes that need it at once, one compiles it: the others wait, and
    load what that one has cached.

    A nested function is compiled for the values of its closure. These values become part of its name, and so of the
    name of its cache. Otherwise two processes that compile different versions at once could give them the same number,
    and a later process could load one for the other.
    """
    for cell in function.__closure__ or ():
        function.__qualname__ += f"_{cell.cell_contents}"
    try:
        compiled = cast(Any, njit(cache=True, no_cfunc_wrapper=True, **OPTIONS)(function))
    except RuntimeError:  # Numba found no writable folder for its cache: compile once per process instead
        return cast(Callable[_P, _R], njit(**OPTIONS)(function))
    lock = f"{compiled.stats.cache_path}/{function.__module__}.{function.__qualname__}.lock"
    compiled.compile = partial(_compile_alone, compiled.compile, lock)
    return cast(Callable[_P, _R], compiled)


def _compile_alone(compile_for: Callable[[Any], Any], lock: str, signature: Any) -> Any:
    """Compile a kernel, or load it from the cache, while no other process does."""
    with ExitStack() as held:
        with suppress(OSError):  # a folder or a file system without locks: each process compiles
            file = held.enter_context(open(lock, "ab"))
            fcntl.flock(file, fcntl.LOCK_EX)
            held.callback(fcntl.flock, file, fcntl.LOCK_UN)  # also for children that have a copy of the file
        return compile_for(signature)


def part(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile a function that kernels inline and are cached with."""
    return cast(Callable[_P, _R], njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **OPTIONS)(function))
