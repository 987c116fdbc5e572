"""Adafactor on the CPU: sums in their fixed order, factors and update.

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
from pagoda.optim.arithmetic import (
    FORMS,
    FP32,
    adafactor_element,
    adafactor_rate,
    factor_element,
    factored_update,
    row_share,
)
from pagoda.optim.elements import load, load_master, masters_at, store_master, values_at
from pagoda.optim.jit import on_stack, pointer, rounded

ROWS, COLUMNS, LANES = 64, 1024, 128
"""Rows and columns of a block, and sums per row, as `Adafactor` defines them."""


@part
def _fold(values: Any, n: Any, width: Any) -> None:
    """Add up `n` runs of `width` fp64 values, into the first."""
    while n > 1:
        half = 1
        while 2 * half < n:
            half *= 2
        count = (n - half) * width
        low = carray(pointer(values, np.float64), count)
        high = carray(pointer(values + 8 * half * width, np.float64), count)
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
def factors_kernel(gradients: int) -> Callable[..., None]:
    """The kernel that updates the factors of a parameter with gradients in one form. `row_var` is 0 for a vector, which
    has one row. Writes `row_share` of each row of all matrices to `shares`."""
    size = 4 if gradients == FP32 else 2

    @kernel
    def update_factors(addresses: tuple[int, ...], shape: tuple[int, ...], *numbers: float) -> None:
        gradient, row_var, column_var, shares = addresses
        matrices, rows, columns = shape
        scale, rate, eps = rounded(numbers)
        groups, blocks = (rows + ROWS - 1) // ROWS, (columns + COLUMNS - 1) // COLUMNS
        by_column, by_row, by_block = np.empty(groups * columns), np.empty(rows), np.empty(blocks)
        lanes = carray(on_stack(np.float64, LANES), LANES)
        for matrix in range(matrices):
            by_column[:] = 0.0
            for row in range(rows):
                for block in range(blocks):
                    end = min(columns, (block + 1) * COLUMNS)
                    used = min(LANES, end - block * COLUMNS)
                    lanes[:used] = 0.0
                    for first in range(block * COLUMNS, end, LANES):
                        at = gradient + size * ((matrix * rows + row) * columns + first)
                        sums = by_column.ctypes.data + 8 * (row // ROWS * columns + first)
                        _add_lanes(gradients, at, scale, sums, lanes, min(LANES, end - first))
                    _fold(lanes.ctypes.data, used, 1)
                    by_block[block] = lanes[0]
                _fold(by_block.ctypes.data, blocks, 1)
                by_row[row] = by_block[0]
            _fold(by_column.ctypes.data, groups, columns)
            column = carray(pointer(column_var + 4 * matrix * columns, np.float32), columns)
            for i in range(columns):
                column[i] = factor_element(column[i], by_column[i], np.float32(rows), rate)
            of_rows = carray(pointer(shares + 4 * matrix * rows, np.float32), rows)
            if row_var == 0:
                of_rows[:] = np.float32(1.0)
                continue
            factor = carray(pointer(row_var + 4 * matrix * rows, np.float32), rows)
            for i in range(rows):
                factor[i] = factor_element(factor[i], by_row[i], np.float32(columns), rate)
                by_row[i] = np.float64(factor[i])
            _fold(by_row.ctypes.data, rows, 1)
            for i in range(rows):
                of_rows[i] = row_share(factor[i], by_row[0], np.float32(rows), eps)

    return update_factors


@cache
def squares_kernel(weights: int, gradients: int, of_updates: bool) -> Callable[..., float]:
    """The kernel that sums the squares of a parameter, or of its update."""
    weight_bytes, gradient_bytes = (4 if form == FP32 else 2 for form in (weights, gradients))

    @kernel
    def sum_squares(addresses: tuple[int, ...], shape: tuple[int, ...], *numbers: float) -> float:
        weight, weight_low, gradient, column_var, shares = addresses
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
            _fold(sums.ctypes.data, width, 1)
            by_block[number] = sums[0]
        _fold(by_block.ctypes.data, len(by_block), 1)
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
    matrices, rows, _ = shape
    shares = torch.empty(matrices * rows)
    row_var, moment = states.get("row_var"), states.get("exp_avg")
    column_var = states["col_var" if "col_var" in states else "variance"].data_ptr()
    masters = weight.data_ptr(), weight.data_ptr() if weight_low is None else weight_low.data_ptr()
    factor = 0 if row_var is None else row_var.data_ptr()
    factors = (gradient.data_ptr(), factor, column_var, shares.data_ptr())
    factors_kernel(arriving)(factors, shape, grad_scale, share, eps)
    addresses = (*masters, gradient.data_ptr(), column_var, shares.data_ptr())
    sums = tuple(
        squares_kernel(form, arriving, of_updates)(addresses, shape, grad_scale, floor) if scaled or of_updates else 0.0
        for of_updates in (False, True)
    )
    average = masters[0] if moment is None else moment.data_ptr()
    step_kernel(form, arriving, moment is not None)((*addresses, average), shape, sums, grad_scale, floor, *others)
