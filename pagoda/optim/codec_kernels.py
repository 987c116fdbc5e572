"""CPU kernels for moments in bf16 or 8 bits, by the contracts of `codecs`; made and called as in `kernels`."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray

from pagoda.jit import kernel, part
from pagoda.optim.codecs import BLOCK, LINES, MAX_NOISY, TENTH_STEPS, TOP_SIGNED, TOP_UNSIGNED, ZERO_SIGNED
from pagoda.optim.elements import FP32, halves_of, low_view, master_of, value_of, views
from pagoda.optim.jit import (
    adamw_element,
    add32,
    bf16_to_fp32,
    bits_to_fp32,
    block_buffer,
    fp32_to_bits,
    pointer,
    round_scalars,
    xor32,
)

# AdamW with bf16 moments, rounded stochastically.


@part
def _noise(index: Any, low: Any, high: Any) -> Any:
    x = xor32(index, low)
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(16))) * np.uint32(0x7FEB352D))
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(15))) + high)
    x = np.uint32(x * np.uint32(0x846CA68B))
    return np.uint32(x ^ np.uint32(x >> np.uint32(16)))


@part
def _round_noisily(value: Any, noise: Any) -> Any:
    bits = fp32_to_bits(value)
    noise = noise if np.uint32(bits & np.uint32(0x7FFFFFFF)) < np.uint32(MAX_NOISY) else np.uint32(0)
    return np.uint16(np.uint32(bits + noise) >> np.uint32(16))


def adamw_moments_bf16(weights: int, gradients: int) -> Callable[..., None]:
    """AdamW in place on ``n`` elements, with bf16 moments, rounded as `codecs` says.

    ``index`` is the first element's in its parameter.

    With bf16 weights it moves 18 bytes per element: 10 read, 8 written.
    """

    @kernel
    def update(
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
        (whole, high), low = views(weight, n), low_view(weight_low, n)
        avg, avg_sq = carray(pointer(exp_avg, np.uint16), n), carray(pointer(exp_avg_sq, np.uint16), n)
        grad, half = views(gradient, n)
        rounded = round_scalars(scalars)
        number, first, second = np.uint32(index), np.uint32(key_low), np.uint32(key_high)
        for i in range(n):
            w, g = master_of(weights, whole[i], high[i], low[i]), value_of(gradients, grad[i], half[i])
            w, m, v = adamw_element(w, bf16_to_fp32(avg[i]), bf16_to_fp32(avg_sq[i]), g, rounded)
            noise = _noise(number, first, second)
            number = add32(number, np.uint32(1))
            avg[i] = _round_noisily(m, np.uint32(noise & np.uint32(0xFFFF)))
            avg_sq[i] = _round_noisily(v, np.uint32(noise >> np.uint32(16)))
            if weights == FP32:
                whole[i] = w
            else:
                high[i], low[i] = halves_of(weights, w)

    return update


# AdamW with 8-bit moments. The maps are computed rather than looked up: gathers are several times slower here.


@part
def _magnitude(value: Any) -> Any:
    return np.uint32(fp32_to_bits(value) & np.uint32(0x7FFFFFFF))


@part
def _map_value(place: Any) -> Any:
    # `place` is from 1 to below 256. The three steps of the contract ask for the three bits of its exponent, and bring
    # it to that of 128, which is exact. (Shifted to the sign, a bit is tested in 32 bits; `&` would widen it to 64.)
    bits = fp32_to_bits(place)
    exponent = np.uint32(bits + np.uint32(1 << 23))
    f = bits_to_fp32(np.uint32(np.uint32(bits & np.uint32(0x7FFFFF)) | np.uint32(0x43000000)))
    p = np.float32(1) if np.int32(exponent << np.uint32(6)) < np.int32(0) else np.float32(1e-4)
    p = p if np.int32(exponent << np.uint32(7)) < np.int32(0) else p * np.float32(1e-2)
    p = p if np.int32(exponent << np.uint32(8)) < np.int32(0) else p * np.float32(1e-1)
    return p * (f * np.float32(TENTH_STEPS) - np.float32(0.8))


@part
def _decode_signed(code: Any) -> Any:
    k = np.int32(np.int32(code) & np.int32(127))
    value = _map_value(np.float32(k) * np.float32(2) + np.float32(1))
    value = np.float32(1) if k == np.int32(127) else value
    value = np.float32(0) if k == np.int32(0) else value
    sign = np.uint32(np.uint32(code) >> np.uint32(7))
    return bits_to_fp32(np.uint32(fp32_to_bits(value) | np.uint32(sign << np.uint32(31))))


@part
def _decode_unsigned(code: Any) -> Any:
    k = np.int32(code)
    value = _map_value(np.float32(k) + np.float32(1.5))
    value = np.float32(1) if k == np.int32(255) else value
    return np.float32(0) if k == np.int32(0) else value


@part
def _line(x: Any, e: Any) -> Any:
    return x * np.float32(LINES[e][0]) + np.float32(LINES[e][1])


@part
def _doubled_line(x: Any, e: Any) -> Any:
    return x * np.float32(2 * LINES[e][0]) + np.float32(2 * LINES[e][1])


@part
def _lower(a: Any, b: Any) -> Any:
    return a if a < b else b


@part
def _higher(a: Any, b: Any) -> Any:
    return a if a > b else b


# What the contract has but cannot change a code is left out: all of exp_avg's values on the first line are in its first
# cell, where the second line ends, and no place is below 1. The lines are spelled out, as a loop would not be unrolled
# before the loop over elements is vectorised.


@part
def _place_signed(x: Any) -> Any:
    u = _lower(_line(x, 1), _line(x, 2))
    return _lower(u, _lower(_lower(_line(x, 3), _line(x, 4)), _lower(_line(x, 5), _line(x, 6))))


@part
def _place_unsigned(x: Any) -> Any:
    u = _lower(_doubled_line(x, 0), _lower(_doubled_line(x, 1), _doubled_line(x, 2)))
    v = _lower(_doubled_line(x, 5), _doubled_line(x, 6))
    return _lower(u, _lower(_lower(_doubled_line(x, 3), _doubled_line(x, 4)), v))


@part
def _nearest(u: Any) -> Any:
    n = bits_to_fp32(np.uint32(fp32_to_bits(u) & np.uint32(0x7F800000)))
    return u - np.float32(1) if u - n < np.float32(0.2) else u


@part
def _encode_signed(value: Any, inverse: Any) -> Any:
    x = bits_to_fp32(_magnitude(value)) * inverse
    u = _lower(_nearest(_place_signed(x)), np.float32(126.5))
    u = np.float32(127) if x >= np.float32(TOP_SIGNED) else u
    u = np.float32(0) if x < np.float32(ZERO_SIGNED) else u
    sign = np.uint32(np.uint32(fp32_to_bits(value) >> np.uint32(24)) & np.uint32(128))
    return np.uint8(np.uint32(np.uint32(np.int32(u)) | sign))


@part
def _encode_unsigned(value: Any, inverse: Any) -> Any:
    x = bits_to_fp32(_magnitude(value)) * inverse
    u = _nearest(_place_unsigned(x)) - np.float32(1)
    u = _lower(_higher(u, np.float32(1)), np.float32(254.5))
    u = np.float32(255) if x >= np.float32(TOP_UNSIGNED) else u
    u = u if x > np.float32(0) else np.float32(0)
    return np.uint8(np.int32(u))


@part
def _scale(top: Any) -> Any:
    # Of a block whose largest magnitude has the bits `top`; 0 or NaN where the block becomes zeros.
    if top >= np.uint32(0x7F800000):
        return np.float32(np.nan)
    return bits_to_fp32(top) if top >= np.uint32(0x00800000) else np.float32(0)


@part
def _encode_block(values: Any, codes: Any, count: Any, top: Any, signed: Any) -> Any:
    """Encode one block, whose largest magnitude has the bits `top`; returns its scale. Moments come as `signed` says:
    exp_avg, or exp_avg_sq."""
    scale = _scale(top)
    if not scale > np.float32(0):
        for i in range(count):
            codes[i] = np.uint8(0)
    elif signed:
        inverse = np.float32(1) / scale
        for i in range(count):
            codes[i] = _encode_signed(values[i], inverse)
    else:
        inverse = np.float32(1) / scale
        for i in range(count):
            codes[i] = _encode_unsigned(values[i], inverse)
    return scale


@part
def _decode_block(codes: Any, scale: Any, values: Any, count: Any, signed: Any) -> None:
    if signed:
        for i in range(count):
            values[i] = _decode_signed(codes[i]) * scale
    else:
        for i in range(count):
            values[i] = _decode_unsigned(codes[i]) * scale


# Every block has arrays of its own, indexed from 0: where an index is a sum, Numba tests each for being below zero, and
# LLVM reads and writes element by element.


def adamw_moments_8bit(weights: int, gradients: int) -> Callable[..., None]:
    """AdamW in place on ``n`` elements, with moments quantized as `codecs` says.

    The first element is the first of a block.

    With bf16 weights it moves 14 bytes per element (8 read, 6 written) and 16 per block.
    """
    weight_bytes, gradient_bytes = (4 if form == FP32 else 2 for form in (weights, gradients))

    @kernel
    def update(
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
        blocks = (n + BLOCK - 1) // BLOCK
        scale = carray(pointer(exp_avg_scale, np.float32), blocks)
        scale_sq = carray(pointer(exp_avg_sq_scale, np.float32), blocks)
        rounded = round_scalars(scalars)
        avg, avg_sq = carray(block_buffer(), BLOCK), carray(block_buffer(), BLOCK)
        for block in range(blocks):
            first = block * BLOCK
            count = min(BLOCK, n - first)
            (whole, high), low = views(weight + weight_bytes * first, count), low_view(weight_low + 2 * first, count)
            grad, half = views(gradient + gradient_bytes * first, count)
            codes = carray(pointer(exp_avg + first, np.uint8), count)
            codes_sq = carray(pointer(exp_avg_sq + first, np.uint8), count)
            top, top_sq = np.uint32(0), np.uint32(0)
            for i in range(count):
                w, g = master_of(weights, whole[i], high[i], low[i]), value_of(gradients, grad[i], half[i])
                m, v = _decode_signed(codes[i]) * scale[block], _decode_unsigned(codes_sq[i]) * scale_sq[block]
                w, m, v = adamw_element(w, m, v, g, rounded)
                avg[i] = m
                avg_sq[i] = v
                top, top_sq = max(top, _magnitude(m)), max(top_sq, _magnitude(v))
                if weights == FP32:
                    whole[i] = w
                else:
                    high[i], low[i] = halves_of(weights, w)
            scale[block] = _encode_block(avg, codes, count, top, True)
            scale_sq[block] = _encode_block(avg_sq, codes_sq, count, top_sq, False)

    return update


@part
def _encode(values: Any, codes: Any, scales: Any, n: Any, signed: Any) -> None:
    scale = carray(pointer(scales, np.float32), (n + BLOCK - 1) // BLOCK)
    for block in range((n + BLOCK - 1) // BLOCK):
        first = block * BLOCK
        count = min(BLOCK, n - first)
        value = carray(pointer(values + 4 * first, np.float32), count)
        code = carray(pointer(codes + first, np.uint8), count)
        top = np.uint32(0)
        for i in range(count):
            top = max(top, _magnitude(value[i]))
        scale[block] = _encode_block(value, code, count, top, signed)


@part
def _decode(codes: Any, scales: Any, values: Any, n: Any, signed: Any) -> None:
    scale = carray(pointer(scales, np.float32), (n + BLOCK - 1) // BLOCK)
    for block in range((n + BLOCK - 1) // BLOCK):
        first = block * BLOCK
        count = min(BLOCK, n - first)
        value = carray(pointer(values + 4 * first, np.float32), count)
        code = carray(pointer(codes + first, np.uint8), count)
        _decode_block(code, scale[block], value, count, signed)


@kernel
def encode_signed(values: int, codes: int, scales: int, n: int) -> None:
    """``n`` fp32 elements, from the first of a block on, to 8-bit codes of exp_avg and a scale for each block."""
    _encode(values, codes, scales, n, True)


@kernel
def encode_unsigned(values: int, codes: int, scales: int, n: int) -> None:
    """`encode_signed` for exp_avg_sq, whose elements are not below zero."""
    _encode(values, codes, scales, n, False)


@kernel
def decode_signed(codes: int, scales: int, values: int, n: int) -> None:
    """``n`` fp32 elements of exp_avg, from the first of a block on, from their codes and scales."""
    _decode(codes, scales, values, n, True)


@kernel
def decode_unsigned(codes: int, scales: int, values: int, n: int) -> None:
    """`decode_signed` for exp_avg_sq."""
    _decode(codes, scales, values, n, False)


def warm_up() -> None:
    """Compiles, or loads from Numba's cache, what encodes and decodes 8-bit moments by themselves."""
    for codec in (encode_signed, encode_unsigned, decode_signed, decode_unsigned):
        codec(0, 0, 0, 0)
