"""The arithmetic of updates on single elements, written once for the CPU and the GPU: rules, formats and moments.

The functions call primitives that exist for both compilers. `jit` defines them for the CPU. `triton_parts` compiles the
source of this file with its own primitives for the GPU. So both compute the same operations in the same order.

A value is fp32. A word is an unsigned 32-bit integer, which wraps. A form is the format in which weights or gradients
are stored. A function that takes a constant (a form, a flag) is compiled for it, so a kernel has no code for other
constants.
"""

from collections.abc import Mapping
from typing import Any

import torch

from pagoda.jit import part
from pagoda.optim.jit import (
    HAS_CONVERSIONS,
    add,
    bit_and,
    bit_or,
    bit_xor,
    bits_of,
    divide,
    extended,
    float_of,
    fp32,
    fused,
    multiply,
    number,
    quiet_bits,
    rounded_to_half,
    shift_left,
    shift_right,
    square_root,
    subtract,
    where,
    word,
)
from pagoda.optim.moments import CUT, CUT_OFF, MAX_NOISY, NAN, NOT_FINITE

FP32, BF16, FP16 = 0, 1, 2
"""The forms."""
FORMS: Mapping[torch.dtype, int] = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}

ADAMW, ADAM, SGD, SGD_MOMENTUM, SIGN_SGD, LION = range(6)
PLAIN: Mapping[str, tuple[int, bool]] = {
    "adamw": (ADAMW, False),
    "adamw_moments_bf16": (ADAMW, True),
    "adam": (ADAM, False),
    "sgd": (SGD, False),
    "sgd_momentum": (SGD_MOMENTUM, False),
    "sign_sgd": (SIGN_SGD, False),
    "lion": (LION, False),
}
"""`ElementwiseRule.kernel_name` -> the rule, and whether its moments are bf16, rounded as `moments` defines (otherwise
they are fp32). All kernels except the one for 8-bit moments. A rule has at most two moments."""

# The update of one element, as the files of the rules define it. Each returns the weight and its moments.


@part
def adam_element(w: Any, m: Any, v: Any, gradient: Any, scalars: Any, decoupled: Any) -> Any:
    grad_scale, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, bias2_sqrt, eps, step_size = scalars
    g = gradient * grad_scale
    if decoupled:
        w = w * decay
    else:
        g = g + w * decay
    m = m * beta1 + g * one_minus_beta1
    v = v * beta2 + (g * g) * one_minus_beta2
    w = w - step_size * divide(m, divide(square_root(v), bias2_sqrt) + eps)
    return w, m, v


@part
def sgd_element(w: Any, m: Any, gradient: Any, scalars: Any, has_momentum: Any) -> Any:
    grad_scale, weight_decay, carried, taken, momentum, nesterov, minus_lr = scalars
    g = gradient * grad_scale
    # Not even a product with zero is added where there is no decay: it would be NaN, or change the sign of a zero.
    g = where(weight_decay > fp32(0.0), fused(w, weight_decay, g), g)
    d = g
    if has_momentum:
        m = fused(g, taken, m * carried)
        d = where(nesterov > fp32(0.0), fused(m, momentum, g), m)
    return fused(d, minus_lr, w), m


@part
def _sign(x: Any) -> Any:
    return where(x > fp32(0.0), fp32(1.0), where(x < fp32(0.0), fp32(-1.0), fp32(0.0)))


@part
def sign_sgd_element(w: Any, gradient: Any, scalars: Any) -> Any:
    grad_scale, decay, lr = scalars
    g = gradient * grad_scale
    w = w * decay
    return w - lr * _sign(g)


@part
def lion_element(w: Any, m: Any, gradient: Any, scalars: Any) -> Any:
    grad_scale, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, lr = scalars
    g = gradient * grad_scale
    w = w * decay
    c = fused(g, one_minus_beta1, m * beta1)
    w = w - lr * _sign(c)
    return w, fused(g, one_minus_beta2, m * beta2)


@part
def predicted(w: Any, before: Any, ahead: Any) -> Any:
    return w - (before - w) * ahead


# Adafactor. Sums are fp64, and everything computed from them is fp32.


@part
def factored_update(g: Any, row: Any, column: Any, floor: Any) -> Any:
    v = row * column
    return divide(g, square_root(where(v < floor, floor, v)))


@part
def adafactor_rate(weight_squares: Any, update_squares: Any, count: Any, rate: Any, least: Any, most: Any) -> Any:
    """The factor by which updates are multiplied."""
    size = square_root(divide(fp32(weight_squares), count))
    over = divide(square_root(divide(fp32(update_squares), count)), most)
    rate = rate * where(size < least, least, size)
    return divide(rate, where(over < fp32(1.0), fp32(1.0), over))


@part
def adafactor_element(w: Any, m: Any, u: Any, scalars: Any, has_moment: Any) -> Any:
    rate, decay, beta1, one_minus_beta1 = scalars
    u = u * rate
    if has_moment:
        m = m * beta1 + u * one_minus_beta1
        u = m
    return w * decay - u, m


# Formats: 16-bit values, and the two halves of a master, both as defined in `rule`.


@part
def bf16_to_fp32(half: Any) -> Any:
    return float_of(shift_left(half, 16))


@part
def fp16_to_fp32_in_integers(half: Any) -> Any:
    # After the shift, the exponent is 112 too small. Multiplying by 2 ** 112 is exact, also for denormals. Infinity and
    # NaN get fp32's largest exponent instead. A NaN becomes a quiet one.
    magnitude = shift_left(bit_and(half, 0x7FFF), 13)
    widened = bits_of(float_of(magnitude) * fp32(5192296858534827628530496329220096.0))
    special = bit_or(magnitude, where(magnitude > 0x0F800000, word(0x7FC00000), word(0x7F800000)))
    bits = where(magnitude >= 0x0F800000, special, widened)
    return float_of(bit_or(bits, shift_left(bit_and(half, 0x8000), 16)))


@part
def fp32_to_fp16_in_integers(value: Any) -> Any:
    # To nearest, ties to even. Adding 0.5 rounds denormals, because its last place is the smallest fp16 denormal.
    bits = bits_of(value)
    magnitude = bit_and(bits, 0x7FFFFFFF)
    odd = bit_and(shift_right(magnitude, 13), 1)
    normal = shift_right(add(add(magnitude, 0xC8000FFF), odd), 13)
    denormal = subtract(bits_of(float_of(magnitude) + fp32(0.5)), 0x3F000000)
    nan = bit_or(bit_and(shift_right(magnitude, 13), 0x3FF), 0x7E00)
    special = where(magnitude > 0x7F800000, nan, word(0x7C00))
    rounded = where(magnitude < 0x38800000, denormal, normal)
    rounded = where(magnitude >= 0x47800000, special, rounded)
    return bit_or(rounded, bit_and(shift_right(bits, 16), 0x8000))


fp16_to_fp32 = extended if HAS_CONVERSIONS else fp16_to_fp32_in_integers
fp32_to_fp16 = rounded_to_half if HAS_CONVERSIONS else fp32_to_fp16_in_integers


@part
def _exponent(half: Any) -> Any:
    exponent = bit_and(shift_right(half, 10), 0x1F)
    return where(exponent > 1, exponent, word(1))


@part
def master_of(form: Any, high: Any, low: Any) -> Any:
    """The master with these two halves."""
    if form == FP16:
        unit = float_of(shift_left(add(_exponent(high), 127 - 40), 23))
        # Subtracting zero keeps a negative zero.
        value = fp16_to_fp32(high) - number(subtract(0, low)) * unit
    else:
        value = float_of(add(shift_left(high, 16), low))
    return value


@part
def halves_of(form: Any, value: Any) -> Any:
    """The two halves of a master, as words of which 16 bits are stored."""
    if form == FP16:
        high = fp32_to_fp16(value)
        # Every operation is exact except the last sum. It rounds to an integer, because the last place of 1.5 * 2 ** 23
        # is one, and its low bits are those of the integer.
        per_unit = float_of(shift_left(subtract(127 + 40, _exponent(high)), 23))
        low = quiet_bits((value - fp16_to_fp32(high)) * per_unit + fp32(12582912.0))
    else:
        low = quiet_bits(value)
        high = shift_right(add(low, 0x8000), 16)
    return high, low


# Formats of moments, as `moments` defines them.


@part
def noise_bits(index: Any, low: Any, high: Any) -> Any:
    """The 32 random bits of an element."""
    x = bit_xor(index, low)
    x = multiply(bit_xor(x, shift_right(x, 16)), 0x7FEB352D)
    x = add(bit_xor(x, shift_right(x, 15)), high)
    x = multiply(x, 0x846CA68B)
    return bit_xor(x, shift_right(x, 16))


@part
def noises(bits: Any, cut: Any) -> Any:
    """The noise of both moments from the random bits of an element: its lowest and its highest `cut` bits."""
    return shift_right(shift_left(bits, 32 - cut), 32 - cut), shift_right(bits, 32 - cut)


@part
def cut_noisily(bits: Any, noise: Any, cut: Any) -> Any:
    """Bits without the lowest `cut`. They are rounded up if these bits and the noise carry."""
    return shift_right(add(bits, noise), cut)


@part
def magnitude(value: Any) -> Any:
    """The bits of a value without its sign. They have the order of magnitudes."""
    return bit_and(bits_of(value), 0x7FFFFFFF)


@part
def encode_bf16(value: Any, noise: Any) -> Any:
    return cut_noisily(bits_of(value), where(magnitude(value) < MAX_NOISY, noise, word(0)), 16)


@part
def floor_of(top: Any, signed: Any) -> Any:
    """The floor of a block of exp_avg (`signed`) or exp_avg_sq whose largest magnitude has the bits `top`."""
    exponent = shift_right(add(top, CUT_OFF), 23)
    octaves = 14 if signed else 31
    floor = where(exponent > octaves, shift_left(subtract(exponent, octaves), 23), word(0))
    return float_of(where(exponent >= NOT_FINITE, word(NAN), floor))


@part
def decode_8bit(code: Any, floor: Any, signed: Any) -> Any:
    """The value of a code of exp_avg (`signed`) or of exp_avg_sq."""
    if signed:
        raised = float_of(add(shift_left(bit_and(code, 127), CUT), bits_of(floor)))
        half = raised * fp32(0.5)
        value = raised - where(half > floor, half, floor)
        value = float_of(bit_or(bits_of(value), shift_left(shift_right(code, 7), 31)))
    else:
        value = float_of(add(shift_left(code, CUT), bits_of(floor)))
    return value


@part
def encode_8bit(value: Any, floor: Any, noise: Any, signed: Any) -> Any:
    """The code of a value of exp_avg (`signed`) or of exp_avg_sq, as a word."""
    if signed:
        size = float_of(magnitude(value))
        raised = size + where(size > floor, size, floor)
    else:
        raised = where(value > floor, value, floor)
    code = cut_noisily(subtract(bits_of(raised), bits_of(floor)), noise, CUT)
    if signed:
        code = bit_or(code, bit_and(shift_right(bits_of(value), 24), 128))
    return bit_and(code, where(floor == floor, word(255), word(0)))
