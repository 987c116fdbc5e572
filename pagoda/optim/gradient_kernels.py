"""CPU kernels that store and add gradients, and sum their squares on the way.

Squares of fp32 values are exact in float64 and cannot overflow there, so a sum of squares is non-finite if and only if
an element is. It is kept in LANES partial sums (*lanes*), element i in lane i modulo LANES. In each row of 4 * LANES
elements, the four squares of a lane are added to each other, and then to the lane. In the end, the lanes are added from
first to last. So the order depends on the number of elements alone, not on the width of the CPU's vectors.
(With 64 lanes, the stores of a row were so far apart that fp32 copies took a quarter more time.)
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray

from pagoda.jit import kernel, part
from pagoda.optim.arithmetic import BF16, FORMS, FP32, bf16_to_fp32, fp16_to_fp32, fp32_to_fp16
from pagoda.optim.elements import load, values_at
from pagoda.optim.jit import add, bit_and, bit_or, bits_of, float_of, on_stack, pointer, shift_right

LANES = 32
"""Partial sums of squares."""
ROW = 4 * LANES
"""Elements that are summed in one row; the four that share a lane are added first."""
_HIGH = 0xFFFF0000


class GradientKernels(NamedTuple):
    """Two kernels: one stores gradients, the other adds them. ``(dst address, src address, n) -> sum of squares``, in
    float64, of the new content of dst. Sums are rounded as torch rounds them."""

    store_gradient: Callable[[int, int, int], float]
    add_gradient: Callable[[int, int, int], float]


def arriving_dtype(kept: torch.dtype, weight: torch.dtype) -> torch.dtype:
    """The dtype in which gradients are given to kernels. `kept`: dtype in which they are stored. `weight`: dtype of the
    weights, in which autograd makes them.

    Kernels widen 16 bits to fp32. The caller makes any other conversion.
    """
    return weight if kept in (torch.float32, weight) else kept


@cache
def gradient_kernels(kept: torch.dtype, arriving: torch.dtype | None = None) -> GradientKernels:
    """The kernels for gradients that are given in `arriving` and stored in `kept`, which is the same dtype or fp32."""
    forms = FORMS[kept], FORMS[arriving or kept]
    adding = _add_bf16 if forms == (BF16, BF16) else compiled(*forms, True)
    return GradientKernels(compiled(*forms, False), adding)


@part
def _square(value: Any) -> Any:
    x = np.float64(value)
    return x * x


@part
def _sum_of(lanes: Any) -> float:
    total = 0.0
    for j in range(LANES):
        total += lanes[j]
    return total


@part
def _take(kept: Any, arriving: Any, adding: Any, to: Any, source: Any, i: Any) -> Any:
    """Store or add one element. Returns the square of the new content."""
    value = load(arriving, source, i)
    if adding:
        value = load(kept, to, i) + value
    if kept == FP32:
        to[0][i] = value
    elif adding:
        to[1][i] = half = fp32_to_fp16(value)
        value = fp16_to_fp32(half)
    else:
        to[1][i] = source[1][i]
    return _square(value)


@cache
def compiled(kept: int, arriving: int, adding: bool) -> Callable[[int, int, int], float]:
    """The kernel for gradients that arrive in one form (`arithmetic`) and are kept in the same form or in FP32."""

    @kernel
    def take_gradient(dst: int, src: int, n: int) -> float:
        to, source = values_at(dst, n), values_at(src, n)
        lanes = carray(on_stack(np.float64, LANES), LANES)
        for j in range(LANES):
            lanes[j] = 0.0
        for row in range(n // ROW):
            for j in range(LANES):
                squares = 0.0
                for k in range(4):
                    squares += _take(kept, arriving, adding, to, source, row * ROW + j + k * LANES)
                lanes[j] += squares
        for i in range(n // ROW * ROW, n):
            lanes[i % LANES] += _take(kept, arriving, adding, to, source, i)
        return _sum_of(lanes)

    return take_gradient


@part
def bf16_bits(value: Any) -> Any:
    """The bits of an fp32 value rounded to bf16, to nearest, ties to even, as torch rounds."""
    # A NaN stays one if its low 16 bits are zero, as in every NaN that adding two bf16 values makes; testing for NaN
    # would cost a tenth.
    bits = bits_of(value)
    return bit_and(add(add(bits, 0x7FFF), bit_and(shift_right(bits, 16), 1)), 0xFFFF0000)


@kernel
def _add_bf16(dst: int, src: int, n: int) -> float:
    """Takes elements in pairs, as words: a third faster than widening each to 32 bits."""
    to, source = carray(pointer(dst, np.uint32), n // 2), carray(pointer(src, np.uint32), n // 2)
    lanes = carray(on_stack(np.float64, LANES), LANES)
    for j in range(LANES):
        lanes[j] = 0.0
    for row in range(n // ROW):
        for j in range(LANES):
            squares = 0.0
            for k in range(2):
                i = row * (ROW // 2) + j + k * LANES
                low = bf16_bits(bf16_to_fp32(to[i]) + bf16_to_fp32(source[i]))
                high = bf16_bits(float_of(bit_and(to[i], _HIGH)) + float_of(bit_and(source[i], _HIGH)))
                to[i] = bit_or(high, shift_right(low, 16))
                squares += _square(float_of(low)) + _square(float_of(high))
            lanes[j] += squares
    last_to, last_source = carray(pointer(dst, np.uint16), n), carray(pointer(src, np.uint16), n)
    for i in range(n // ROW * ROW, n):
        total = bf16_bits(bf16_to_fp32(last_to[i]) + bf16_to_fp32(last_source[i]))
        last_to[i] = shift_right(total, 16)
        lanes[i % LANES] += _square(float_of(total))
    return _sum_of(lanes)
