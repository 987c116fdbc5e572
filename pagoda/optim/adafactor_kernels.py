"""Adafactor on the CPU: sums in their fixed order, and the update of weights.

`Adafactor` defines the order of the sums. Addresses, counts and numbers are as in `kernels`. A parameter is `matrices`
matrices of `rows` by `columns`, one after another.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray

from pagoda.jit import kernel, part
from pagoda.optim.arithmetic import FORMS, FP32, adafactor_element, adafactor_rate, factored_update
from pagoda.optim.elements import load, load_master, masters_at, store_master, values_at
from pagoda.optim.factors import COLUMNS, LANES, ROWS, update_factors
from pagoda.optim.jit import on_stack, pointer, rounded


@part
def _fold(values: Any, n: Any) -> None:
    """Add up `n` fp64 values, into the first."""
    while n > 1:
        half = 1
        while 2 * half < n:
            half *= 2
        count = n - half
        low = carray(pointer(values, np.float64), count)
        high = carray(pointer(values + 8 * half, np.float64), count)
        for i in range(count):
            low[i] += high[i]
        n = half


@part
def _add_lanes(form: Any, gradient: Any, scale: Any, by_column: Any, lanes: Any, n: Any) -> None:
    """Add the squares of `n` gradients to `n` sums of columns, and to `n` lanes."""
    grads, of_columns = values_at(gradient, n), carray(pointer(by_column, np.float64), n)
    for i in range(n):
        g = np.float64(load(form, grads, i) * scale)
        lanes[i] += g * g
        of_columns[i] += g * g


@cache
def gradient_kernel(gradients: int) -> Callable[..., None]:
    """The kernel that sums the squares of gradients in one form, as `update_factors` takes them. Sums of columns are
    zeros before."""
    size = 4 if gradients == FP32 else 2

    @kernel
    def sum_gradient(addresses: tuple[int, ...], shape: tuple[int, ...], scale: float) -> None:
        gradient, by_column, by_row = addresses
        matrices, rows, columns = shape
        every = matrices * rows
        of_rows = carray(pointer(by_row, np.float64), every * ((columns + COLUMNS - 1) // COLUMNS))
        lanes = carray(on_stack(np.float64, LANES), LANES)
        for row in range(every):
            sums = by_column + 8 * columns * (row % rows // ROWS * matrices + row // rows)
            for start in range(0, columns, COLUMNS):
                end = min(columns, start + COLUMNS)
                used = min(LANES, end - start)
                lanes[:used] = 0.0
                for first in range(start, end, LANES):
                    at = gradient + size * (row * columns + first)
                    _add_lanes(gradients, at, np.float32(scale), sums + 8 * first, lanes, min(LANES, end - first))
                _fold(lanes.ctypes.data, used)
                of_rows[start // COLUMNS * every + row] = lanes[0]

    return sum_gradient


@cache
def squares_kernel(weights: int, gradients: int, of_updates: bool) -> Callable[..., float]:
    """The kernel that sums the squares of a parameter, or of its update."""
    weight_bytes, gradient_bytes = (4 if form == FP32 else 2 for form in (weights, gradients))

    @kernel
    def sum_squares(addresses: tuple[int, ...], shape: tuple[int, ...], *numbers: float) -> float:
        weight, weight_low, gradient, column_var, shares, _ = addresses
        matrices, rows, columns = shape
        scale, floor = rounded(numbers)
        groups, blocks = (rows + ROWS - 1) // ROWS, (columns + COLUMNS - 1) // COLUMNS
        by_block = np.empty(matrices * groups * blocks)
        sums = np.empty(min(COLUMNS, columns))
        of_rows = carray(pointer(shares, np.float32), matrices * rows)
        for number in range(len(by_block)):
            matrix, group, block = number // (groups * blocks), number // blocks % groups, number % blocks
            first = block * COLUMNS
            width = min(COLUMNS, columns - first)
            sums[:width] = 0.0
            for row in range(group * ROWS, min(rows, (group + 1) * ROWS)):
                at = (matrix * rows + row) * columns + first
                if of_updates:
                    grads = values_at(gradient + gradient_bytes * at, width)
                    column = carray(pointer(column_var + 4 * (matrix * columns + first), np.float32), width)
                    of_row = of_rows[matrix * rows + row]
                    for i in range(width):
                        u = np.float64(factored_update(load(gradients, grads, i) * scale, of_row, column[i], floor))
                        sums[i] += u * u
                else:
                    masters = masters_at(weight + weight_bytes * at, weight_low + 2 * at, width)
                    for i in range(width):
                        w = np.float64(load_master(weights, masters, i))
                        sums[i] += w * w
            _fold(sums.ctypes.data, width)
            by_block[number] = sums[0]
        _fold(by_block.ctypes.data, len(by_block))
        return float(by_block[0])

    return sum_squares


@cache
def step_kernel(weights: int, gradients: int, has_moment: bool) -> Callable[..., None]:
    """The kernel that updates the weights, and the first moment if there is one, with the present factors and sums."""
    weight_bytes, gradient_bytes = (4 if form == FP32 else 2 for form in (weights, gradients))

    @kernel
    def step(addresses: tuple[int, ...], shape: tuple[int, ...], sums: tuple[float, ...], *numbers: float) -> None:
        weight, weight_low, gradient, column_var, shares, moment = addresses
        matrices, rows, columns = shape
        weight_sum, update_sum = sums
        scale, floor, rate, least, most, decay, beta1, one_minus_beta1 = rounded(numbers)
        count = np.float32(matrices * rows * columns)
        scalars = adafactor_rate(weight_sum, update_sum, count, rate, least, most), decay, beta1, one_minus_beta1
        of_rows = carray(pointer(shares, np.float32), matrices * rows)
        for row in range(matrices * rows):
            at = row * columns
            masters = masters_at(weight + weight_bytes * at, weight_low + 2 * at, columns)
            grads = values_at(gradient + gradient_bytes * at, columns)
            column = carray(pointer(column_var + 4 * (row // rows * columns), np.float32), columns)
            avg = carray(pointer(moment + 4 * at, np.float32), columns)
            of_row = of_rows[row]
            for i in range(columns):
                u = factored_update(load(gradients, grads, i) * scale, of_row, column[i], floor)
                w = load_master(weights, masters, i)
                m = avg[i] if has_moment else np.float32(0.0)
                w, m = adafactor_element(w, m, u, scalars, has_moment)
                if has_moment:
                    avg[i] = m
                store_master(weights, masters, i, w)

    return step


def update(
    weight: torch.Tensor,
    weight_low: torch.Tensor | None,
    gradient: torch.Tensor,
    states: Mapping[str, torch.Tensor],
    shape: tuple[int, int, int],
    scalars: Sequence[float],
    scaled: bool,
) -> None:
    """Do one step of a parameter in place.

    weight, weight_low, gradient: as they are stored. states: those of `Adafactor.own_states` that the parameter has.
    All are contiguous and on the CPU. shape: (matrices, rows, columns). scalars: from `Adafactor.scalars`. scaled:
    whether steps scale with the weights.
    """
    grad_scale, share, eps, floor, *others = scalars
    form, arriving = FORMS[weight.dtype], FORMS[gradient.dtype]
    matrices, rows, columns = shape
    by_column = torch.zeros(-(-rows // ROWS), matrices, columns, dtype=torch.float64)
    by_row = torch.empty(-(-columns // COLUMNS), matrices * rows, dtype=torch.float64)
    gradients = (gradient.data_ptr(), by_column.data_ptr(), by_row.data_ptr())
    gradient_kernel(arriving)(gradients, shape, grad_scale)
    shares, moment = update_factors(states, by_column, by_row, shape, share, eps), states.get("exp_avg")
    low = weight if weight_low is None else weight_low
    column_var = states["col_var" if "col_var" in states else "variance"]
    tensors = weight, low, gradient, column_var, shares, weight if moment is None else moment
    addresses = tuple(tensor.data_ptr() for tensor in tensors)
    sums = tuple(
        squares_kernel(form, arriving, of_updates)(addresses, shape, grad_scale, floor) if scaled or of_updates else 0.0
        for of_updates in (False, True)
    )
    step_kernel(form, arriving, moment is not None)(addresses, shape, sums, grad_scale, floor, *others)
