"""Formats: the kernels for what weights and gradients are kept in, as the runtime asks for them."""

from collections.abc import Callable

import torch

from pagoda.config.training import Precision
from pagoda.optim import fp16, gradient_kernels as gradients, kernels
from pagoda.optim.elements import FORMS
from pagoda.optim.gradient_kernels import GradientKernels
from pagoda.optim.kernels import update_kernel
from pagoda.optim.rule import ElementwiseRule, Rule, TensorRule, gradient_dtype

__all__ = ["arriving_dtype", "gradient_kernels", "halves", "update_kernel", "warm_up"]

_HALVES: dict[torch.dtype, tuple[Callable[..., None], Callable[..., None]]] = {
    torch.float16: (fp16.split_fp16, fp16.join_fp16),
    torch.bfloat16: (kernels.split, kernels.join),
}


def halves(weight: torch.dtype) -> tuple[Callable[..., None], Callable[..., None]]:
    """What splits a master into weights of 16 bits and what is kept beside them, and what joins the two.

    `split(master, weight, weight_low, n)` and `join(weight, weight_low, master, n)`, all but n addresses.
    """
    return _HALVES[weight]


def arriving_dtype(kept: torch.dtype, weight: torch.dtype) -> torch.dtype:
    """What a gradient of weights in `weight` has when it is stored or added to one in `kept`.

    It is converted before only where that makes it no longer.
    """
    return weight if kept in (torch.float32, weight) else kept


def gradient_kernels(kept: torch.dtype, arriving: torch.dtype | None = None) -> GradientKernels:
    """What stores and what adds gradients in `arriving` to ones in `kept`, which is the same or fp32."""
    return gradients.gradient_kernels(FORMS[kept], FORMS[arriving or kept])


def warm_up(rule: Rule, precision: Precision, gradient: torch.dtype | None = None) -> None:
    """Compiles, or loads from Numba's cache, all that is used with these, so that no step waits for it."""
    weight = gradient_dtype(precision)
    kept = gradient or weight
    for take in gradient_kernels(kept, arriving_dtype(kept, weight)):
        take(0, 0, 0)
    for convert in _HALVES.get(weight, ()):
        convert(0, 0, 0, 0)
    if isinstance(rule, ElementwiseRule):
        kernels.warm_up(rule, precision, gradient)
    elif isinstance(rule, TensorRule):
        for beside in rule.beside():
            kernels.warm_up(beside, "fp32")
