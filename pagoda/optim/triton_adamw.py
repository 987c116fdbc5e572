"""AdamW and Adam on a GPU: the contracts of `adamw` and `adam` in Triton, with every way of `codecs` to keep moments.

A kernel takes pointers to the first of `n` elements: bf16 and int16 halves as int16, codes as uint8, fp32 as fp32.
"""

import triton.language as tl

from pagoda.optim import codecs
from pagoda.optim.triton_parts import (
    bf16_to_fp32,
    decode_signed,
    decode_unsigned,
    encode_signed,
    encode_unsigned,
    jit,
    load_gradient,
    load_master,
    magnitude,
    noise_bits,
    round_noisily,
    scale_of,
    store_master,
)

_BLOCK = tl.constexpr(codecs.BLOCK)

_INTEGERS = ("n", "index", "key_low", "key_high")
"""Their values shall not compile kernels of their own."""


@jit()
def _element(
    w: tl.tensor,
    m: tl.tensor,
    v: tl.tensor,
    g: tl.tensor,
    decay: tl.tensor,
    beta1: tl.tensor,
    one_minus_beta1: tl.tensor,
    beta2: tl.tensor,
    one_minus_beta2: tl.tensor,
    bias2_sqrt: tl.tensor,
    eps: tl.tensor,
    step_size: tl.tensor,
    decoupled: tl.constexpr,
) -> tl.tensor:
    if decoupled:
        w = w * decay
    else:
        g = g + w * decay
    m = m * beta1 + g * one_minus_beta1
    v = v * beta2 + (g * g) * one_minus_beta2
    w = w - step_size * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), bias2_sqrt) + eps)
    return w, m, v


@jit(do_not_specialize=_INTEGERS)
def adamw(
    weight: tl.tensor,
    weight_low: tl.tensor,
    exp_avg: tl.tensor,
    exp_avg_sq: tl.tensor,
    gradient: tl.tensor,
    n: tl.tensor,
    index: tl.tensor,
    key_low: tl.tensor,
    key_high: tl.tensor,
    grad_scale: tl.tensor,
    decay: tl.tensor,
    beta1: tl.tensor,
    one_minus_beta1: tl.tensor,
    beta2: tl.tensor,
    one_minus_beta2: tl.tensor,
    bias2_sqrt: tl.tensor,
    eps: tl.tensor,
    step_size: tl.tensor,
    split: tl.constexpr,
    noisy: tl.constexpr,
    decoupled: tl.constexpr,
    size: tl.constexpr,
) -> None:
    """One step on ``n`` elements, `size` a program: of a split master or (not `split`) of fp32 weights, where
    `weight_low` is not touched; of fp32 moments or (`noisy`) of bf16 ones. Where the decay is not `decoupled` from the
    gradient, it is Adam's.

    `index` is the first element's in its parameter, the keys are those of `Key`, each as an int32 of the same bits.
    """
    at = tl.program_id(0) * size + tl.arange(0, size)
    mask = at < n
    w, g = load_master(weight, weight_low, at, mask, split), load_gradient(gradient, at, mask, split) * grad_scale
    m, v = tl.load(exp_avg + at, mask, 0), tl.load(exp_avg_sq + at, mask, 0)
    if noisy:
        m, v = bf16_to_fp32(m), bf16_to_fp32(v)
    w, m, v = _element(
        w, m, v, g, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, bias2_sqrt, eps, step_size, decoupled
    )
    if noisy:
        number = tl.add(index.to(tl.uint32), at.to(tl.uint32), sanitize_overflow=False)
        noise = noise_bits(number, key_low.to(tl.uint32), key_high.to(tl.uint32))
        tl.store(exp_avg + at, round_noisily(m, noise & 0xFFFF), mask)
        tl.store(exp_avg_sq + at, round_noisily(v, noise >> 16), mask)
    else:
        tl.store(exp_avg + at, m, mask)
        tl.store(exp_avg_sq + at, v, mask)
    store_master(weight, weight_low, at, w, mask, split)


@jit(do_not_specialize=("n",), do_not_specialize_on_alignment=("exp_avg_scale", "exp_avg_sq_scale"))
def adamw_8bit(
    weight: tl.tensor,
    weight_low: tl.tensor,
    exp_avg: tl.tensor,
    exp_avg_sq: tl.tensor,
    exp_avg_scale: tl.tensor,
    exp_avg_sq_scale: tl.tensor,
    gradient: tl.tensor,
    n: tl.tensor,
    grad_scale: tl.tensor,
    decay: tl.tensor,
    beta1: tl.tensor,
    one_minus_beta1: tl.tensor,
    beta2: tl.tensor,
    one_minus_beta2: tl.tensor,
    bias2_sqrt: tl.tensor,
    eps: tl.tensor,
    step_size: tl.tensor,
    split: tl.constexpr,
    size: tl.constexpr,
) -> None:
    """`adamw` with 8-bit moments: a program has whole quantization blocks, and the first element is that of one."""
    rows: tl.constexpr = size // _BLOCK
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    at = row[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    mask = at < n
    there = row * _BLOCK < n
    w, g = load_master(weight, weight_low, at, mask, split), load_gradient(gradient, at, mask, split) * grad_scale
    m = decode_signed(tl.load(exp_avg + at, mask, 0)) * tl.load(exp_avg_scale + row, there, 0.0)[:, None]
    v = decode_unsigned(tl.load(exp_avg_sq + at, mask, 0)) * tl.load(exp_avg_sq_scale + row, there, 0.0)[:, None]
    w, m, v = _element(
        w, m, v, g, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, bias2_sqrt, eps, step_size, True
    )
    store_master(weight, weight_low, at, w, mask, split)
    scale = scale_of(tl.max(tl.where(mask, magnitude(m), 0), axis=1))
    tl.store(exp_avg_scale + row, scale, there)
    usable = (scale > 0.0)[:, None]
    inverse = tl.div_rn(1.0, tl.where(scale > 0.0, scale, 1.0))[:, None]
    tl.store(exp_avg + at, tl.where(usable, encode_signed(tl.where(usable, m, 0.0), inverse), 0), mask)
    scale = scale_of(tl.max(tl.where(mask, magnitude(v), 0), axis=1))
    tl.store(exp_avg_sq_scale + row, scale, there)
    usable = (scale > 0.0)[:, None]
    inverse = tl.div_rn(1.0, tl.where(scale > 0.0, scale, 1.0))[:, None]
    tl.store(exp_avg_sq + at, tl.where(usable, encode_unsigned(tl.where(usable, v, 0.0), inverse), 0), mask)
