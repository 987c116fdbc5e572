"""CPU kernels by address: strict Numba, compiled for this machine on first use.

This is the hot path. A kernel takes addresses (``Tensor.data_ptr()``, or a page's address plus an offset in
bytes) and an element count, checks nothing, and touches no Python object, so lane threads run it side by
side (``nogil``) block by block, and a call costs about half a microsecond. `flat` is the checked front.

Invariants the caller keeps: each address is the start of ``n`` elements of the stated type that stay alive
and unshared during the call; regions do not overlap; scalars are Python floats; the thread does not flush
denormals (``torch.set_flush_denormal``), as that changes bits. Any alignment is correct; 64 bytes is best.

Kernels for moments that are not fp32 are in `codec_kernels`, those of other rules in `momentum_kernels`, what all are
made of in `jit`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray

from pagoda.jit import kernel, part
from pagoda.optim import codec_kernels, momentum_kernels
from pagoda.optim.jit import (
    LANES,
    ROW,
    adamw_element,
    bf16_to_fp32,
    bits_to_fp32,
    high_half,
    joined,
    lane_sums,
    low_half,
    pointer,
    round_scalars,
    round_to_bf16,
    square_bits,
    sum_of,
)
from pagoda.optim.rule import ElementwiseRule, Precision, Rule, TensorRule, check_precision


@kernel
def adamw_bf16(
    weight: int, weight_low: int, exp_avg: int, exp_avg_sq: int, gradient: int, n: int, *scalars: float
) -> None:
    """AdamW in place on ``n`` elements: bf16 weight, int16 low half, fp32 moments, bf16 gradient.

    The operations and their order are the contract in `adamw`; ``scalars`` are the fields of its `Scalars`.
    The gradient is only read. Moves 26 bytes per element: 14 read, 12 written.
    """
    high = carray(pointer(weight, np.uint16), n)
    low = carray(pointer(weight_low, np.int16), n)
    avg = carray(pointer(exp_avg, np.float32), n)
    avg_sq = carray(pointer(exp_avg_sq, np.float32), n)
    grad = carray(pointer(gradient, np.uint16), n)
    rounded = round_scalars(scalars)
    for i in range(n):
        w, m, v = adamw_element(joined(high[i], low[i]), avg[i], avg_sq[i], bf16_to_fp32(grad[i]), rounded)
        avg[i] = m
        avg_sq[i] = v
        high[i] = high_half(w)
        low[i] = low_half(w)


@kernel
def adamw_fp32(weight: int, exp_avg: int, exp_avg_sq: int, gradient: int, n: int, *scalars: float) -> None:
    """AdamW in place on ``n`` elements, all fp32.

    Moves 28 bytes per element: 16 read, 12 written.
    """
    master = carray(pointer(weight, np.float32), n)
    avg = carray(pointer(exp_avg, np.float32), n)
    avg_sq = carray(pointer(exp_avg_sq, np.float32), n)
    grad = carray(pointer(gradient, np.float32), n)
    rounded = round_scalars(scalars)
    for i in range(n):
        w, m, v = adamw_element(master[i], avg[i], avg_sq[i], grad[i], rounded)
        avg[i] = m
        avg_sq[i] = v
        master[i] = w


# Gradient kernels. Squares of fp32 values are exact in float64 and cannot overflow there, so a sum of squares
# is non-finite if and only if an element is. The four are spelled out because Numba does not cache a kernel
# that passes another as an argument.
#
# A sum of squares is kept in LANES partial sums. In each row of 4 * LANES elements, the four that share a
# lane are added first, then go to the lane. So n alone fixes the order, not the width of the CPU's vectors.
# (64 lanes spread the stores of one row so far apart that fp32 copies lost a fifth of their rate.)


@part
def _square_bf16(half: Any) -> Any:
    x = np.float64(bf16_to_fp32(half))
    return x * x


@part
def _square_fp32(value: Any) -> Any:
    x = np.float64(value)
    return x * x


@kernel
def store_gradient_bf16(dst: int, src: int, n: int) -> float:
    """Copies ``n`` bf16 elements; returns their sum of squares in float64."""
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
                squares += _square_bf16(source[i])
            lanes[j] += squares
    for i in range(n // ROW * ROW, n):
        to[i] = source[i]
        lanes[i % LANES] += _square_bf16(source[i])
    return sum_of(lanes)


@kernel
def store_gradient_fp32(dst: int, src: int, n: int) -> float:
    """Copies ``n`` fp32 elements; returns their sum of squares in float64."""
    to = carray(pointer(dst, np.float32), n)
    source = carray(pointer(src, np.float32), n)
    lanes = carray(lane_sums(), LANES)
    for j in range(LANES):
        lanes[j] = 0.0
    for row in range(n // ROW):
        for j in range(LANES):
            squares = 0.0
            for k in range(4):
                i = row * ROW + j + k * LANES
                to[i] = source[i]
                squares += _square_fp32(source[i])
            lanes[j] += squares
    for i in range(n // ROW * ROW, n):
        to[i] = source[i]
        lanes[i % LANES] += _square_fp32(source[i])
    return sum_of(lanes)


@part
def _add_words(a: Any, b: Any) -> Any:
    # Two bf16 sums, of the low and of the high halves, each as fp32 bits.
    mask = np.uint32(0xFFFF0000)
    low = bits_to_fp32(np.uint32(a << 16)) + bits_to_fp32(np.uint32(b << 16))
    high = bits_to_fp32(np.uint32(a & mask)) + bits_to_fp32(np.uint32(b & mask))
    return round_to_bf16(low), round_to_bf16(high)


@kernel
def add_gradient_bf16(dst: int, src: int, n: int) -> float:
    """``dst += src`` on ``n`` bf16 elements, with torch's bits; returns the new sum of squares in float64.

    Takes elements in pairs, as 32-bit words: a third faster than widening each to 32 bits.
    """
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


@kernel
def add_gradient_fp32(dst: int, src: int, n: int) -> float:
    """``dst += src`` on ``n`` fp32 elements; returns the new sum of squares in float64."""
    to = carray(pointer(dst, np.float32), n)
    source = carray(pointer(src, np.float32), n)
    lanes = carray(lane_sums(), LANES)
    for j in range(LANES):
        lanes[j] = 0.0
    for row in range(n // ROW):
        for j in range(LANES):
            squares = 0.0
            for k in range(4):
                i = row * ROW + j + k * LANES
                total = to[i] + source[i]
                to[i] = total
                squares += _square_fp32(total)
            lanes[j] += squares
    for i in range(n // ROW * ROW, n):
        total = to[i] + source[i]
        to[i] = total
        lanes[i % LANES] += _square_fp32(total)
    return sum_of(lanes)


@kernel
def split(master: int, weight: int, weight_low: int, n: int) -> None:
    """Splits ``n`` fp32 elements into bf16 high and int16 low halves; lossless for every bit pattern."""
    whole = carray(pointer(master, np.float32), n)
    high = carray(pointer(weight, np.uint16), n)
    low = carray(pointer(weight_low, np.int16), n)
    for i in range(n):
        high[i] = high_half(whole[i])
        low[i] = low_half(whole[i])


@kernel
def join(weight: int, weight_low: int, master: int, n: int) -> None:
    """Inverse of `split`: ``n`` fp32 elements from their halves."""
    high = carray(pointer(weight, np.uint16), n)
    low = carray(pointer(weight_low, np.int16), n)
    whole = carray(pointer(master, np.float32), n)
    for i in range(n):
        whole[i] = joined(high[i], low[i])


class GradientKernels(NamedTuple):
    """What stores and what adds gradients: ``(dst address, src address, n) -> sum of squares``."""

    store_gradient: Callable[[int, int, int], float]
    add_gradient: Callable[[int, int, int], float]


UpdateKernel = Callable[..., None]
"""``(*addresses of the rule's states in their order, gradient address, n, *noise, *scalars)``, where noise is nothing,
or where states are rounded at random the first element's index in its parameter and the `Key`'s two numbers."""


_UPDATES: dict[tuple[str, Precision], UpdateKernel] = {
    ("adamw", "bf16"): adamw_bf16,
    ("adamw", "fp32"): adamw_fp32,
    ("adamw_moments_bf16", "bf16"): codec_kernels.adamw_bf16_moments_bf16,
    ("adamw_moments_bf16", "fp32"): codec_kernels.adamw_fp32_moments_bf16,
    ("adamw_moments_8bit", "bf16"): codec_kernels.adamw_bf16_moments_8bit,
    ("adamw_moments_8bit", "fp32"): codec_kernels.adamw_fp32_moments_8bit,
    ("adam", "bf16"): momentum_kernels.adam_bf16,
    ("adam", "fp32"): momentum_kernels.adam_fp32,
    ("sgd", "bf16"): momentum_kernels.sgd_bf16,
    ("sgd", "fp32"): momentum_kernels.sgd_fp32,
    ("sgd_momentum", "bf16"): momentum_kernels.sgd_momentum_bf16,
    ("sgd_momentum", "fp32"): momentum_kernels.sgd_momentum_fp32,
    ("lion", "bf16"): momentum_kernels.lion_bf16,
    ("lion", "fp32"): momentum_kernels.lion_fp32,
}
"""(`ElementwiseRule.kernel_name`, precision) -> the rule's kernel."""


def gradient_kernels(precision: Precision) -> GradientKernels:
    """Kernels for gradients of ``precision``; raises ConfigError for one that is not known."""
    check_precision(precision)
    if precision == "bf16":
        return GradientKernels(store_gradient_bf16, add_gradient_bf16)
    return GradientKernels(store_gradient_fp32, add_gradient_fp32)


def update_kernel(rule: ElementwiseRule, precision: Precision) -> UpdateKernel:
    """The kernel of a rule; raises ConfigError for a precision that is not known."""
    check_precision(precision)
    return _UPDATES[rule.kernel_name, precision]


def warm_up(rule: Rule, precision: Precision) -> None:
    """Compiles, or loads from Numba's cache, all that is used with these, so that no step waits for it."""
    for kernel_of_gradients in gradient_kernels(precision):
        kernel_of_gradients(0, 0, 0)
    if precision == "bf16":
        split(0, 0, 0, 0)
        join(0, 0, 0, 0)
    if isinstance(rule, ElementwiseRule):
        _warm_up_update(rule, precision)
    elif isinstance(rule, TensorRule):
        for beside in rule.beside():
            _warm_up_update(beside, "fp32")


def _warm_up_update(rule: ElementwiseRule, precision: Precision) -> None:
    addresses = len(rule.states(precision)) + 1
    noise = () if rule.noise("", 1) is None else (0, 0, 0)
    # The types of the arguments select the compiled version, hence calls on nothing rather than signatures.
    update_kernel(rule, precision)(*[0] * addresses, 0, *noise, *rule.scalars(1))
    if any(state.dtype is torch.uint8 for state in rule.own_states()):
        codec_kernels.warm_up()
