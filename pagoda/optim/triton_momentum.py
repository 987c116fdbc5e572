"""SGD and Lion on a GPU: the CPU's contracts in Triton, called as the kernels of `triton_adamw`."""

import triton.language as tl

from pagoda.optim.triton_parts import jit, load_gradient, load_master, store_master


@jit(do_not_specialize=("n",))
def sgd_momentum(
    weight: tl.tensor,
    weight_low: tl.tensor,
    momentum_buffer: tl.tensor,
    gradient: tl.tensor,
    n: tl.tensor,
    grad_scale: tl.tensor,
    weight_decay: tl.tensor,
    carried: tl.tensor,
    taken: tl.tensor,
    momentum: tl.tensor,
    nesterov: tl.tensor,
    lr: tl.tensor,
    split: tl.constexpr,
    size: tl.constexpr,
) -> None:
    """SGD with momentum."""
    at = tl.program_id(0) * size + tl.arange(0, size)
    mask = at < n
    w = load_master(weight, weight_low, at, mask, split)
    g = load_gradient(gradient, at, mask, split) * grad_scale
    g = g + w * weight_decay
    m = tl.load(momentum_buffer + at, mask, 0.0) * carried + g * taken
    d = tl.where(nesterov > 0.0, g + m * momentum, m)
    tl.store(momentum_buffer + at, m, mask)
    store_master(weight, weight_low, at, w - lr * d, mask, split)


@jit(do_not_specialize=("n",))
def sgd(
    weight: tl.tensor,
    weight_low: tl.tensor,
    gradient: tl.tensor,
    n: tl.tensor,
    grad_scale: tl.tensor,
    weight_decay: tl.tensor,
    carried: tl.tensor,
    taken: tl.tensor,
    momentum: tl.tensor,
    nesterov: tl.tensor,
    lr: tl.tensor,
    split: tl.constexpr,
    size: tl.constexpr,
) -> None:
    """SGD without momentum, of whose scalars it takes three."""
    at = tl.program_id(0) * size + tl.arange(0, size)
    mask = at < n
    w = load_master(weight, weight_low, at, mask, split)
    g = load_gradient(gradient, at, mask, split) * grad_scale
    g = g + w * weight_decay
    store_master(weight, weight_low, at, w - lr * g, mask, split)


@jit(do_not_specialize=("n",))
def lion(
    weight: tl.tensor,
    weight_low: tl.tensor,
    exp_avg: tl.tensor,
    gradient: tl.tensor,
    n: tl.tensor,
    grad_scale: tl.tensor,
    decay: tl.tensor,
    beta1: tl.tensor,
    one_minus_beta1: tl.tensor,
    beta2: tl.tensor,
    one_minus_beta2: tl.tensor,
    lr: tl.tensor,
    split: tl.constexpr,
    size: tl.constexpr,
) -> None:
    """Lion."""
    at = tl.program_id(0) * size + tl.arange(0, size)
    mask = at < n
    w = load_master(weight, weight_low, at, mask, split) * decay
    g = load_gradient(gradient, at, mask, split) * grad_scale
    m = tl.load(exp_avg + at, mask, 0.0)
    c = m * beta1 + g * one_minus_beta1
    sign = (c > 0.0).to(tl.float32) - (c < 0.0).to(tl.float32)
    tl.store(exp_avg + at, m * beta2 + g * one_minus_beta2, mask)
    store_master(weight, weight_low, at, w - lr * sign, mask, split)
