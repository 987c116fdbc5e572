"""What CPU kernels are made of: intrinsics, and the parts that several of them inline.

Strict means no fast-math and no contraction: each operation rounds once, in the order that `adamw` states.

Numba's disk cache notices changes in a kernel's own file only: whoever changes a part here must touch the files of the
kernels that inline it.
"""

from typing import Any

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagoda.jit import part
from pagoda.optim.codecs import BLOCK

LANES = 32
"""Partial sums in `lane_sums`."""
ROW = 4 * LANES
"""Elements that are summed in one row; the four that share a lane are added first."""


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


def _add32_intrinsic(_context: Any, _a: Any, _b: Any) -> Any:
    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.add(*args)

    return types.uint32(types.uint32, types.uint32), codegen


def _xor32_intrinsic(_context: Any, _a: Any, _b: Any) -> Any:
    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.xor(*args)

    return types.uint32(types.uint32, types.uint32), codegen


def _lanes_intrinsic(_context: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        # On the stack: no allocation per call, and LLVM knows that nothing else points there.
        return cgutils.alloca_once(builder, context.get_value_type(types.float64), size=LANES)

    return types.CPointer(types.float64)(), codegen


def _block_intrinsic(_context: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        return cgutils.alloca_once(builder, context.get_value_type(types.float32), size=BLOCK)

    return types.CPointer(types.float32)(), codegen


pointer = intrinsic(_pointer_intrinsic)
bits_to_fp32 = intrinsic(_bits_to_fp32_intrinsic)
fp32_to_bits = intrinsic(_fp32_to_bits_intrinsic)
add32, xor32 = intrinsic(_add32_intrinsic), intrinsic(_xor32_intrinsic)
lane_sums = intrinsic(_lanes_intrinsic)
block_buffer = intrinsic(_block_intrinsic)

# Numba widens uint32 arithmetic to 64 bits; the casts below bring it back, so that it wraps and vectorises. A counter
# would stay in 64 bits all the same, hence `add32` and `xor32`.


@part
def bf16_to_fp32(half: Any) -> Any:
    return bits_to_fp32(np.uint32(np.uint32(half) << 16))


@part
def round_to_bf16(value: Any) -> Any:
    # As fp32 bits: to nearest, ties to even, as torch rounds. A NaN stays one if its low 16 bits are zero, as
    # in every NaN that adding two bf16 values makes; testing for NaN would cost a tenth.
    bits = fp32_to_bits(value)
    return np.uint32(np.uint32(bits + np.uint32(0x7FFF) + np.uint32((bits >> 16) & 1)) & np.uint32(0xFFFF0000))


@part
def square_bits(bits: Any) -> Any:
    x = np.float64(bits_to_fp32(bits))
    return x * x


@part
def sum_of(lanes: Any) -> float:
    total = 0.0
    for j in range(LANES):
        total += lanes[j]
    return total


@part
def joined(high: Any, low: Any) -> Any:
    return bits_to_fp32(np.uint32(np.uint32(np.uint32(high) << 16) + np.uint32(np.int32(low))))


@part
def high_half(value: Any) -> Any:
    return np.uint16(np.uint32(fp32_to_bits(value) + np.uint32(0x8000)) >> 16)


@part
def low_half(value: Any) -> Any:
    return np.int16(fp32_to_bits(value))


@part
def round_scalars(scalars: Any) -> Any:
    s, d, b1, c1, b2, c2, root, eps, size = scalars
    f = np.float32
    return f(s), f(d), f(b1), f(c1), f(b2), f(c2), f(root), f(eps), f(size)


@part
def adamw_element(w: Any, m: Any, v: Any, gradient: Any, scalars: Any) -> Any:
    grad_scale, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, bias2_sqrt, eps, step_size = scalars
    g = gradient * grad_scale
    w = w * decay
    m = m * beta1 + g * one_minus_beta1
    v = v * beta2 + (g * g) * one_minus_beta2
    w = w - step_size * (m / (np.sqrt(v) / bias2_sqrt + eps))
    return w, m, v
