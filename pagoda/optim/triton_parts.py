"""What GPU kernels are made of: the parts of `jit`, in Triton, with the same operations in the same order.

Triton's own `*`, `+` and `-` on fp32 round once each, as long as the launch says `enable_fp_fusion=False`; `/` and
`sqrt` do not, so division and square root are `tl.div_rn` and `tl.sqrt_rn`. Integers wrap where `add` and `mul` say so.

Import this only where a GPU is, or with TRITON_INTERPRET=1 set before Triton is first imported: then the kernels run on
the CPU, slowly, in Triton's interpreter.
"""

from collections.abc import Callable
from typing import Any, cast

import triton
import triton.language as tl

from pagoda.optim import codecs

Jit = Callable[..., Callable[[Callable[..., Any]], Any]]
jit = cast(Jit, triton.jit)

NOT_SPLIT, BF16, FP16 = 0, 1, 2
"""What a kernel's `split` says: weights are fp32, or 16-bit halves of a master in one of two ways."""
_FP16 = tl.constexpr(FP16)
_NAN = tl.constexpr(0x7FC00000)


@jit()
def bf16_to_fp32(half: tl.tensor) -> tl.tensor:
    """fp32 of bf16 bits, int16."""
    return (half.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@jit()
def joined(high: tl.tensor, low: tl.tensor) -> tl.tensor:
    """fp32 master of its halves, both int16."""
    bits = tl.add(high.to(tl.uint32) << 16, low.to(tl.uint32), sanitize_overflow=False)
    return bits.to(tl.float32, bitcast=True)


@jit()
def halves(value: tl.tensor) -> tl.tensor:
    """Both halves of an fp32 master, int16.

    Every NaN becomes one: a GPU's own, 0x7FFFFFFF, would round to a high half of -0.
    """
    bits = tl.where(value == value, value.to(tl.uint32, bitcast=True), _NAN)
    high = tl.add(bits, 0x8000, sanitize_overflow=False) >> 16
    return high.to(tl.int16), bits.to(tl.int16)


@jit()
def fp16_to_fp32(half: tl.tensor) -> tl.tensor:
    """fp32 of fp16 bits, int16: `fp16.fp16_to_fp32`."""
    bits = half.to(tl.uint32)
    shifted = (bits & 0x7FFF) << 13
    widened = (shifted.to(tl.float32, bitcast=True) * 5192296858534827628530496329220096.0).to(tl.uint32, bitcast=True)
    widened = tl.where(shifted >= 0x0F800000, shifted | 0x7F800000, widened)
    return (widened | ((bits & 0x8000) << 16)).to(tl.float32, bitcast=True)


@jit()
def _fp32_to_fp16(value: tl.tensor) -> tl.tensor:
    """fp16 bits, int16: `fp16.fp32_to_fp16`."""
    bits = value.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = tl.add(tl.add(size, 0xC8000FFF, sanitize_overflow=False), (size >> 13) & 1, sanitize_overflow=False) >> 13
    denormal = (size.to(tl.float32, bitcast=True) + 0.5).to(tl.uint32, bitcast=True)
    denormal = tl.add(denormal, 0xC1000000, sanitize_overflow=False)
    rounded = tl.where(size < 0x38800000, denormal, normal)
    rounded = tl.where(size >= 0x47800000, tl.where(size > 0x7F800000, 0x7E00, 0x7C00).to(tl.uint32), rounded)
    return (rounded | ((bits >> 16) & 0x8000)).to(tl.int16)


@jit()
def _exponent_fp16(half: tl.tensor) -> tl.tensor:
    """Biased, of fp16 bits, and at least 1, uint32."""
    exponent = (half.to(tl.uint32) >> 10) & 0x1F
    return tl.where(exponent > 1, exponent, 1).to(tl.uint32)


@jit()
def joined_fp16(high: tl.tensor, low: tl.tensor) -> tl.tensor:
    """fp32 master of an fp16 weight, as int16, and its distance: `fp16.joined_fp16`."""
    unit = ((_exponent_fp16(high) + 87) << 23).to(tl.float32, bitcast=True)
    return fp16_to_fp32(high) - (0 - low.to(tl.int32)).to(tl.float32) * unit


@jit()
def halves_fp16(value: tl.tensor) -> tl.tensor:
    """The fp16 weight, as int16, and the distance of an fp32 master: `fp16.low_half_fp16`. That of a NaN is zero."""
    high = _fp32_to_fp16(value)
    per_unit = ((167 - _exponent_fp16(high)) << 23).to(tl.float32, bitcast=True)
    distance = (value - fp16_to_fp32(high)) * per_unit
    bits = (distance + 12582912.0).to(tl.uint32, bitcast=True)
    return high, tl.where(distance == distance, bits, 0).to(tl.int16)


@jit()
def load_master(
    weight: tl.tensor, weight_low: tl.tensor, at: tl.tensor, mask: tl.tensor, split: tl.constexpr
) -> tl.tensor:
    """fp32 weights: of both halves where `split`; else `weight_low` is not touched."""
    if split == _FP16:
        value = joined_fp16(tl.load(weight + at, mask, 0), tl.load(weight_low + at, mask, 0))
    elif split:
        value = joined(tl.load(weight + at, mask, 0), tl.load(weight_low + at, mask, 0))
    else:
        value = tl.load(weight + at, mask, 0.0)
    return value


@jit()
def load_gradient(gradient: tl.tensor, at: tl.tensor, mask: tl.tensor, split: tl.constexpr) -> tl.tensor:
    """Gradients in fp32: those of 16 bits, as int16, where weights are `split`."""
    value = tl.load(gradient + at, mask, 0)
    if split == _FP16:
        value = fp16_to_fp32(value)
    elif split:
        value = bf16_to_fp32(value)
    return value


@jit()
def store_master(
    weight: tl.tensor, weight_low: tl.tensor, at: tl.tensor, value: tl.tensor, mask: tl.tensor, split: tl.constexpr
) -> None:
    """The reverse of `load_master`."""
    if split:
        if split == _FP16:
            high, low = halves_fp16(value)
        else:
            high, low = halves(value)
        tl.store(weight + at, high, mask)
        tl.store(weight_low + at, low, mask)
    else:
        tl.store(weight + at, value, mask)


@jit()
def magnitude(value: tl.tensor) -> tl.tensor:
    """Bits of an fp32 value without its sign, int32, which orders as the values do."""
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


# Stochastic rounding to bf16.

_MAX_NOISY = tl.constexpr(codecs.MAX_NOISY)


@jit()
def noise_bits(index: tl.tensor, low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """The 32 random bits of an element; all uint32."""
    x = index ^ low
    x = tl.mul(x ^ (x >> 16), 0x7FEB352D, sanitize_overflow=False)
    x = tl.add(x ^ (x >> 15), high, sanitize_overflow=False)
    x = tl.mul(x, 0x846CA68B, sanitize_overflow=False)
    return x ^ (x >> 16)


@jit()
def round_noisily(value: tl.tensor, noise: tl.tensor) -> tl.tensor:
    """bf16 bits, int16, of an fp32 value."""
    bits = value.to(tl.uint32, bitcast=True)
    noise = tl.where(magnitude(value) < _MAX_NOISY, noise, 0)
    return (tl.add(bits, noise, sanitize_overflow=False) >> 16).to(tl.int16)


# 8-bit codes. The maps are computed, as on the CPU.

_TENTH_STEPS = tl.constexpr(codecs.TENTH_STEPS)
_TOP_SIGNED, _TOP_UNSIGNED = tl.constexpr(codecs.TOP_SIGNED), tl.constexpr(codecs.TOP_UNSIGNED)
_ZERO_SIGNED = tl.constexpr(codecs.ZERO_SIGNED)
_SLOPES = tuple(tl.constexpr(slope) for slope, _ in codecs.LINES)
_OFFSETS = tuple(tl.constexpr(offset) for _, offset in codecs.LINES)
_A0, _A1, _A2, _A3, _A4, _A5, _A6 = _SLOPES
_B0, _B1, _B2, _B3, _B4, _B5, _B6 = _OFFSETS


@jit()
def _map_value(place: tl.tensor) -> tl.tensor:
    small = place < 16.0
    p = tl.where(small, 1e-4, 1.0)
    f = tl.where(small, place * 16.0, place)
    small = f < 64.0
    p = tl.where(small, p * 1e-2, p)
    f = tl.where(small, f * 4.0, f)
    small = f < 128.0
    p = tl.where(small, p * 1e-1, p)
    f = tl.where(small, f * 2.0, f)
    return p * (f * _TENTH_STEPS - 0.8)


@jit()
def decode_signed(code: tl.tensor) -> tl.tensor:
    """The map's value of a code of exp_avg, uint8."""
    k = (code & 127).to(tl.float32)
    value = _map_value(k * 2.0 + 1.0)
    value = tl.where(k == 127.0, 1.0, value)
    value = tl.where(k == 0.0, 0.0, value)
    sign = (code.to(tl.uint32) >> 7) << 31
    return (value.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@jit()
def decode_unsigned(code: tl.tensor) -> tl.tensor:
    """The map's value of a code of exp_avg_sq, uint8."""
    k = code.to(tl.float32)
    value = _map_value(k + 1.5)
    value = tl.where(k == 255.0, 1.0, value)
    return tl.where(k == 0.0, 0.0, value)


@jit()
def _lower(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.where(a < b, a, b)


@jit()
def _higher(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.where(a > b, a, b)


@jit()
def _map_place(x: tl.tensor) -> tl.tensor:
    u = _lower(x * _A0 + _B0, _lower(x * _A1 + _B1, x * _A2 + _B2))
    return _lower(u, _lower(_lower(x * _A3 + _B3, x * _A4 + _B4), _lower(x * _A5 + _B5, x * _A6 + _B6)))


@jit()
def _nearest(u: tl.tensor) -> tl.tensor:
    n = (u.to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(u - n < 0.2, u - 1.0, u)


@jit()
def encode_signed(value: tl.tensor, inverse: tl.tensor) -> tl.tensor:
    """Codes of exp_avg, uint8; `inverse` is 1 over the scale of its block."""
    x = magnitude(value).to(tl.float32, bitcast=True) * inverse
    u = _nearest(_higher(_map_place(x), 1.0))
    u = _lower(_higher(u, 1.0), 126.5)
    u = tl.where(x >= _TOP_SIGNED, 127.0, u)
    u = tl.where(x < _ZERO_SIGNED, 0.0, u)
    sign = (value.to(tl.uint32, bitcast=True) >> 24) & 128
    return (u.to(tl.int32).to(tl.uint32) | sign).to(tl.uint8)


@jit()
def encode_unsigned(value: tl.tensor, inverse: tl.tensor) -> tl.tensor:
    """Codes of exp_avg_sq, as `encode_signed`."""
    x = magnitude(value).to(tl.float32, bitcast=True) * inverse
    u = _nearest(_higher(_map_place(x) * 2.0, 2.0)) - 1.0
    u = _lower(_higher(u, 1.0), 254.5)
    u = tl.where(x >= _TOP_UNSIGNED, 255.0, u)
    u = tl.where(x > 0.0, u, 0.0)
    return u.to(tl.int32).to(tl.uint8)


@jit()
def scale_of(top: tl.tensor) -> tl.tensor:
    """Scale of a block whose largest magnitude has the bits `top`, int32; 0 or NaN where it becomes zeros."""
    scale = tl.where(top >= 0x00800000, top.to(tl.float32, bitcast=True), 0.0)
    return tl.where(top >= 0x7F800000, float("nan"), scale)
