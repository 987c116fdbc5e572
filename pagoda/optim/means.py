"""Means of gradients of several ranks, in an order that is fixed.

**Contract.** Per element: the ranks' gradients are widened to fp32 and added one after another, in the order given,
each sum rounded once; the sum is divided by the number of ranks in all and rounded once to the gradient's dtype (to
nearest, ties to even). So the mean is a function of the gradients and their order alone: no transport, block size,
thread count or device can change a bit.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numba import carray

from pagoda.jit import kernel
from pagoda.optim.jit import bf16_to_fp32, pointer, round_to_bf16

_BLOCK = 1 << 14
"""Elements at a time: the running sum then stays in the first-level cache."""


@kernel
def start_sum_bf16(total: int, src: int, n: int) -> None:
    """``total = src`` on ``n`` bf16 elements, as fp32."""
    sums = carray(pointer(total, np.float32), n)
    source = carray(pointer(src, np.uint16), n)
    for i in range(n):
        sums[i] = bf16_to_fp32(source[i])


@kernel
def add_to_sum_bf16(total: int, src: int, n: int) -> None:
    """``total += src`` on ``n`` bf16 elements, in fp32."""
    sums = carray(pointer(total, np.float32), n)
    source = carray(pointer(src, np.uint16), n)
    for i in range(n):
        sums[i] = sums[i] + bf16_to_fp32(source[i])


@kernel
def start_sum_fp32(total: int, src: int, n: int) -> None:
    """``total = src`` on ``n`` fp32 elements."""
    sums = carray(pointer(total, np.float32), n)
    source = carray(pointer(src, np.float32), n)
    for i in range(n):
        sums[i] = source[i]


@kernel
def add_to_sum_fp32(total: int, src: int, n: int) -> None:
    """``total += src`` on ``n`` fp32 elements."""
    sums = carray(pointer(total, np.float32), n)
    source = carray(pointer(src, np.float32), n)
    for i in range(n):
        sums[i] = sums[i] + source[i]


@kernel
def mean_to_bf16(dst: int, total: int, n: int, divisor: float) -> None:
    """``dst = total / divisor`` on ``n`` elements, rounded to bf16."""
    to = carray(pointer(dst, np.uint16), n)
    sums = carray(pointer(total, np.float32), n)
    by = np.float32(divisor)
    for i in range(n):
        to[i] = np.uint16(round_to_bf16(sums[i] / by) >> 16)


@kernel
def mean_to_fp32(dst: int, total: int, n: int, divisor: float) -> None:
    """``dst = total / divisor`` on ``n`` fp32 elements."""
    to = carray(pointer(dst, np.float32), n)
    sums = carray(pointer(total, np.float32), n)
    by = np.float32(divisor)
    for i in range(n):
        to[i] = sums[i] / by


_SUMS = {torch.bfloat16: (start_sum_bf16, add_to_sum_bf16), torch.float32: (start_sum_fp32, add_to_sum_fp32)}
_MEANS = {torch.bfloat16: mean_to_bf16, torch.float32: mean_to_fp32}


def sum_into(total: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Make `total`, fp32 [n], the sum of `parts`, each [n] of one dtype, in their order; zeros where there are none."""
    if not parts:
        total.zero_()
    elif total.is_cuda or parts[0].dtype not in _SUMS:
        total.copy_(parts[0])
        for part in parts[1:]:
            total += part
    else:
        start, add = _SUMS[parts[0].dtype]
        for at in range(0, total.numel(), _BLOCK):
            count = min(_BLOCK, total.numel() - at)
            first, *others = (part.data_ptr() + at * part.element_size() for part in parts)
            address = total.data_ptr() + at * total.element_size()
            start(address, first, count)
            for other in others:
                add(address, other, count)


def mean_into(mean: torch.Tensor, total: torch.Tensor, divisor: int) -> None:
    """Make `mean`, bf16 or fp32 [n], `total`, fp32 [n], divided by a number of ranks."""
    if mean.is_cuda or mean.dtype not in _MEANS:
        mean.copy_(total / divisor)
    else:
        _MEANS[mean.dtype](mean.data_ptr(), total.data_ptr(), mean.numel(), float(divisor))


def warm_up(dtype: torch.dtype) -> None:
    """Compile, or load from Numba's cache, what gradients of `dtype` need."""
    for kernel_of in (*_SUMS.get(dtype, ()), *_SUMS[torch.float32]):
        kernel_of(0, 0, 0)
    if dtype in _MEANS:
        _MEANS[dtype](0, 0, 0, 1.0)
