"""CPU kernels of Adam, SGD and Lion: the contracts of `adam`, `sgd` and `lion`, called as those of `kernels`."""

from typing import Any

import numpy as np
from numba import carray

from pagoda.jit import kernel, part
from pagoda.optim.jit import bf16_to_fp32, high_half, joined, low_half, pointer, round_scalars


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


@kernel
def adam_bf16(
    weight: int, weight_low: int, exp_avg: int, exp_avg_sq: int, gradient: int, n: int, *scalars: float
) -> None:
    """Adam in place on ``n`` elements: bf16 weight, int16 low half, fp32 moments, bf16 gradient.

    Moves 26 bytes per element: 14 read, 12 written.
    """
    high = carray(pointer(weight, np.uint16), n)
    low = carray(pointer(weight_low, np.int16), n)
    avg = carray(pointer(exp_avg, np.float32), n)
    avg_sq = carray(pointer(exp_avg_sq, np.float32), n)
    grad = carray(pointer(gradient, np.uint16), n)
    rounded = round_scalars(scalars)
    for i in range(n):
        w, m, v = _adam_element(joined(high[i], low[i]), avg[i], avg_sq[i], bf16_to_fp32(grad[i]), rounded)
        avg[i] = m
        avg_sq[i] = v
        high[i] = high_half(w)
        low[i] = low_half(w)


@kernel
def adam_fp32(weight: int, exp_avg: int, exp_avg_sq: int, gradient: int, n: int, *scalars: float) -> None:
    """Adam in place on ``n`` elements, all fp32.

    Moves 28 bytes per element: 16 read, 12 written.
    """
    master = carray(pointer(weight, np.float32), n)
    avg = carray(pointer(exp_avg, np.float32), n)
    avg_sq = carray(pointer(exp_avg_sq, np.float32), n)
    grad = carray(pointer(gradient, np.float32), n)
    rounded = round_scalars(scalars)
    for i in range(n):
        w, m, v = _adam_element(master[i], avg[i], avg_sq[i], grad[i], rounded)
        avg[i] = m
        avg_sq[i] = v
        master[i] = w


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


@kernel
def sgd_momentum_bf16(
    weight: int, weight_low: int, momentum_buffer: int, gradient: int, n: int, *scalars: float
) -> None:
    """SGD in place on ``n`` elements: bf16 weight, int16 low half, fp32 buffer, bf16 gradient.

    Moves 18 bytes per element: 10 read, 8 written.
    """
    high = carray(pointer(weight, np.uint16), n)
    low = carray(pointer(weight_low, np.int16), n)
    buffer = carray(pointer(momentum_buffer, np.float32), n)
    grad = carray(pointer(gradient, np.uint16), n)
    rounded = _seven(scalars)
    for i in range(n):
        w, m = _sgd_momentum_element(joined(high[i], low[i]), buffer[i], bf16_to_fp32(grad[i]), rounded)
        buffer[i] = m
        high[i] = high_half(w)
        low[i] = low_half(w)


@kernel
def sgd_momentum_fp32(weight: int, momentum_buffer: int, gradient: int, n: int, *scalars: float) -> None:
    """SGD in place on ``n`` elements, all fp32.

    Moves 20 bytes per element: 12 read, 8 written.
    """
    master = carray(pointer(weight, np.float32), n)
    buffer = carray(pointer(momentum_buffer, np.float32), n)
    grad = carray(pointer(gradient, np.float32), n)
    rounded = _seven(scalars)
    for i in range(n):
        w, m = _sgd_momentum_element(master[i], buffer[i], grad[i], rounded)
        buffer[i] = m
        master[i] = w


@kernel
def sgd_bf16(weight: int, weight_low: int, gradient: int, n: int, *scalars: float) -> None:
    """SGD without momentum, as `sgd_momentum_bf16`. Moves 10 bytes per element: 6 read, 4 written."""
    high = carray(pointer(weight, np.uint16), n)
    low = carray(pointer(weight_low, np.int16), n)
    grad = carray(pointer(gradient, np.uint16), n)
    rounded = _seven(scalars)
    for i in range(n):
        w = _sgd_element(joined(high[i], low[i]), bf16_to_fp32(grad[i]), rounded)
        high[i] = high_half(w)
        low[i] = low_half(w)


@kernel
def sgd_fp32(weight: int, gradient: int, n: int, *scalars: float) -> None:
    """SGD without momentum, all fp32. Moves 12 bytes per element: 8 read, 4 written."""
    master = carray(pointer(weight, np.float32), n)
    grad = carray(pointer(gradient, np.float32), n)
    rounded = _seven(scalars)
    for i in range(n):
        master[i] = _sgd_element(master[i], grad[i], rounded)


@part
def _lion_element(w: Any, m: Any, gradient: Any, scalars: Any) -> Any:
    grad_scale, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, lr = scalars
    g = gradient * grad_scale
    w = w * decay
    c = m * beta1 + g * one_minus_beta1
    sign = np.float32(c > np.float32(0)) - np.float32(c < np.float32(0))
    w = w - lr * sign
    return w, m * beta2 + g * one_minus_beta2


@kernel
def lion_bf16(weight: int, weight_low: int, exp_avg: int, gradient: int, n: int, *scalars: float) -> None:
    """Lion in place on ``n`` elements: bf16 weight, int16 low half, fp32 momentum, bf16 gradient.

    Moves 18 bytes per element: 10 read, 8 written.
    """
    high = carray(pointer(weight, np.uint16), n)
    low = carray(pointer(weight_low, np.int16), n)
    avg = carray(pointer(exp_avg, np.float32), n)
    grad = carray(pointer(gradient, np.uint16), n)
    rounded = _seven(scalars)
    for i in range(n):
        w, m = _lion_element(joined(high[i], low[i]), avg[i], bf16_to_fp32(grad[i]), rounded)
        avg[i] = m
        high[i] = high_half(w)
        low[i] = low_half(w)


@kernel
def lion_fp32(weight: int, exp_avg: int, gradient: int, n: int, *scalars: float) -> None:
    """Lion in place on ``n`` elements, all fp32.

    Moves 20 bytes per element: 12 read, 8 written.
    """
    master = carray(pointer(weight, np.float32), n)
    avg = carray(pointer(exp_avg, np.float32), n)
    grad = carray(pointer(gradient, np.float32), n)
    rounded = _seven(scalars)
    for i in range(n):
        w, m = _lion_element(master[i], avg[i], grad[i], rounded)
        avg[i] = m
        master[i] = w
