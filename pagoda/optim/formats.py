"""Formats: the kernels for what weights and gradients are kept in.

bf16 and fp32, with gradients of the same, have kernels of their own. Others are made of those for fp32: blocks are
widened in the cache, and rounded back. A rule computes in fp32 whatever it stores, so what its fp32 kernel does to a
master that was joined, and a gradient that was widened, is what a kernel of the format's own would do, to the bit. A
chunk is small enough to stay in the cache, so that memory sees each state read and written once.
"""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from pagoda.optim import fp16, kernels
from pagoda.optim.kernels import GradientKernels, UpdateKernel
from pagoda.optim.rule import ElementwiseRule, Precision, Rule, StateSpec, gradient_dtype

CHUNK = 1 << 14
"""Elements that are widened at a time: a multiple of what is quantized together."""

_WIDEN: dict[torch.dtype, Callable[[int, int, int], None]] = {
    torch.float16: fp16.widen_fp16,
    torch.bfloat16: fp16.widen_bf16,
}
_HALVES: dict[torch.dtype, tuple[Callable[..., None], Callable[..., None]]] = {
    torch.float16: (fp16.split_fp16, fp16.join_fp16),
    torch.bfloat16: (kernels.split, kernels.join),
}


def halves(weight: torch.dtype) -> tuple[Callable[..., None], Callable[..., None]]:
    """What splits a master into weights of 16 bits and what is kept beside them, and what joins the two.

    `split(master, weight, weight_low, n)` and `join(weight, weight_low, master, n)`, all but n addresses.
    """
    return _HALVES[weight]


def update_kernel(rule: ElementwiseRule, precision: Precision, gradient: torch.dtype | None = None) -> UpdateKernel:
    """The kernel of a rule for weights in `precision` and gradients in that too, or in another dtype."""
    weight = gradient_dtype(precision)
    gradient = gradient or weight
    if precision != "fp16" and gradient is weight:
        return kernels.update_kernel(rule, precision)
    return partial(_update, kernels.update_kernel(rule, "fp32"), rule.own_states(), weight, gradient)


def arriving_dtype(kept: torch.dtype, weight: torch.dtype) -> torch.dtype:
    """What a gradient of weights in `weight` has when it is stored or added to one in `kept`.

    It is converted before only where that makes it no longer.
    """
    return weight if kept in (torch.float32, weight) else kept


def gradient_kernels(kept: torch.dtype, arriving: torch.dtype) -> GradientKernels:
    """What stores and what adds gradients in `arriving` to ones in `kept`, which is the same or fp32."""
    if kept is torch.float16:
        return GradientKernels(fp16.store_gradient_fp16, fp16.add_gradient_fp16)
    plain = kernels.gradient_kernels("bf16" if kept is torch.bfloat16 else "fp32")
    if arriving is kept:
        return plain
    return GradientKernels(*(partial(_gradient, kernel, arriving) for kernel in plain))


def warm_up(rule: Rule, precision: Precision, gradient: torch.dtype | None = None) -> None:
    """Compiles, or loads from Numba's cache, all that is used with these, so that no step waits for it."""
    weight = gradient_dtype(precision)
    kept = gradient or weight
    kernels.warm_up(rule, "fp32" if precision == "fp16" or kept is not weight else precision)
    for kernel in gradient_kernels(kept, arriving_dtype(kept, weight)):
        kernel(0, 0, 0)
    for kernel in (*_HALVES.get(weight, ()), *(_WIDEN[dtype] for dtype in {weight, kept} & _WIDEN.keys())):
        kernel(*[0] * (4 if kernel in _HALVES.get(weight, ()) else 3))


class _Scratch(threading.local):
    """A thread's buffers, shape [CHUNK]."""

    def __init__(self) -> None:
        self.master, self.gradient = torch.empty(CHUNK), torch.empty(CHUNK)


_scratch = _Scratch()


def _update(
    update: UpdateKernel,
    own: tuple[StateSpec, ...],
    weight: torch.dtype,
    gradient: torch.dtype,
    *arguments: Any,
) -> None:
    """`arguments` are the kernel's: addresses of weights, own states and gradient, n, noise, scalars."""
    first_own = 2 if weight in _HALVES else 1
    weights, states = arguments[:first_own], arguments[first_own : first_own + len(own)]
    gradients, n, *others = arguments[first_own + len(own) :]
    random = isinstance(others[0], int)  # noise, whose first number is the index of an element
    scratch = _scratch
    for start in range(0, n, CHUNK):
        count = min(CHUNK, n - start)
        at = [address + spec.nbytes(start) for address, spec in zip(states, own, strict=True)]
        grad = gradients + start * gradient.itemsize
        if gradient is not torch.float32:
            _WIDEN[gradient](scratch.gradient.data_ptr(), grad, count)
            grad = scratch.gradient.data_ptr()
        rest = [others[0] + start, *others[1:]] if random else others
        if weight not in _HALVES:
            update(weights[0] + 4 * start, *at, grad, count, *rest)
            continue
        split, join = _HALVES[weight]
        high, low, master = weights[0] + 2 * start, weights[1] + 2 * start, scratch.master.data_ptr()
        join(high, low, master, count)
        update(master, *at, grad, count, *rest)
        split(master, high, low, count)


def _gradient(kernel: Callable[[int, int, int], float], arriving: torch.dtype, dst: int, src: int, n: int) -> float:
    scratch = _scratch.gradient.data_ptr()
    total = 0.0
    for start in range(0, n, CHUNK):
        count = min(CHUNK, n - start)
        _WIDEN[arriving](scratch, src + start * arriving.itemsize, count)
        total += kernel(dst + 4 * start, scratch, count)
    return total
