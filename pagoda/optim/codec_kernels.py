"""CPU kernels for 8-bit moments, by the contract of `codecs`; made and called as in `kernels`.

Every block has arrays of its own, indexed from 0: where an index is a sum, Numba tests each for being below zero, and
LLVM reads and writes element by element.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray

from pagoda.jit import kernel, part
from pagoda.optim.arithmetic import FP32, adam_element, decode, encode, magnitude, scale_of
from pagoda.optim.codecs import BLOCK
from pagoda.optim.elements import load, load_master, masters_at, store_master, values_at
from pagoda.optim.jit import on_stack, pointer, rounded


@part
def _encode_block(values: Any, codes: Any, count: Any, top: Any, signed: Any) -> Any:
    """Encode one block of exp_avg, which is `signed`, or exp_avg_sq, whose largest magnitude has the bits `top`;
    returns its scale."""
    scale = scale_of(top)
    if scale > np.float32(0):
        inverse = np.float32(1) / scale
        for i in range(count):
            codes[i] = encode(values[i], inverse, signed)
    else:
        for i in range(count):
            codes[i] = np.uint8(0)
    return scale


def adamw(weights: int, gradients: int) -> Callable[..., None]:
    """AdamW in place on ``n`` elements, of which the first is the first of a block.

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
        *numbers: float,
    ) -> None:
        blocks = (n + BLOCK - 1) // BLOCK
        scale = carray(pointer(exp_avg_scale, np.float32), blocks)
        scale_sq = carray(pointer(exp_avg_sq_scale, np.float32), blocks)
        avg, avg_sq = carray(on_stack(np.float32, BLOCK), BLOCK), carray(on_stack(np.float32, BLOCK), BLOCK)
        scalars = rounded(numbers)
        for block in range(blocks):
            first = block * BLOCK
            count = min(BLOCK, n - first)
            masters = masters_at(weight + weight_bytes * first, weight_low + 2 * first, count)
            grads = values_at(gradient + gradient_bytes * first, count)
            codes = carray(pointer(exp_avg + first, np.uint8), count)
            codes_sq = carray(pointer(exp_avg_sq + first, np.uint8), count)
            top, top_sq = np.uint32(0), np.uint32(0)
            for i in range(count):
                w, g = load_master(weights, masters, i), load(gradients, grads, i)
                m, v = decode(codes[i], True) * scale[block], decode(codes_sq[i], False) * scale_sq[block]
                w, m, v = adam_element(w, m, v, g, scalars, True)
                avg[i] = m
                avg_sq[i] = v
                top, top_sq = max(top, magnitude(m)), max(top_sq, magnitude(v))
                store_master(weights, masters, i, w)
            scale[block] = _encode_block(avg, codes, count, top, True)
            scale_sq[block] = _encode_block(avg_sq, codes_sq, count, top_sq, False)

    return update


@kernel
def encode_moment(values: int, codes: int, scales: int, n: int, signed: bool) -> None:
    """``n`` fp32 elements of exp_avg, which is `signed`, or exp_avg_sq, whose elements are not below zero, to 8-bit
    codes and a scale for each block; the first is the first of a block."""
    scale = carray(pointer(scales, np.float32), (n + BLOCK - 1) // BLOCK)
    for block in range(len(scale)):
        first = block * BLOCK
        count = min(BLOCK, n - first)
        value = carray(pointer(values + 4 * first, np.float32), count)
        code = carray(pointer(codes + first, np.uint8), count)
        top = np.uint32(0)
        for i in range(count):
            top = max(top, magnitude(value[i]))
        scale[block] = _encode_block(value, code, count, top, signed)


@kernel
def decode_moment(codes: int, scales: int, values: int, n: int, signed: bool) -> None:
    """The reverse of `encode_moment`."""
    scale = carray(pointer(scales, np.float32), (n + BLOCK - 1) // BLOCK)
    code, value = carray(pointer(codes, np.uint8), n), carray(pointer(values, np.float32), n)
    for i in range(n):
        value[i] = decode(code[i], signed) * scale[i // BLOCK]


def warm_up() -> None:
    """Compiles, or loads from Numba's cache, what encodes and decodes 8-bit moments by themselves."""
    encode_moment(0, 0, 0, 0, True)
    decode_moment(0, 0, 0, 0, True)
