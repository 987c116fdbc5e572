"""CPU kernels of AdamW, Adam, SGD and Lion, by the contracts of the rules' modules; made and called as in `kernels`.

Moments are fp32, and the gradient is only read.
Which of two rules a kernel is for is a constant of it, as forms are: Numba does not cache a kernel that is given a
function.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray

from pagoda.jit import kernel, part
from pagoda.optim.elements import FP32, halves_of, low_view, master_of, value_of, views
from pagoda.optim.jit import adamw_element, pointer, round_scalars


@part
def _adam_element(w: Any, m: Any, v: Any, gradient: Any, scalars: Any) -> Any:
    grad_scale, weight_decay, beta1, one_minus_beta1, beta2, one_minus_beta2, bias2_sqrt, eps, step_size = scalars
    g = gradient * grad_scale
    g = g + w * weight_decay
    m = m * beta1 + g * one_minus_beta1
    v = v * beta2 + (g * g) * one_minus_beta2
    w = w - step_size * (m / (np.sqrt(v) / bias2_sqrt + eps))
    return w, m, v


@part
def _seven(scalars: Any) -> Any:
    a, b, c, d, e, g, h = scalars
    f = np.float32
    return f(a), f(b), f(c), f(d), f(e), f(g), f(h)


def two_moments(decoupled: bool, weights: int, gradients: int) -> Callable[..., None]:
    """Adam in place on ``n`` elements: AdamW where its decay is `decoupled` from the gradient.

    ``scalars`` are the fields of the rule's `Scalars`. With bf16 it moves 26 bytes per element: 14 read, 12 written.
    """

    @kernel
    def update(
        weight: int, weight_low: int, exp_avg: int, exp_avg_sq: int, gradient: int, n: int, *scalars: float
    ) -> None:
        (whole, high), low = views(weight, n), low_view(weight_low, n)
        avg, avg_sq = carray(pointer(exp_avg, np.float32), n), carray(pointer(exp_avg_sq, np.float32), n)
        grad, half = views(gradient, n)
        rounded = round_scalars(scalars)
        for i in range(n):
            w, g = master_of(weights, whole[i], high[i], low[i]), value_of(gradients, grad[i], half[i])
            if decoupled:
                w, m, v = adamw_element(w, avg[i], avg_sq[i], g, rounded)
            else:
                w, m, v = _adam_element(w, avg[i], avg_sq[i], g, rounded)
            avg[i] = m
            avg_sq[i] = v
            if weights == FP32:
                whole[i] = w
            else:
                high[i], low[i] = halves_of(weights, w)

    return update


@part
def _sgd_momentum_element(w: Any, m: Any, gradient: Any, scalars: Any) -> Any:
    grad_scale, weight_decay, carried, taken, momentum, nesterov, lr = scalars
    g = gradient * grad_scale
    g = g + w * weight_decay
    m = m * carried + g * taken
    d = g + m * momentum if nesterov > np.float32(0) else m
    return w - lr * d, m


@part
def _sgd_element(w: Any, gradient: Any, scalars: Any) -> Any:
    grad_scale, weight_decay, _carried, _taken, _momentum, _nesterov, lr = scalars
    g = gradient * grad_scale
    g = g + w * weight_decay
    return w - lr * g


@part
def _lion_element(w: Any, m: Any, gradient: Any, scalars: Any) -> Any:
    grad_scale, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, lr = scalars
    g = gradient * grad_scale
    w = w * decay
    c = m * beta1 + g * one_minus_beta1
    sign = np.float32(c > np.float32(0)) - np.float32(c < np.float32(0))
    w = w - lr * sign
    return w, m * beta2 + g * one_minus_beta2


def one_moment(lion: bool, weights: int, gradients: int) -> Callable[..., None]:
    """`lion`, or else SGD with momentum, in place on ``n`` elements. With bf16, 10 bytes per element are read and 8
    written."""

    @kernel
    def update(weight: int, weight_low: int, moment: int, gradient: int, n: int, *scalars: float) -> None:
        (whole, high), low = views(weight, n), low_view(weight_low, n)
        moments = carray(pointer(moment, np.float32), n)
        grad, half = views(gradient, n)
        rounded = _seven(scalars)
        for i in range(n):
            w, g = master_of(weights, whole[i], high[i], low[i]), value_of(gradients, grad[i], half[i])
            if lion:
                w, m = _lion_element(w, moments[i], g, rounded)
            else:
                w, m = _sgd_momentum_element(w, moments[i], g, rounded)
            moments[i] = m
            if weights == FP32:
                whole[i] = w
            else:
                high[i], low[i] = halves_of(weights, w)

    return update


def sgd(weights: int, gradients: int) -> Callable[..., None]:
    """SGD without momentum. With bf16, 6 bytes per element are read and 4 written."""

    @kernel
    def update(weight: int, weight_low: int, gradient: int, n: int, *scalars: float) -> None:
        (whole, high), low = views(weight, n), low_view(weight_low, n)
        grad, half = views(gradient, n)
        rounded = _seven(scalars)
        for i in range(n):
            w, g = master_of(weights, whole[i], high[i], low[i]), value_of(gradients, grad[i], half[i])
            w = _sgd_element(w, g, rounded)
            if weights == FP32:
                whole[i] = w
            else:
                high[i], low[i] = halves_of(weights, w)

    return update
