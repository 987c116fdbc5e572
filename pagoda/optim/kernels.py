"""CPU kernels by address: strict Numba, compiled for this machine on first use.

This is the hot path. A kernel takes addresses (``Tensor.data_ptr()``, or a page's address plus an offset in
bytes) and an element count, checks nothing, and touches no Python object, so lane threads run it side by
side (``nogil``) block by block, and a call costs about half a microsecond. `flat` is the checked front.

Invariants the caller keeps: each address is the start of ``n`` elements of the stated type that stay alive
and unshared during the call; regions do not overlap; scalars are Python floats; the thread does not flush
denormals (``torch.set_flush_denormal``), as that changes bits. Any alignment is correct; 64 bytes is best.

Strict means no fast-math and no contraction: each operation rounds once, in the order that `adamw` states.
All jitted code is in this one file because Numba's disk cache notices changes only in the kernel's own file.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import numpy as np
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from pagoda.optim.adamw import Precision, Scalars, check_moments, check_precision
from pagoda.optim.codecs import (
    BLOCK,
    LINES,
    MAX_NOISY,
    TENTH_STEPS,
    TOP_SIGNED,
    TOP_UNSIGNED,
    ZERO_SIGNED,
    Moments,
)

_P = ParamSpec("_P")
_R = TypeVar("_R")

# error_model="numpy": a division by zero gives inf as in torch; Python's check would keep the loop scalar.
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False, "fastmath": False}

# A sum of squares is kept in LANES partial sums. In each row of 4 * LANES elements, the four that share a
# lane are added first, then go to the lane. So n alone fixes the order, not the width of the CPU's vectors.
# (64 lanes spread the stores of one row so far apart that fp32 copies lost a fifth of their rate.)
LANES = 32
_ROW = 4 * LANES


def _kernel(function: Callable[_P, _R]) -> Callable[_P, _R]:
    try:
        compiled = njit(cache=True, **OPTIONS)(function)
    except RuntimeError:  # Numba found no writable folder for its cache: compile once per process instead
        compiled = njit(**OPTIONS)(function)
    return cast(Callable[_P, _R], compiled)


def _part(function: Callable[_P, _R]) -> Callable[_P, _R]:
    # Inlined into the kernels that use it, and cached with them.
    return cast(Callable[_P, _R], njit(**OPTIONS)(function))


def _pointer_intrinsic(_context: Any, address: Any, dtype: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(dtype.dtype)(address, dtype), codegen


def _bits_to_fp32_intrinsic(_context: Any, _bits: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(types.float32))

    return types.float32(types.uint32), codegen


def _fp32_to_bits_intrinsic(_context: Any, _value: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(types.uint32))

    return types.uint32(types.float32), codegen


def _lanes_intrinsic(_context: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        # On the stack: no allocation per call, and LLVM knows that nothing else points there.
        return cgutils.alloca_once(builder, context.get_value_type(types.float64), size=LANES)

    return types.CPointer(types.float64)(), codegen


def _block_intrinsic(_context: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        return cgutils.alloca_once(builder, context.get_value_type(types.float32), size=2 * BLOCK)

    return types.CPointer(types.float32)(), codegen


_pointer = intrinsic(_pointer_intrinsic)
_bits_to_fp32 = intrinsic(_bits_to_fp32_intrinsic)
_fp32_to_bits = intrinsic(_fp32_to_bits_intrinsic)
_lanes = intrinsic(_lanes_intrinsic)
_block = intrinsic(_block_intrinsic)

# Numba widens uint32 arithmetic to 64 bits; the casts below bring it back, so that it wraps and vectorises.


@_part
def _bf16_to_fp32(half: Any) -> Any:
    return _bits_to_fp32(np.uint32(np.uint32(half) << 16))


@_part
def _round_to_bf16(value: Any) -> Any:
    # As fp32 bits: to nearest, ties to even, as torch rounds. A NaN stays one if its low 16 bits are zero, as
    # in every NaN that adding two bf16 values makes; testing for NaN would cost a tenth.
    bits = _fp32_to_bits(value)
    return np.uint32(np.uint32(bits + np.uint32(0x7FFF) + np.uint32((bits >> 16) & 1)) & np.uint32(0xFFFF0000))


@_part
def _square_bits(bits: Any) -> Any:
    x = np.float64(_bits_to_fp32(bits))
    return x * x


@_part
def _join(high: Any, low: Any) -> Any:
    return _bits_to_fp32(np.uint32(np.uint32(np.uint32(high) << 16) + np.uint32(np.int32(low))))


@_part
def _high_half(value: Any) -> Any:
    return np.uint16(np.uint32(_fp32_to_bits(value) + np.uint32(0x8000)) >> 16)


@_part
def _low_half(value: Any) -> Any:
    return np.int16(_fp32_to_bits(value))


@_part
def _round_scalars(scalars: Any) -> Any:
    s, d, b1, c1, b2, c2, root, eps, size = scalars
    f = np.float32
    return f(s), f(d), f(b1), f(c1), f(b2), f(c2), f(root), f(eps), f(size)


@_part
def _adamw(w: Any, m: Any, v: Any, gradient: Any, scalars: Any) -> Any:
    grad_scale, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, bias2_sqrt, eps, step_size = scalars
    g = gradient * grad_scale
    w = w * decay
    m = m * beta1 + g * one_minus_beta1
    v = v * beta2 + (g * g) * one_minus_beta2
    w = w - step_size * (m / (np.sqrt(v) / bias2_sqrt + eps))
    return w, m, v


@_kernel
def adamw_bf16(
    weight: int, weight_low: int, exp_avg: int, exp_avg_sq: int, gradient: int, n: int, *scalars: float
) -> None:
    """AdamW in place on ``n`` elements: bf16 weight, int16 low half, fp32 moments, bf16 gradient.

    The operations and their order are the contract in `adamw`; ``scalars`` are the fields of `Scalars`.
    The gradient is only read. Moves 26 bytes per element: 14 read, 12 written.
    """
    high = carray(_pointer(weight, np.uint16), n)
    low = carray(_pointer(weight_low, np.int16), n)
    avg = carray(_pointer(exp_avg, np.float32), n)
    avg_sq = carray(_pointer(exp_avg_sq, np.float32), n)
    grad = carray(_pointer(gradient, np.uint16), n)
    rounded = _round_scalars(scalars)
    for i in range(n):
        w, m, v = _adamw(_join(high[i], low[i]), avg[i], avg_sq[i], _bf16_to_fp32(grad[i]), rounded)
        avg[i] = m
        avg_sq[i] = v
        high[i] = _high_half(w)
        low[i] = _low_half(w)


@_kernel
def adamw_fp32(weight: int, exp_avg: int, exp_avg_sq: int, gradient: int, n: int, *scalars: float) -> None:
    """AdamW in place on ``n`` elements, all fp32.

    Moves 28 bytes per element: 16 read, 12 written.
    """
    master = carray(_pointer(weight, np.float32), n)
    avg = carray(_pointer(exp_avg, np.float32), n)
    avg_sq = carray(_pointer(exp_avg_sq, np.float32), n)
    grad = carray(_pointer(gradient, np.float32), n)
    rounded = _round_scalars(scalars)
    for i in range(n):
        w, m, v = _adamw(master[i], avg[i], avg_sq[i], grad[i], rounded)
        avg[i] = m
        avg_sq[i] = v
        master[i] = w


# AdamW with bf16 moments, rounded stochastically.


@_part
def _noise(index: Any, low: Any, high: Any) -> Any:
    x = np.uint32(np.uint32(index) ^ low)
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(16))) * np.uint32(0x7FEB352D))
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(15))) + high)
    x = np.uint32(x * np.uint32(0x846CA68B))
    return np.uint32(x ^ np.uint32(x >> np.uint32(16)))


@_part
def _round_noisily(value: Any, noise: Any) -> Any:
    bits = _fp32_to_bits(value)
    noise = noise if np.uint32(bits & np.uint32(0x7FFFFFFF)) < np.uint32(MAX_NOISY) else np.uint32(0)
    return np.uint16(np.uint32(bits + noise) >> np.uint32(16))


@_kernel
def adamw_bf16_moments_bf16(
    weight: int,
    weight_low: int,
    exp_avg: int,
    exp_avg_sq: int,
    gradient: int,
    n: int,
    index: int,
    key_low: int,
    key_high: int,
    *scalars: float,
) -> None:
    """`adamw_bf16` with bf16 moments, rounded as `codecs` says: elements from number ``index`` of their parameter on.

    Moves 18 bytes per element: 10 read, 8 written.
    """
    high = carray(_pointer(weight, np.uint16), n)
    low = carray(_pointer(weight_low, np.int16), n)
    avg = carray(_pointer(exp_avg, np.uint16), n)
    avg_sq = carray(_pointer(exp_avg_sq, np.uint16), n)
    grad = carray(_pointer(gradient, np.uint16), n)
    rounded = _round_scalars(scalars)
    first, second = np.uint32(key_low), np.uint32(key_high)
    for i in range(n):
        m, v = _bf16_to_fp32(avg[i]), _bf16_to_fp32(avg_sq[i])
        w, m, v = _adamw(_join(high[i], low[i]), m, v, _bf16_to_fp32(grad[i]), rounded)
        noise = _noise(index + i, first, second)
        avg[i] = _round_noisily(m, np.uint32(noise & np.uint32(0xFFFF)))
        avg_sq[i] = _round_noisily(v, np.uint32(noise >> np.uint32(16)))
        high[i] = _high_half(w)
        low[i] = _low_half(w)


@_kernel
def adamw_fp32_moments_bf16(
    weight: int,
    exp_avg: int,
    exp_avg_sq: int,
    gradient: int,
    n: int,
    index: int,
    key_low: int,
    key_high: int,
    *scalars: float,
) -> None:
    """`adamw_fp32` with bf16 moments, as `adamw_bf16_moments_bf16`.

    Moves 20 bytes per element: 12 read, 8 written.
    """
    master = carray(_pointer(weight, np.float32), n)
    avg = carray(_pointer(exp_avg, np.uint16), n)
    avg_sq = carray(_pointer(exp_avg_sq, np.uint16), n)
    grad = carray(_pointer(gradient, np.float32), n)
    rounded = _round_scalars(scalars)
    first, second = np.uint32(key_low), np.uint32(key_high)
    for i in range(n):
        w, m, v = _adamw(master[i], _bf16_to_fp32(avg[i]), _bf16_to_fp32(avg_sq[i]), grad[i], rounded)
        noise = _noise(index + i, first, second)
        avg[i] = _round_noisily(m, np.uint32(noise & np.uint32(0xFFFF)))
        avg_sq[i] = _round_noisily(v, np.uint32(noise >> np.uint32(16)))
        master[i] = w


# AdamW with 8-bit moments. The maps are computed rather than looked up: gathers are several times slower here.


@_part
def _magnitude(value: Any) -> Any:
    return np.uint32(_fp32_to_bits(value) & np.uint32(0x7FFFFFFF))


@_part
def _map_value(place: Any) -> Any:
    p = np.float32(1)
    small = place < np.float32(16)
    p = np.float32(1e-4) if small else p
    f = place * np.float32(16) if small else place
    small = f < np.float32(64)
    p = p * np.float32(1e-2) if small else p
    f = f * np.float32(4) if small else f
    small = f < np.float32(128)
    p = p * np.float32(1e-1) if small else p
    f = f * np.float32(2) if small else f
    return p * (f * np.float32(TENTH_STEPS) - np.float32(0.8))


@_part
def _decode_signed(code: Any) -> Any:
    k = np.int32(np.int32(code) & np.int32(127))
    value = _map_value(np.float32(k) * np.float32(2) + np.float32(1))
    value = np.float32(1) if k == np.int32(127) else value
    value = np.float32(0) if k == np.int32(0) else value
    sign = np.uint32(np.uint32(code) >> np.uint32(7))
    return _bits_to_fp32(np.uint32(_fp32_to_bits(value) | np.uint32(sign << np.uint32(31))))


@_part
def _decode_unsigned(code: Any) -> Any:
    k = np.int32(code)
    value = _map_value(np.float32(k) + np.float32(1.5))
    value = np.float32(1) if k == np.int32(255) else value
    return np.float32(0) if k == np.int32(0) else value


@_part
def _line(x: Any, e: Any) -> Any:
    return x * np.float32(LINES[e][0]) + np.float32(LINES[e][1])


@_part
def _lower(a: Any, b: Any) -> Any:
    return a if a < b else b


@_part
def _higher(a: Any, b: Any) -> Any:
    return a if a > b else b


@_part
def _map_place(x: Any) -> Any:
    # Spelled out, as a loop would not be unrolled before the loop over elements is vectorised.
    u = _lower(_line(x, 0), _lower(_line(x, 1), _line(x, 2)))
    return _lower(u, _lower(_lower(_line(x, 3), _line(x, 4)), _lower(_line(x, 5), _line(x, 6))))


@_part
def _nearest(u: Any) -> Any:
    n = _bits_to_fp32(np.uint32(_fp32_to_bits(u) & np.uint32(0x7F800000)))
    return u - np.float32(1) if u - n < np.float32(0.2) else u


@_part
def _encode_signed(value: Any, inverse: Any) -> Any:
    x = _bits_to_fp32(_magnitude(value)) * inverse
    u = _nearest(_higher(_map_place(x), np.float32(1)))
    u = _lower(_higher(u, np.float32(1)), np.float32(126.5))
    u = np.float32(127) if x >= np.float32(TOP_SIGNED) else u
    u = np.float32(0) if x < np.float32(ZERO_SIGNED) else u
    sign = np.uint32(np.uint32(_fp32_to_bits(value) >> np.uint32(24)) & np.uint32(128))
    return np.uint8(np.uint32(np.uint32(np.int32(u)) | sign))


@_part
def _encode_unsigned(value: Any, inverse: Any) -> Any:
    x = _bits_to_fp32(_magnitude(value)) * inverse
    u = _nearest(_higher(_map_place(x) * np.float32(2), np.float32(2))) - np.float32(1)
    u = _lower(_higher(u, np.float32(1)), np.float32(254.5))
    u = np.float32(255) if x >= np.float32(TOP_UNSIGNED) else u
    u = u if x > np.float32(0) else np.float32(0)
    return np.uint8(np.int32(u))


@_part
def _scale(top: Any) -> Any:
    # Of a block whose largest magnitude has the bits `top`; 0 or NaN where the block becomes zeros.
    if top >= np.uint32(0x7F800000):
        return np.float32(np.nan)
    return _bits_to_fp32(top) if top >= np.uint32(0x00800000) else np.float32(0)


@_part
def _encode_block_signed(codes: Any, first: Any, values: Any, at: Any, count: Any, top: Any) -> Any:
    scale = _scale(top)
    if scale > np.float32(0):
        inverse = np.float32(1) / scale
        for i in range(count):
            codes[first + i] = _encode_signed(values[at + i], inverse)
    else:
        for i in range(count):
            codes[first + i] = np.uint8(0)
    return scale


@_part
def _encode_block_unsigned(codes: Any, first: Any, values: Any, at: Any, count: Any, top: Any) -> Any:
    scale = _scale(top)
    if scale > np.float32(0):
        inverse = np.float32(1) / scale
        for i in range(count):
            codes[first + i] = _encode_unsigned(values[at + i], inverse)
    else:
        for i in range(count):
            codes[first + i] = np.uint8(0)
    return scale


@_kernel
def adamw_bf16_moments_8bit(
    weight: int,
    weight_low: int,
    exp_avg: int,
    exp_avg_sq: int,
    exp_avg_scale: int,
    exp_avg_sq_scale: int,
    gradient: int,
    n: int,
    *scalars: float,
) -> None:
    """`adamw_bf16` with moments quantized as `codecs` says; the first element is the first of a block.

    Moves 14 bytes per element (8 read, 6 written) and 16 per block.
    """
    high = carray(_pointer(weight, np.uint16), n)
    low = carray(_pointer(weight_low, np.int16), n)
    avg = carray(_pointer(exp_avg, np.uint8), n)
    avg_sq = carray(_pointer(exp_avg_sq, np.uint8), n)
    blocks = (n + BLOCK - 1) // BLOCK
    avg_scale = carray(_pointer(exp_avg_scale, np.float32), blocks)
    avg_sq_scale = carray(_pointer(exp_avg_sq_scale, np.float32), blocks)
    grad = carray(_pointer(gradient, np.uint16), n)
    rounded = _round_scalars(scalars)
    new = carray(_block(), 2 * BLOCK)
    for block in range(blocks):
        first = block * BLOCK
        count = min(BLOCK, n - first)
        scale, scale_sq = avg_scale[block], avg_sq_scale[block]
        top, top_sq = np.uint32(0), np.uint32(0)
        for j in range(count):
            i = first + j
            m, v = _decode_signed(avg[i]) * scale, _decode_unsigned(avg_sq[i]) * scale_sq
            w, m, v = _adamw(_join(high[i], low[i]), m, v, _bf16_to_fp32(grad[i]), rounded)
            high[i] = _high_half(w)
            low[i] = _low_half(w)
            new[j] = m
            new[BLOCK + j] = v
            top = max(top, _magnitude(m))
            top_sq = max(top_sq, _magnitude(v))
        avg_scale[block] = _encode_block_signed(avg, first, new, 0, count, top)
        avg_sq_scale[block] = _encode_block_unsigned(avg_sq, first, new, BLOCK, count, top_sq)


@_kernel
def adamw_fp32_moments_8bit(
    weight: int,
    exp_avg: int,
    exp_avg_sq: int,
    exp_avg_scale: int,
    exp_avg_sq_scale: int,
    gradient: int,
    n: int,
    *scalars: float,
) -> None:
    """`adamw_fp32` with moments quantized, as `adamw_bf16_moments_8bit`.

    Moves 16 bytes per element (10 read, 6 written) and 16 per block.
    """
    master = carray(_pointer(weight, np.float32), n)
    avg = carray(_pointer(exp_avg, np.uint8), n)
    avg_sq = carray(_pointer(exp_avg_sq, np.uint8), n)
    blocks = (n + BLOCK - 1) // BLOCK
    avg_scale = carray(_pointer(exp_avg_scale, np.float32), blocks)
    avg_sq_scale = carray(_pointer(exp_avg_sq_scale, np.float32), blocks)
    grad = carray(_pointer(gradient, np.float32), n)
    rounded = _round_scalars(scalars)
    new = carray(_block(), 2 * BLOCK)
    for block in range(blocks):
        first = block * BLOCK
        count = min(BLOCK, n - first)
        scale, scale_sq = avg_scale[block], avg_sq_scale[block]
        top, top_sq = np.uint32(0), np.uint32(0)
        for j in range(count):
            i = first + j
            m, v = _decode_signed(avg[i]) * scale, _decode_unsigned(avg_sq[i]) * scale_sq
            w, m, v = _adamw(master[i], m, v, grad[i], rounded)
            master[i] = w
            new[j] = m
            new[BLOCK + j] = v
            top = max(top, _magnitude(m))
            top_sq = max(top_sq, _magnitude(v))
        avg_scale[block] = _encode_block_signed(avg, first, new, 0, count, top)
        avg_sq_scale[block] = _encode_block_unsigned(avg_sq, first, new, BLOCK, count, top_sq)


@_kernel
def encode_signed(values: int, codes: int, scales: int, n: int) -> None:
    """``n`` fp32 elements, from the first of a block on, to 8-bit codes of exp_avg and a scale for each block."""
    value = carray(_pointer(values, np.float32), n)
    code = carray(_pointer(codes, np.uint8), n)
    scale = carray(_pointer(scales, np.float32), (n + BLOCK - 1) // BLOCK)
    for block in range((n + BLOCK - 1) // BLOCK):
        first = block * BLOCK
        count = min(BLOCK, n - first)
        top = np.uint32(0)
        for j in range(count):
            top = max(top, _magnitude(value[first + j]))
        scale[block] = _encode_block_signed(code, first, value, first, count, top)


@_kernel
def encode_unsigned(values: int, codes: int, scales: int, n: int) -> None:
    """`encode_signed` for exp_avg_sq, whose elements are not below zero."""
    value = carray(_pointer(values, np.float32), n)
    code = carray(_pointer(codes, np.uint8), n)
    scale = carray(_pointer(scales, np.float32), (n + BLOCK - 1) // BLOCK)
    for block in range((n + BLOCK - 1) // BLOCK):
        first = block * BLOCK
        count = min(BLOCK, n - first)
        top = np.uint32(0)
        for j in range(count):
            top = max(top, _magnitude(value[first + j]))
        scale[block] = _encode_block_unsigned(code, first, value, first, count, top)


@_kernel
def decode_signed(codes: int, scales: int, values: int, n: int) -> None:
    """``n`` fp32 elements of exp_avg, from the first of a block on, from their codes and scales."""
    code = carray(_pointer(codes, np.uint8), n)
    scale = carray(_pointer(scales, np.float32), (n + BLOCK - 1) // BLOCK)
    value = carray(_pointer(values, np.float32), n)
    for i in range(n):
        value[i] = _decode_signed(code[i]) * scale[i // BLOCK]


@_kernel
def decode_unsigned(codes: int, scales: int, values: int, n: int) -> None:
    """`decode_signed` for exp_avg_sq."""
    code = carray(_pointer(codes, np.uint8), n)
    scale = carray(_pointer(scales, np.float32), (n + BLOCK - 1) // BLOCK)
    value = carray(_pointer(values, np.float32), n)
    for i in range(n):
        value[i] = _decode_unsigned(code[i]) * scale[i // BLOCK]


# Gradient kernels. Squares of fp32 values are exact in float64 and cannot overflow there, so a sum of squares
# is non-finite if and only if an element is. The four are spelled out because Numba does not cache a kernel
# that passes another as an argument.


@_part
def _square_bf16(half: Any) -> Any:
    x = np.float64(_bf16_to_fp32(half))
    return x * x


@_part
def _square_fp32(value: Any) -> Any:
    x = np.float64(value)
    return x * x


@_part
def _sum(lanes: Any) -> float:
    total = 0.0
    for j in range(LANES):
        total += lanes[j]
    return total


@_kernel
def store_gradient_bf16(dst: int, src: int, n: int) -> float:
    """Copies ``n`` bf16 elements; returns their sum of squares in float64."""
    to = carray(_pointer(dst, np.uint16), n)
    source = carray(_pointer(src, np.uint16), n)
    lanes = carray(_lanes(), LANES)
    for j in range(LANES):
        lanes[j] = 0.0
    for row in range(n // _ROW):
        for j in range(LANES):
            squares = 0.0
            for k in range(4):
                i = row * _ROW + j + k * LANES
                to[i] = source[i]
                squares += _square_bf16(source[i])
            lanes[j] += squares
    for i in range(n // _ROW * _ROW, n):
        to[i] = source[i]
        lanes[i % LANES] += _square_bf16(source[i])
    return _sum(lanes)


@_kernel
def store_gradient_fp32(dst: int, src: int, n: int) -> float:
    """Copies ``n`` fp32 elements; returns their sum of squares in float64."""
    to = carray(_pointer(dst, np.float32), n)
    source = carray(_pointer(src, np.float32), n)
    lanes = carray(_lanes(), LANES)
    for j in range(LANES):
        lanes[j] = 0.0
    for row in range(n // _ROW):
        for j in range(LANES):
            squares = 0.0
            for k in range(4):
                i = row * _ROW + j + k * LANES
                to[i] = source[i]
                squares += _square_fp32(source[i])
            lanes[j] += squares
    for i in range(n // _ROW * _ROW, n):
        to[i] = source[i]
        lanes[i % LANES] += _square_fp32(source[i])
    return _sum(lanes)


@_part
def _add_words(a: Any, b: Any) -> Any:
    # Two bf16 sums, of the low and of the high halves, each as fp32 bits.
    mask = np.uint32(0xFFFF0000)
    low = _bits_to_fp32(np.uint32(a << 16)) + _bits_to_fp32(np.uint32(b << 16))
    high = _bits_to_fp32(np.uint32(a & mask)) + _bits_to_fp32(np.uint32(b & mask))
    return _round_to_bf16(low), _round_to_bf16(high)


@_kernel
def add_gradient_bf16(dst: int, src: int, n: int) -> float:
    """``dst += src`` on ``n`` bf16 elements, with torch's bits; returns the new sum of squares in float64.

    Takes elements in pairs, as 32-bit words: a third faster than widening each to 32 bits.
    """
    to = carray(_pointer(dst, np.uint32), n // 2)
    source = carray(_pointer(src, np.uint32), n // 2)
    lanes = carray(_lanes(), LANES)
    for j in range(LANES):
        lanes[j] = 0.0
    for row in range(n // _ROW):
        for j in range(LANES):
            squares = 0.0
            for k in range(2):
                i = row * (_ROW // 2) + j + k * LANES
                low, high = _add_words(to[i], source[i])
                to[i] = np.uint32(high | (low >> 16))
                squares += _square_bits(low) + _square_bits(high)
            lanes[j] += squares
    last_to = carray(_pointer(dst, np.uint16), n)
    last_source = carray(_pointer(src, np.uint16), n)
    for i in range(n // _ROW * _ROW, n):
        total = _round_to_bf16(_bf16_to_fp32(last_to[i]) + _bf16_to_fp32(last_source[i]))
        last_to[i] = np.uint16(total >> 16)
        lanes[i % LANES] += _square_bits(total)
    return _sum(lanes)


@_kernel
def add_gradient_fp32(dst: int, src: int, n: int) -> float:
    """``dst += src`` on ``n`` fp32 elements; returns the new sum of squares in float64."""
    to = carray(_pointer(dst, np.float32), n)
    source = carray(_pointer(src, np.float32), n)
    lanes = carray(_lanes(), LANES)
    for j in range(LANES):
        lanes[j] = 0.0
    for row in range(n // _ROW):
        for j in range(LANES):
            squares = 0.0
            for k in range(4):
                i = row * _ROW + j + k * LANES
                total = to[i] + source[i]
                to[i] = total
                squares += _square_fp32(total)
            lanes[j] += squares
    for i in range(n // _ROW * _ROW, n):
        total = to[i] + source[i]
        to[i] = total
        lanes[i % LANES] += _square_fp32(total)
    return _sum(lanes)


@_kernel
def split(master: int, weight: int, weight_low: int, n: int) -> None:
    """Splits ``n`` fp32 elements into bf16 high and int16 low halves; lossless for every bit pattern."""
    whole = carray(_pointer(master, np.float32), n)
    high = carray(_pointer(weight, np.uint16), n)
    low = carray(_pointer(weight_low, np.int16), n)
    for i in range(n):
        high[i] = _high_half(whole[i])
        low[i] = _low_half(whole[i])


@_kernel
def join(weight: int, weight_low: int, master: int, n: int) -> None:
    """Inverse of `split`: ``n`` fp32 elements from their halves."""
    high = carray(_pointer(weight, np.uint16), n)
    low = carray(_pointer(weight_low, np.int16), n)
    whole = carray(_pointer(master, np.float32), n)
    for i in range(n):
        whole[i] = _join(high[i], low[i])


class Kernels(NamedTuple):
    """The kernels of one precision and one way to keep moments.

    adamw: ``(*addresses of the states in StateSpec order, gradient address, n, *noise, *Scalars)``, where noise is
        nothing, or for bf16 moments the first element's index in its parameter and the `Key`'s two numbers
    store_gradient, add_gradient: ``(dst address, src address, n) -> sum of squares``
    """

    adamw: Callable[..., None]
    store_gradient: Callable[[int, int, int], float]
    add_gradient: Callable[[int, int, int], float]


_ADAMW: dict[tuple[str, str], Callable[..., None]] = {
    ("bf16", "fp32"): adamw_bf16,
    ("bf16", "bf16"): adamw_bf16_moments_bf16,
    ("bf16", "8bit"): adamw_bf16_moments_8bit,
    ("fp32", "fp32"): adamw_fp32,
    ("fp32", "bf16"): adamw_fp32_moments_bf16,
    ("fp32", "8bit"): adamw_fp32_moments_8bit,
}


def kernels_for(precision: Precision, moments: Moments = "fp32") -> Kernels:
    """Kernels for weights and gradients of ``precision``; raises ConfigError for one that is not known."""
    check_precision(precision)
    check_moments(moments)
    adamw = _ADAMW[precision, moments]
    if precision == "bf16":
        return Kernels(adamw, store_gradient_bf16, add_gradient_bf16)
    return Kernels(adamw, store_gradient_fp32, add_gradient_fp32)


def warm_up(precision: Precision, moments: Moments = "fp32") -> None:
    """Compiles, or loads from Numba's cache, all that is used with these, so that no step waits for it."""
    kernels = kernels_for(precision, moments)
    numbers = {"fp32": 4, "bf16": 7, "8bit": 6}[moments] + (precision == "bf16")
    # The types of the arguments select the compiled version, hence calls on nothing rather than signatures.
    kernels.adamw(*[0] * (numbers + 1), *[0.0] * len(Scalars._fields))
    if moments == "8bit":
        for codec in (encode_signed, encode_unsigned, decode_signed, decode_unsigned):
            codec(0, 0, 0, 0)
    kernels.store_gradient(0, 0, 0)
    kernels.add_gradient(0, 0, 0)
    if precision == "bf16":
        split(0, 0, 0, 0)
        join(0, 0, 0, 0)
