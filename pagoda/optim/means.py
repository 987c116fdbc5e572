"""Means of the gradients of several ranks, added in a fixed order.

**Definition.** Per element, the ranks' gradients are widened to fp32 and added one after another, in the given order.
Each sum is rounded once. The sum is divided by the number of all ranks, and rounded once to the gradient's dtype (to
nearest, ties to even). So the mean is a function of the gradients and their order alone: no transport, block size,
thread count or device can change a bit.
"""

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch
from numba import carray

from pagoda.jit import kernel
from pagoda.optim.arithmetic import BF16, FORMS, FP32, fp32_to_fp16
from pagoda.optim.elements import values_at
from pagoda.optim.gradient_kernels import bf16_bits, gradient_kernels
from pagoda.optim.jit import pointer, shift_right

_BLOCK = 1 << 14
"""Number of elements at a time. The running sum then stays in the first-level cache."""


@cache
def _divide(form: int) -> Callable[[int, int, int, float], None]:
    """The kernel that divides a sum and rounds: (address of the mean, address of the sum, elements, divisor)."""

    @kernel
    def divide_sum(dst: int, total: int, n: int, divisor: float) -> None:
        (whole, half), sums = values_at(dst, n), carray(pointer(total, np.float32), n)
        by = np.float32(divisor)
        for i in range(n):
            value = sums[i] / by
            if form == FP32:
                whole[i] = value
            elif form == BF16:
                half[i] = shift_right(bf16_bits(value), 16)
            else:
                half[i] = fp32_to_fp16(value)

    return divide_sum


def sum_into(total: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Set `total`, fp32 [n], to the sum of `parts`, each [n] in one dtype, in their order. Zeros if there are none."""
    if not parts:
        total.zero_()
    elif total.is_cuda:
        total.copy_(parts[0])
        for part in parts[1:]:
            total += part
    else:
        start, add = gradient_kernels(torch.float32, parts[0].dtype)
        for at in range(0, total.numel(), _BLOCK):
            count = min(_BLOCK, total.numel() - at)
            first, *others = (part.data_ptr() + at * part.itemsize for part in parts)
            address = total.data_ptr() + at * total.itemsize
            start(address, first, count)
            for other in others:
                add(address, other, count)


def mean_into(mean: torch.Tensor, total: torch.Tensor, divisor: int) -> None:
    """Set `mean`, [n] in any gradient dtype, to `total`, fp32 [n], divided by a number of ranks."""
    if mean.is_cuda:
        # The divisor is a tensor: with a number, torch multiplies by its inverse on CUDA.
        mean.copy_(total / torch.full_like(total[:1], divisor))
    else:
        _divide(FORMS[mean.dtype])(mean.data_ptr(), total.data_ptr(), mean.numel(), float(divisor))


def warm_up(dtype: torch.dtype) -> None:
    """Compile what gradients of `dtype` need, or load it from Numba's cache."""
    for take in (*gradient_kernels(torch.float32, dtype), *gradient_kernels(torch.float32)):
        take(0, 0, 0)
    _divide(FORMS[dtype])(0, 0, 0, 1.0)
