"""CPU kernels that store and add gradients, and sum their squares on the way.

Squares of fp32 values are exact in float64 and cannot overflow there, so a sum of squares is non-finite if and only if
an element is. It is kept in LANES partial sums. In each row of 4 * LANES elements, the four that share a lane are added
first, then go to the lane. So the number of elements alone fixes the order, not the width of the CPU's vectors.
(64 lanes spread the stores of one row so far apart that fp32 copies lost a fifth of their rate.)

The loops are spelled out because Numba does not cache a kernel that passes another as an argument.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import carray

from pagoda.jit import kernel, part
from pagoda.optim.elements import BF16, FP32, half_of, value_of, views
from pagoda.optim.jit import (
    LANES,
    ROW,
    bf16_to_fp32,
    bits_to_fp32,
    lane_sums,
    pointer,
    round_to_bf16,
    square_bits,
    sum_of,
)


class GradientKernels(NamedTuple):
    """What stores and what adds gradients: ``(dst address, src address, n) -> sum of squares`` of what is then in dst,
    in float64. Sums are rounded as torch rounds them.
    """

    store_gradient: Callable[[int, int, int], float]
    add_gradient: Callable[[int, int, int], float]


@cache
def gradient_kernels(kept: int, arriving: int) -> GradientKernels:
    """Kernels for gradients that arrive in one form (`elements`) and are kept in the same, or in FP32."""
    return GradientKernels(
        _store_gradient(kept, arriving),
        add_gradient_bf16 if kept == arriving == BF16 else _add_gradient(kept, arriving),
    )


@part
def _square(value: Any) -> Any:
    x = np.float64(value)
    return x * x


def _store_gradient(kept: int, arriving: int) -> Callable[[int, int, int], float]:
    @kernel
    def store_gradient(dst: int, src: int, n: int) -> float:
        to, to_half = views(dst, n)
        source, half = views(src, n)
        lanes = carray(lane_sums(), LANES)
        for j in range(LANES):
            lanes[j] = 0.0
        for row in range(n // ROW):
            for j in range(LANES):
                squares = 0.0
                for k in range(4):
                    i = row * ROW + j + k * LANES
                    value = value_of(arriving, source[i], half[i])
                    if kept == FP32:
                        to[i] = value
                    else:
                        to_half[i] = half[i]
                    squares += _square(value)
                lanes[j] += squares
        for i in range(n // ROW * ROW, n):
            value = value_of(arriving, source[i], half[i])
            if kept == FP32:
                to[i] = value
            else:
                to_half[i] = half[i]
            lanes[i % LANES] += _square(value)
        return sum_of(lanes)

    return store_gradient


def _add_gradient(kept: int, arriving: int) -> Callable[[int, int, int], float]:
    @kernel
    def add_gradient(dst: int, src: int, n: int) -> float:
        to, to_half = views(dst, n)
        source, half = views(src, n)
        lanes = carray(lane_sums(), LANES)
        for j in range(LANES):
            lanes[j] = 0.0
        for row in range(n // ROW):
            for j in range(LANES):
                squares = 0.0
                for k in range(4):
                    i = row * ROW + j + k * LANES
                    total = value_of(kept, to[i], to_half[i]) + value_of(arriving, source[i], half[i])
                    if kept == FP32:
                        to[i] = total
                    else:
                        rounded = half_of(kept, total)
                        to_half[i] = rounded
                        total = value_of(kept, total, rounded)
                    squares += _square(total)
                lanes[j] += squares
        for i in range(n // ROW * ROW, n):
            total = value_of(kept, to[i], to_half[i]) + value_of(arriving, source[i], half[i])
            if kept == FP32:
                to[i] = total
            else:
                rounded = half_of(kept, total)
                to_half[i] = rounded
                total = value_of(kept, total, rounded)
            lanes[i % LANES] += _square(total)
        return sum_of(lanes)

    return add_gradient


@part
def _add_words(a: Any, b: Any) -> Any:
    # Two bf16 sums, of the low and of the high halves, each as fp32 bits.
    mask = np.uint32(0xFFFF0000)
    low = bits_to_fp32(np.uint32(a << 16)) + bits_to_fp32(np.uint32(b << 16))
    high = bits_to_fp32(np.uint32(a & mask)) + bits_to_fp32(np.uint32(b & mask))
    return round_to_bf16(low), round_to_bf16(high)


@kernel
def add_gradient_bf16(dst: int, src: int, n: int) -> float:
    """Takes elements in pairs, as 32-bit words: a third faster than widening each to 32 bits."""
    to = carray(pointer(dst, np.uint32), n // 2)
    source = carray(pointer(src, np.uint32), n // 2)
    lanes = carray(lane_sums(), LANES)
    for j in range(LANES):
        lanes[j] = 0.0
    for row in range(n // ROW):
        for j in range(LANES):
            squares = 0.0
            for k in range(2):
                i = row * (ROW // 2) + j + k * LANES
                low, high = _add_words(to[i], source[i])
                to[i] = np.uint32(high | (low >> 16))
                squares += square_bits(low) + square_bits(high)
            lanes[j] += squares
    last_to = carray(pointer(dst, np.uint16), n)
    last_source = carray(pointer(src, np.uint16), n)
    for i in range(n // ROW * ROW, n):
        total = round_to_bf16(bf16_to_fp32(last_to[i]) + bf16_to_fp32(last_source[i]))
        last_to[i] = np.uint16(total >> 16)
        lanes[i % LANES] += square_bits(total)
    return sum_of(lanes)
