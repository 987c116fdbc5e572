"""How functions are compiled with Numba: without the GIL, strictly, and cached on disk where that can be written."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from numba import njit

_P = ParamSpec("_P")
_R = TypeVar("_R")

# error_model="numpy": a division by zero gives inf as in torch; Python's check would keep the loop scalar.
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False, "fastmath": False}


def kernel(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function that Python calls.

    One that is defined in another is compiled for the values it has from there. They become part of its name, and with
    it of its cache's: in one file Numba numbers the versions of a function, and of two processes that compile different
    ones at once, both could take the same number, and a later process load one for the other.
    """
    for cell in function.__closure__ or ():
        function.__qualname__ += f"_{cell.cell_contents}"
    try:
        compiled = njit(cache=True, **OPTIONS)(function)
    except RuntimeError:  # Numba found no writable folder for its cache: compile once per process instead
        compiled = njit(**OPTIONS)(function)
    return cast(Callable[_P, _R], compiled)


def part(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function that kernels inline, and are cached with."""
    return cast(Callable[_P, _R], njit(**OPTIONS)(function))
