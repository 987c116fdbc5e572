"""The contract of `adamw` in plain torch, one operation at a time: every kernel must give its bits."""

from collections.abc import Mapping

import torch

from pagoda.optim.adamw import Scalars


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 high and int16 low halves of fp32 ``master``, of its shape."""
    bits = master.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    high = (bits + 0x8000) >> 16
    low = bits - (high << 16)
    return high.to(torch.int16).view(torch.bfloat16), low.to(torch.int16)


def join(weight: torch.Tensor, weight_low: torch.Tensor) -> torch.Tensor:
    """The fp32 master of the two halves, of their shape."""
    high = weight.view(torch.int16).to(torch.int64)
    return ((high << 16) + weight_low.to(torch.int64)).to(torch.int32).view(torch.float32)


def adamw_step(states: Mapping[str, torch.Tensor], gradient: torch.Tensor, scalars: Scalars) -> None:
    """One AdamW step in place, on any device.

    states: as named by ``AdamW().states(precision)``; gradient: of the weight's dtype and shape, only read.
    """
    weight, m, v = states["weight"], states["exp_avg"], states["exp_avg_sq"]
    is_split = weight.dtype is torch.bfloat16
    w = join(weight, states["weight_low"]) if is_split else weight.clone()
    # Zero-dimensional tensors on the device: torch divides by a Python number on CUDA as a product.
    on_device = torch.tensor(scalars, dtype=torch.float32, device=weight.device).unbind()
    grad_scale, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, bias2_sqrt, eps, step_size = on_device

    g = gradient.float() * grad_scale
    w = w * decay
    m.copy_(m * beta1 + g * one_minus_beta1)
    v.copy_(v * beta2 + (g * g) * one_minus_beta2)
    # torch's fp32 square root on the CPU is not always correctly rounded (MKL). Through float64 it is, as
    # rounding twice cannot hurt with 53 >= 2 * 24 + 2 bits (Figueroa 1995).
    denom = v.double().sqrt().float() / bias2_sqrt + eps
    w = w - step_size * (m / denom)

    if is_split:
        high, low = split(w)
        weight.copy_(high)
        states["weight_low"].copy_(low)
    else:
        weight.copy_(w)
