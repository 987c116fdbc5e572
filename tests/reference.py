"""The definitions of element-wise rules in plain torch, one operation at a time: every kernel must give their bits."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace

import torch

from pagoda.optim import moments
from pagoda.optim.moments import BLOCK
from pagoda.optim.rule import ElementwiseRule, Key

States = Mapping[str, torch.Tensor]
Numbers = Sequence[torch.Tensor]

TORCH_FUSES = torch.tensor(-(1 + 2**-11)).add_(torch.tensor(1 + 2**-12), alpha=1 + 2**-12).item() != 0.0
"""Whether torch's sums with a factor are rounded once on this CPU. They are if it has AVX2 or AVX-512."""


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


def fused(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """``a * b + c`` of fp32 tensors, rounded once.

    The product is exact in fp64. The sum is rounded to odd: if it is not exact, its last bit is set. Then rounding it
    to fp32 does not round twice (Boldo and Melquiond 2008).
    """
    product, c = a.double() * b.double(), c.double()
    total = product + c
    added = total - product
    error = (product - (total - added)) + (c - added)
    bits = total.view(torch.int64)
    to_odd = (error != 0) & total.isfinite() & (bits & 1 == 0)
    odd = bits + torch.where((error > 0) == (total > 0), 1, -1)
    return torch.where(to_odd, odd, bits).view(torch.float64).float()


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
            states = {state.name: torch.zeros_like(param.data, dtype=state.dtype) for state in rule.own_states()}
            if is_split or param.dtype is torch.bfloat16:
                param.data, states["weight_low"] = split(param.data.float().clone())
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
    grad_scale, weight_decay, carried, taken, momentum, nesterov, minus_lr = scalars
    g = g * grad_scale
    g = fused(w, weight_decay, g) if weight_decay else g
    if "momentum_buffer" not in states:
        return fused(g, minus_lr, w)
    m = fused(g, taken, states["momentum_buffer"] * carried)
    states["momentum_buffer"].copy_(m)
    d = fused(m, momentum, g) if nesterov else m
    return fused(d, minus_lr, w)


def _sign_sgd(_states: States, w: torch.Tensor, g: torch.Tensor, scalars: Numbers, _noise: Key | None) -> torch.Tensor:
    grad_scale, decay, lr = scalars
    g = g * grad_scale
    return w * decay - lr * ((g > 0).float() - (g < 0).float())


def _lion(states: States, w: torch.Tensor, g: torch.Tensor, scalars: Numbers, _noise: Key | None) -> torch.Tensor:
    grad_scale, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, lr = scalars
    g = g * grad_scale
    w = w * decay
    m = states["exp_avg"]
    c = fused(g, one_minus_beta1, m * beta1)
    m.copy_(fused(g, one_minus_beta2, m * beta2))
    return w - lr * ((c > 0).float() - (c < 0).float())


_STEPS: dict[str, Callable[[States, torch.Tensor, torch.Tensor, Numbers, Key | None], torch.Tensor]] = {
    "adamw": _adamw,
    "adamw_moments_bf16": _adamw,
    "adamw_moments_8bit": _adamw,
    "adam": _adam,
    "sgd": _sgd,
    "sgd_momentum": _sgd,
    "sign_sgd": _sign_sgd,
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


def noises(bits: torch.Tensor, cut: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The noise of exp_avg and of exp_avg_sq, below 2 ** cut, from random bits."""
    return bits & ((1 << cut) - 1), bits >> (32 - cut)


def encode_bf16(values: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """bf16 of fp32 ``values``, stochastically rounded with 16 random bits each; both of one shape."""
    bits = _bits(values)
    quiet = (bits & 0x7FFFFFFF) >= moments.MAX_NOISY
    rounded = (bits + noise.masked_fill(quiet, 0)) >> 16
    return rounded.to(torch.int16).view(torch.bfloat16)


def decode_8bit(codes: torch.Tensor, floors: torch.Tensor, signed: bool) -> torch.Tensor:
    """exp_avg, which is `signed`, or exp_avg_sq, fp32 [N], from 8-bit codes, shape [N], and one floor a block."""
    floor = _spread(floors, codes)
    values = _value(((codes & 127 if signed else codes).long() << moments.CUT) + _bits(floor))
    if not signed:
        return values
    half = values / 2
    values = values - torch.where(half > floor, half, floor)
    return torch.where(codes >= 128, -values, values)


def encode_8bit(values: torch.Tensor, noise: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """8-bit codes, shape [N], and floors of such a moment, shape [N]."""
    padded = torch.nn.functional.pad(_bits(values.abs()), (0, -values.numel() % BLOCK))
    exponent = (padded.view(-1, BLOCK).amax(1) + (1 << moments.CUT) - 1) >> 23
    floors = _value((exponent - (14 if signed else 31)).clamp(min=0) << 23)
    floors = floors.masked_fill(exponent >= moments.NOT_FINITE, torch.nan)
    floor = _spread(floors, values)
    raised = values.abs().maximum(floor)
    raised = raised + values.abs() if signed else raised
    codes = (_bits(raised) - _bits(floor) + noise) >> moments.CUT
    codes = codes | torch.signbit(values).long() << 7 if signed else codes
    return codes.masked_fill(floor.isnan(), 0).to(torch.uint8), floors


def _decoded(states: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Both moments in fp32."""
    if "exp_avg" in states:
        return states["exp_avg"], states["exp_avg_sq"]
    if "exp_avg_bf16" in states:
        return states["exp_avg_bf16"].float(), states["exp_avg_sq_bf16"].float()
    return (
        decode_8bit(states["exp_avg_fp8"], states["exp_avg_floor"], True),
        decode_8bit(states["exp_avg_sq_fp8"], states["exp_avg_sq_floor"], False),
    )


def _encode(states: Mapping[str, torch.Tensor], m: torch.Tensor, v: torch.Tensor, noise: Key | None) -> None:
    """Overwrite the moments."""
    if "exp_avg" in states:
        new = {"exp_avg": m, "exp_avg_sq": v}
    elif "exp_avg_bf16" in states:
        first, second = noises(random_bits(m.numel(), noise).view(m.shape), 16)
        new = {"exp_avg_bf16": encode_bf16(m, first), "exp_avg_sq_bf16": encode_bf16(v, second)}
    else:
        first, second = noises(random_bits(m.numel(), noise), moments.CUT)
        new = dict(zip(("exp_avg_fp8", "exp_avg_floor"), encode_8bit(m, first, True), strict=True))
        new |= zip(("exp_avg_sq_fp8", "exp_avg_sq_floor"), encode_8bit(v, second, False), strict=True)
    for name, value in new.items():
        states[name].copy_(value)


def _times(x: torch.Tensor, factor: int) -> torch.Tensor:
    """``x * factor`` modulo 2**32, in halves, as 64 bits would overflow."""
    return (x * (factor & 0xFFFF) + ((x * (factor >> 16) & 0xFFFF) << 16)) & 0xFFFFFFFF


def _bits(values: torch.Tensor) -> torch.Tensor:
    """The bits of fp32 values, as int64."""
    return values.view(torch.int32).long() & 0xFFFFFFFF


def _value(bits: torch.Tensor) -> torch.Tensor:
    """The fp32 values of such bits, below 2 ** 31."""
    return bits.to(torch.int32).view(torch.float32)


def _spread(floors: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Every element's floor."""
    return floors.repeat_interleave(BLOCK)[: codes.numel()]
