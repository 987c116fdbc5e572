"""The definitions of element-wise rules in plain torch, one operation at a time: every kernel must give their bits."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace

import torch

from pagoda.optim import codecs
from pagoda.optim.codecs import BLOCK, Key
from pagoda.optim.rule import ElementwiseRule

States = Mapping[str, torch.Tensor]
Numbers = Sequence[torch.Tensor]


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


def split_fp16(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp16 weights and int16 distances of fp32 ``master``, of its shape, as `fp16` states them."""
    weight = master.half()
    return weight, ((master - weight.float()) / _unit(weight)).round().to(torch.int16)


def join_fp16(weight: torch.Tensor, weight_low: torch.Tensor) -> torch.Tensor:
    """The fp32 master of the two, of their shape."""
    return weight.float() - (-weight_low.float()).add(0.0) * _unit(weight)  # subtracting zero keeps a negative zero


def _unit(weight: torch.Tensor) -> torch.Tensor:
    exponent = (weight.view(torch.int16) >> 10) & 0x1F
    return torch.ldexp(torch.ones(weight.shape), exponent.clamp(min=1).to(torch.int32) - 40)


def update(
    rule: ElementwiseRule,
    states: Mapping[str, torch.Tensor],
    gradient: torch.Tensor,
    scalars: tuple[float, ...],
    noise: Key | None = None,
) -> None:
    """One update in place, on any device; with 8-bit moments, tensors are flat.

    states: as named by ``rule.states(precision)``; gradient: of the weight's dtype and shape, only read;
    scalars, noise: the rule's, of one step of the parameter that the tensors are.
    """
    weight = states["weight"]
    is_split = weight.dtype is torch.bfloat16
    w = join(weight, states["weight_low"]) if is_split else weight.clone()
    # Zero-dimensional tensors on the device: torch divides by a Python number on CUDA as a product.
    on_device = torch.tensor(scalars, dtype=torch.float32, device=weight.device).unbind()
    w = _STEPS[rule.kernel_name](states, w, gradient.float(), on_device, noise)
    if is_split:
        high, low = split(w)
        weight.copy_(high)
        states["weight_low"].copy_(low)
    else:
        weight.copy_(w)


class InMemory:
    """An optimizer by the definition of a rule, with the methods that training loops use."""

    def __init__(self, params: Iterable[torch.nn.Parameter], rule: ElementwiseRule, is_split: bool = False) -> None:
        self.rule, self.stats = rule, SimpleNamespace(grad_norm=None, faults=0, bytes_moved={})
        self.states: dict[torch.nn.Parameter, dict[str, torch.Tensor]] = {}
        for param in dict.fromkeys(params):
            states = {state.name: torch.zeros_like(param.data) for state in rule.own_states()}
            if is_split:
                param.data, states["weight_low"] = split(param.data.clone())
            self.states[param] = {"weight": param.data, **states}
        self.steps = dict.fromkeys(self.states, 0)

    def step(self, grad_scale: float = 1.0) -> None:
        for param, states in self.states.items():
            if param.grad is not None:
                self.steps[param] += 1
                update(self.rule, states, param.grad, self.rule.scalars(self.steps[param], grad_scale))

    def zero_grad(self) -> None:
        for param in self.states:
            param.grad = None


def _adamw(states: States, w: torch.Tensor, g: torch.Tensor, scalars: Numbers, noise: Key | None) -> torch.Tensor:
    grad_scale, decay, *rates = scalars
    return _adam_step(states, w * decay, g * grad_scale, rates, noise)


def _adam(states: States, w: torch.Tensor, g: torch.Tensor, scalars: Numbers, _noise: Key | None) -> torch.Tensor:
    grad_scale, weight_decay, *rates = scalars
    g = g * grad_scale
    g = g + w * weight_decay
    return _adam_step(states, w, g, rates, None)


def _adam_step(states: States, w: torch.Tensor, g: torch.Tensor, rates: Numbers, noise: Key | None) -> torch.Tensor:
    beta1, one_minus_beta1, beta2, one_minus_beta2, bias2_sqrt, eps, step_size = rates
    m, v = _decoded(states)
    m = m * beta1 + g * one_minus_beta1
    v = v * beta2 + (g * g) * one_minus_beta2
    # torch's fp32 square root on the CPU is not always correctly rounded (MKL). Through float64 it is, as
    # rounding twice cannot hurt with 53 >= 2 * 24 + 2 bits (Figueroa 1995).
    denom = v.double().sqrt().float() / bias2_sqrt + eps
    _encode(states, m, v, noise)
    return w - step_size * (m / denom)


def _sgd(states: States, w: torch.Tensor, g: torch.Tensor, scalars: Numbers, _noise: Key | None) -> torch.Tensor:
    grad_scale, weight_decay, carried, taken, momentum, nesterov, lr = scalars
    g = g * grad_scale
    g = g + w * weight_decay
    if "momentum_buffer" not in states:
        return w - lr * g
    m = states["momentum_buffer"] * carried + g * taken
    states["momentum_buffer"].copy_(m)
    d = g + m * momentum if nesterov else m
    return w - lr * d


def _lion(states: States, w: torch.Tensor, g: torch.Tensor, scalars: Numbers, _noise: Key | None) -> torch.Tensor:
    grad_scale, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, lr = scalars
    g = g * grad_scale
    w = w * decay
    m = states["exp_avg"]
    c = m * beta1 + g * one_minus_beta1
    m.copy_(m * beta2 + g * one_minus_beta2)
    return w - lr * ((c > 0).float() - (c < 0).float())


_STEPS: dict[str, Callable[[States, torch.Tensor, torch.Tensor, Numbers, Key | None], torch.Tensor]] = {
    "adamw": _adamw,
    "adamw_moments_bf16": _adamw,
    "adamw_moments_8bit": _adamw,
    "adam": _adam,
    "sgd": _sgd,
    "sgd_momentum": _sgd,
    "lion": _lion,
}
"""`ElementwiseRule.kernel_name` -> (states, master, gradient, scalars, noise) to the new master; changes the states."""


def random_bits(numel: int, key: Key) -> torch.Tensor:
    """The 32 random bits of the first elements of a parameter, shape [numel], int64."""
    mask = 0xFFFFFFFF
    x = torch.arange(numel, dtype=torch.int64) ^ key.low
    x = _times(x ^ (x >> 16), 0x7FEB352D)
    x = ((x ^ (x >> 15)) + key.high) & mask
    x = _times(x, 0x846CA68B)
    return x ^ (x >> 16)


def round_noisily(values: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """bf16 of fp32 ``values``, stochastically rounded with 16 random bits each; both of one shape."""
    bits = values.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    quiet = (bits & 0x7FFFFFFF) >= codecs.MAX_NOISY
    rounded = (bits + noise.masked_fill(quiet, 0)) >> 16
    return rounded.to(torch.int16).view(torch.bfloat16)


def decode(codes: torch.Tensor, scales: torch.Tensor, signed: bool) -> torch.Tensor:
    """exp_avg, which is `signed`, or exp_avg_sq, fp32 [N], from 8-bit codes, shape [N], and one scale a block."""
    k = (codes & 127 if signed else codes).float()
    value = _map_value(k * 2 + 1 if signed else k + 1.5)
    value = torch.where(k == (127 if signed else 255), 1.0, value).masked_fill(k == 0, 0.0)
    value = torch.where(codes >= 128, -value, value) if signed else value
    return value * _spread(scales, codes)


def encode(values: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """8-bit codes, shape [N], and scales of such a moment, shape [N]."""
    magnitudes = values.view(torch.int32) & 0x7FFFFFFF
    padded = torch.nn.functional.pad(magnitudes, (0, -values.numel() % BLOCK))
    top = padded.view(-1, BLOCK).amax(1)
    scales = top.view(torch.float32).masked_fill(top < 0x00800000, 0.0).masked_fill(top >= 0x7F800000, torch.nan)
    usable = _spread(scales, values) > 0
    x = torch.where(usable, magnitudes.view(torch.float32) * _spread(1 / scales, values), 0.0)
    u = torch.stack([x * _fp32(a) + _fp32(b) for a, b in codecs.LINES]).amin(0)
    if signed:
        u = _nearest(u.clamp(min=1)).clamp(1, 126.5)
        u = torch.where(x >= _fp32(codecs.TOP_SIGNED), 127.0, u)
        k = u.masked_fill(x < _fp32(codecs.ZERO_SIGNED), 0).to(torch.uint8)
        k |= torch.signbit(values).to(torch.uint8) << 7
    else:
        u = (_nearest((u * 2).clamp(min=2)) - 1).clamp(1, 254.5)
        u = torch.where(x >= _fp32(codecs.TOP_UNSIGNED), 255.0, u)
        k = u.masked_fill(x <= 0, 0).to(torch.uint8)
    return k.masked_fill(~usable, 0), scales


def _decoded(states: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Both moments in fp32."""
    if "exp_avg" in states:
        return states["exp_avg"], states["exp_avg_sq"]
    if "exp_avg_bf16" in states:
        return states["exp_avg_bf16"].float(), states["exp_avg_sq_bf16"].float()
    return (
        decode(states["exp_avg_8bit"], states["exp_avg_scale"], True),
        decode(states["exp_avg_sq_8bit"], states["exp_avg_sq_scale"], False),
    )


def _encode(states: Mapping[str, torch.Tensor], m: torch.Tensor, v: torch.Tensor, noise: Key | None) -> None:
    """Overwrite the moments."""
    if "exp_avg" in states:
        new = {"exp_avg": m, "exp_avg_sq": v}
    elif "exp_avg_bf16" in states:
        bits = random_bits(m.numel(), noise).view(m.shape)
        new = {"exp_avg_bf16": round_noisily(m, bits & 0xFFFF), "exp_avg_sq_bf16": round_noisily(v, bits >> 16)}
    else:
        new = dict(zip(("exp_avg_8bit", "exp_avg_scale"), encode(m, True), strict=True))
        new |= zip(("exp_avg_sq_8bit", "exp_avg_sq_scale"), encode(v, False), strict=True)
    for name, value in new.items():
        states[name].copy_(value)


def _times(x: torch.Tensor, factor: int) -> torch.Tensor:
    """``x * factor`` modulo 2**32, in halves, as 64 bits would overflow."""
    return (x * (factor & 0xFFFF) + ((x * (factor >> 16) & 0xFFFF) << 16)) & 0xFFFFFFFF


def _fp32(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


def _map_value(f: torch.Tensor) -> torch.Tensor:
    p = torch.ones_like(f)
    for below, factor, step in ((16, 16, 1e-4), (64, 4, 1e-2), (128, 2, 1e-1)):
        small = f < below
        p = torch.where(small, p * _fp32(step), p)
        f = torch.where(small, f * factor, f)
    return p * (f * _fp32(codecs.TENTH_STEPS) - _fp32(0.8))


def _nearest(u: torch.Tensor) -> torch.Tensor:
    n = (u.view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where(u - n < _fp32(0.2), u - 1, u)


def _spread(scales: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Every element's scale."""
    return scales.repeat_interleave(BLOCK)[: codes.numel()]
