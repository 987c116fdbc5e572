"""Compiles functions with Numba: without the GIL, with strict arithmetic, and cached on disk if possible."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from numba import njit

_P = ParamSpec("_P")
_R = TypeVar("_R")

# error_model="numpy": a division by zero gives inf as in torch; Python's check would keep the loop scalar.
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False, "fastmath": False}


def kernel(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile a function that Python calls.

    A nested function is compiled for the values of its closure. These values become part of its name, and so of the
    name of its cache. Otherwise two processes that compile different versions at once could give them the same number,
    and a later process could load one for the other.
    """
    for cell in function.__closure__ or ():
        function.__qualname__ += f"_{cell.cell_contents}"
    try:
        compiled = njit(cache=True, **OPTIONS)(function)
    except RuntimeError:  # Numba found no writable folder for its cache: compile once per process instead
        compiled = njit(**OPTIONS)(function)
    return cast(Callable[_P, _R], compiled)


def part(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile a function that kernels inline and are cached with."""
    return cast(Callable[_P, _R], njit(**OPTIONS)(function))
