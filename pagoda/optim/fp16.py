"""fp16 in integers: its kernels, and the fp32 master split into an fp16 weight and 16 bits beside it.

Numba has no fp16 on the CPU, and neither have CPUs before AVX512-FP16 arithmetic in it: elements are widened to fp32,
which is exact, and rounded back to nearest, ties to even, as torch rounds.

**Split master.** In precision "fp16" the master is kept as::

    weight     = fp16(master)                            what compute reads; 65,520 and more become infinity
    unit       = 2 ** (max(E, 1) - 40)                   E: the biased exponent of weight
    weight_low = int16(rint((master - weight) / unit))   at most 2 ** 14 in magnitude
    master     = weight + weight_low * unit

fp16 has fewer exponents than fp32, so the bits of the master cannot be cut in two, as those of bf16 are: kept beside is
the distance to the weight, in units of its last place / 2 ** 15. That is exact from 2 ** -16 (1.5e-5) on in magnitude;
below, where fp16 itself is denormal, the master is rounded to a multiple of 2 ** -39 (1.8e-12). What was joined is kept
exactly when it is split again.
"""

from typing import Any

import numpy as np
from numba import carray

from pagoda.jit import kernel, part
from pagoda.optim.jit import LANES, ROW, bf16_to_fp32, bits_to_fp32, fp32_to_bits, lane_sums, pointer, sum_of

LARGEST = 65504.0
"""The largest finite fp16 value."""


@part
def fp16_to_fp32(half: Any) -> Any:
    # Shifted into fp32's place, the exponent is 112 too small: one exact multiplication, also for denormals. Infinity
    # and NaN have no larger exponent to go to, and get fp32's.
    magnitude = np.uint32(np.uint32(half & np.uint32(0x7FFF)) << 13)
    widened = fp32_to_bits(bits_to_fp32(magnitude) * np.float32(2.0**112))
    special = np.uint32(magnitude | np.uint32(0x7F800000))
    bits = special if magnitude >= np.uint32(0x0F800000) else widened
    return bits_to_fp32(np.uint32(bits | np.uint32(np.uint32(half & np.uint32(0x8000)) << 16)))


@part
def fp32_to_fp16(value: Any) -> Any:
    # To nearest, ties to even. Denormals: adding 0.5, whose last place is fp16's smallest step, rounds to it.
    bits = fp32_to_bits(value)
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    odd = np.uint32((magnitude >> 13) & 1)
    normal = np.uint32(np.uint32(magnitude - np.uint32(0x38000000) + np.uint32(0xFFF) + odd) >> 13)
    denormal = np.uint32(fp32_to_bits(bits_to_fp32(magnitude) + np.float32(0.5)) - np.uint32(0x3F000000))
    special = np.uint32(0x7E00) if magnitude > np.uint32(0x7F800000) else np.uint32(0x7C00)
    rounded = denormal if magnitude < np.uint32(0x38800000) else normal
    rounded = special if magnitude >= np.uint32(0x47800000) else rounded
    return np.uint16(rounded | np.uint32((bits >> 16) & np.uint32(0x8000)))


@part
def _exponent(half: Any) -> Any:
    exponent = np.uint32(np.uint32(half >> 10) & np.uint32(0x1F))
    return exponent if exponent > np.uint32(1) else np.uint32(1)


@part
def joined_fp16(high: Any, low: Any) -> Any:
    unit = bits_to_fp32(np.uint32(np.uint32(_exponent(high) + np.uint32(127 - 40)) << 23))
    return fp16_to_fp32(high) - np.float32(-np.int32(low)) * unit  # subtracting zero keeps a negative zero


@part
def low_half_fp16(value: Any, high: Any) -> Any:
    # Every step is exact but the rounding to an integer: in 1.5 * 2 ** 23 the last place is one, and the low bits are
    # the integer's own.
    per_unit = bits_to_fp32(np.uint32(np.uint32(np.uint32(127 + 40) - _exponent(high)) << 23))
    distance = (value - fp16_to_fp32(high)) * per_unit
    return np.int16(fp32_to_bits(distance + np.float32(12582912.0)))


@kernel
def split_fp16(master: int, weight: int, weight_low: int, n: int) -> None:
    """Splits ``n`` fp32 elements into fp16 weights and int16 distances."""
    whole = carray(pointer(master, np.float32), n)
    high = carray(pointer(weight, np.uint16), n)
    low = carray(pointer(weight_low, np.int16), n)
    for i in range(n):
        half = fp32_to_fp16(whole[i])
        low[i] = low_half_fp16(whole[i], half)
        high[i] = half


@kernel
def join_fp16(weight: int, weight_low: int, master: int, n: int) -> None:
    """``n`` fp32 elements from what `split_fp16` made of them."""
    high = carray(pointer(weight, np.uint16), n)
    low = carray(pointer(weight_low, np.int16), n)
    whole = carray(pointer(master, np.float32), n)
    for i in range(n):
        whole[i] = joined_fp16(high[i], low[i])


@kernel
def widen_fp16(dst: int, src: int, n: int) -> None:
    """Copies ``n`` fp16 elements to fp32."""
    to = carray(pointer(dst, np.float32), n)
    source = carray(pointer(src, np.uint16), n)
    for i in range(n):
        to[i] = fp16_to_fp32(source[i])


@kernel
def widen_bf16(dst: int, src: int, n: int) -> None:
    """Copies ``n`` bf16 elements to fp32."""
    to = carray(pointer(dst, np.float32), n)
    source = carray(pointer(src, np.uint16), n)
    for i in range(n):
        to[i] = bf16_to_fp32(source[i])


# As those of `kernels` for gradients: the order of the sum follows from n alone.


@part
def _square_fp16(half: Any) -> Any:
    x = np.float64(fp16_to_fp32(half))
    return x * x


@kernel
def store_gradient_fp16(dst: int, src: int, n: int) -> float:
    """Copies ``n`` fp16 elements; returns their sum of squares in float64."""
    to = carray(pointer(dst, np.uint16), n)
    source = carray(pointer(src, np.uint16), n)
    lanes = carray(lane_sums(), LANES)
    for j in range(LANES):
        lanes[j] = 0.0
    for row in range(n // ROW):
        for j in range(LANES):
            squares = 0.0
            for k in range(4):
                i = row * ROW + j + k * LANES
                to[i] = source[i]
                squares += _square_fp16(source[i])
            lanes[j] += squares
    for i in range(n // ROW * ROW, n):
        to[i] = source[i]
        lanes[i % LANES] += _square_fp16(source[i])
    return sum_of(lanes)


@kernel
def add_gradient_fp16(dst: int, src: int, n: int) -> float:
    """``dst += src`` on ``n`` fp16 elements, with torch's bits; returns the new sum of squares in float64."""
    to = carray(pointer(dst, np.uint16), n)
    source = carray(pointer(src, np.uint16), n)
    lanes = carray(lane_sums(), LANES)
    for j in range(LANES):
        lanes[j] = 0.0
    for row in range(n // ROW):
        for j in range(LANES):
            squares = 0.0
            for k in range(4):
                i = row * ROW + j + k * LANES
                total = fp32_to_fp16(fp16_to_fp32(to[i]) + fp16_to_fp32(source[i]))
                to[i] = total
                squares += _square_fp16(total)
            lanes[j] += squares
    for i in range(n // ROW * ROW, n):
        total = fp32_to_fp16(fp16_to_fp32(to[i]) + fp16_to_fp32(source[i]))
        to[i] = total
        lanes[i % LANES] += _square_fp16(total)
    return sum_of(lanes)
