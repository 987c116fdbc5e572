"""CPU kernels by address: strict Numba, compiled for this machine on first use.

This is the hot path. A kernel takes addresses (``Tensor.data_ptr()``, or a page's address plus an offset in
bytes) and an element count, checks nothing, and touches no Python object, so lane threads run it side by
side (``nogil``) block by block, and a call costs about a microsecond. `flat` is the checked front, and `formats` says
which kernels weights and gradients need.

Invariants the caller keeps: each address is the start of ``n`` elements of the stated type that stay alive
and unshared during the call; regions do not overlap; scalars are Python floats; the thread does not flush
denormals (``torch.set_flush_denormal``), as that changes bits. Any alignment is correct; 64 bytes is best.

A kernel is compiled for the forms (`elements`) of the master and of the gradient, once a process. A rule computes in
fp32 whatever is stored, so the bits are those that the same values in fp32 would give.

The kernels of rules are in `momentum_kernels`, and for moments that are not fp32 in `codec_kernels`; what takes
gradients is in `gradient_kernels`, and what all are made of in `jit` and `elements`.
"""

from collections.abc import Callable
from functools import cache, partial

import numpy as np
import torch
from numba import carray

from pagoda.config.training import Precision
from pagoda.jit import kernel
from pagoda.optim import codec_kernels, momentum_kernels
from pagoda.optim.elements import FORMS
from pagoda.optim.jit import high_half, joined, low_half, pointer
from pagoda.optim.rule import ElementwiseRule, gradient_dtype

UpdateKernel = Callable[..., None]
"""``(*addresses of the rule's states in their order, gradient address, n, *noise, *scalars)``, where noise is nothing,
or where states are rounded at random the first element's index in its parameter and the `Key`'s two numbers."""


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


_UPDATES: dict[str, Callable[[int, int], UpdateKernel]] = {
    "adamw": partial(momentum_kernels.two_moments, True),
    "adamw_moments_bf16": codec_kernels.adamw_moments_bf16,
    "adamw_moments_8bit": codec_kernels.adamw_moments_8bit,
    "adam": partial(momentum_kernels.two_moments, False),
    "sgd": momentum_kernels.sgd,
    "sgd_momentum": partial(momentum_kernels.one_moment, False),
    "lion": partial(momentum_kernels.one_moment, True),
}
"""`ElementwiseRule.kernel_name` -> what makes the rule's kernel of the forms of weights and gradients. It takes the
address of what is kept beside a weight, whether there is such or not."""


@cache
def compiled(kernel_name: str, weights: int, gradients: int) -> UpdateKernel:
    """The compiled kernel of a rule for weights and gradients of these forms."""
    return _UPDATES[kernel_name](weights, gradients)


def update_kernel(rule: ElementwiseRule, precision: Precision, gradient: torch.dtype | None = None) -> UpdateKernel:
    """The kernel of a rule for weights in `precision` and gradients in that too, or in another dtype.

    Raises ConfigError for a precision that is not known.
    """
    weight = gradient_dtype(precision)
    update = compiled(rule.kernel_name, FORMS[weight], FORMS[gradient or weight])
    if precision != "fp32":
        return update

    def whole(weight: int, *others: float) -> None:
        update(weight, weight, *others)

    return whole


def warm_up(rule: ElementwiseRule, precision: Precision, gradient: torch.dtype | None = None) -> None:
    """Compiles a rule's kernel, or loads it from Numba's cache, so that no step waits for it."""
    addresses = len(rule.states(precision)) + 1
    noise = () if rule.noise("", 1) is None else (0, 0, 0)
    # The types of the arguments select the compiled version, hence calls on nothing rather than signatures.
    update_kernel(rule, precision, gradient)(*[0] * addresses, 0, *noise, *rule.scalars(1))
    if any(state.dtype is torch.uint8 for state in rule.own_states()):
        codec_kernels.warm_up()
