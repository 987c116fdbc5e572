"""fp16: widened and rounded, and the fp32 master split into an fp16 weight and 16 bits beside it.

Numba has no fp16 on the CPU, and CPUs before AVX512-FP16 have no arithmetic in it: elements are widened to fp32, which
is exact, and rounded back to nearest, ties to even, as torch rounds. Most CPUs have instructions for both (F16C).

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
from llvmlite import ir
from numba import carray, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from pagoda.jit import kernel, part
from pagoda.optim.jit import bits_to_fp32, fp32_to_bits, pointer


def _extend_intrinsic(_context: Any, _half: Any) -> Any:
    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), codegen


def _truncate_intrinsic(_context: Any, _value: Any) -> Any:
    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), codegen


_extend = intrinsic(_extend_intrinsic)
_truncate = intrinsic(_truncate_intrinsic)


@part
def fp16_to_fp32_in_integers(half: Any) -> Any:
    """For CPUs without instructions for it, with their bits."""
    # Shifted into fp32's place, the exponent is 112 too small: one exact multiplication, also for denormals. Infinity
    # and NaN have no larger exponent to go to, and get fp32's; a NaN becomes a quiet one.
    magnitude = np.uint32(np.uint32(half & np.uint32(0x7FFF)) << 13)
    widened = fp32_to_bits(bits_to_fp32(magnitude) * np.float32(2.0**112))
    exponent = np.uint32(0x7FC00000) if magnitude > np.uint32(0x0F800000) else np.uint32(0x7F800000)
    bits = np.uint32(magnitude | exponent) if magnitude >= np.uint32(0x0F800000) else widened
    return bits_to_fp32(np.uint32(bits | np.uint32(np.uint32(half & np.uint32(0x8000)) << 16)))


@part
def fp32_to_fp16_in_integers(value: Any) -> Any:
    """For CPUs without instructions for it, with their bits."""
    # To nearest, ties to even. Denormals: adding 0.5, whose last place is fp16's smallest step, rounds to it.
    bits = fp32_to_bits(value)
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    odd = np.uint32((magnitude >> 13) & 1)
    normal = np.uint32(np.uint32(magnitude - np.uint32(0x38000000) + np.uint32(0xFFF) + odd) >> 13)
    denormal = np.uint32(fp32_to_bits(bits_to_fp32(magnitude) + np.float32(0.5)) - np.uint32(0x3F000000))
    nan = np.uint32(np.uint32(0x7E00) | np.uint32(np.uint32(magnitude >> 13) & np.uint32(0x3FF)))
    special = nan if magnitude > np.uint32(0x7F800000) else np.uint32(0x7C00)
    rounded = denormal if magnitude < np.uint32(0x38800000) else normal
    rounded = special if magnitude >= np.uint32(0x47800000) else rounded
    return np.uint16(rounded | np.uint32((bits >> 16) & np.uint32(0x8000)))


@part
def _fp16_to_fp32_at_once(half: Any) -> Any:
    return _extend(half)


@part
def _fp32_to_fp16_at_once(value: Any) -> Any:
    return _truncate(value)


def _has_conversions() -> bool:
    """Whether the CPU that Numba compiles for converts between fp16 and fp32."""
    triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    return "+f16c" in features.split(",") or triple.startswith(("aarch64", "arm64"))


HAS_CONVERSIONS = _has_conversions()
fp16_to_fp32 = _fp16_to_fp32_at_once if HAS_CONVERSIONS else fp16_to_fp32_in_integers
fp32_to_fp16 = _fp32_to_fp16_at_once if HAS_CONVERSIONS else fp32_to_fp16_in_integers


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
