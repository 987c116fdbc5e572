"""AdamW on the split master: its settings, its states, and the scalars of one step.

Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (ICLR 2019).

**Contract.** Every kernel of this rule (CPU, GPU, reference) computes, per element, in fp32, in this order,
rounding once after each operation (to nearest, ties to even), with no fused multiply-add, with division and
square root correctly rounded, and without flushing denormals::

    g     = float(gradient) * grad_scale
    w     = w * decay
    m     = m * beta1 + g * one_minus_beta1
    v     = v * beta2 + (g * g) * one_minus_beta2
    denom = sqrt(v) / bias2_sqrt + eps
    w     = w - step_size * (m / denom)

The new state is then a function of the old state, the gradient and the scalars alone: the same bits for any
block size, thread count, tier or device. The scalars come from `step_scalars`.

**Split master.** In precision "bf16" the fp32 master weight is stored as two halves. With ``bits`` its 32
bits as an unsigned integer, modulo 2**32::

    weight     = (bits + 0x8000) >> 16      bf16: the master rounded to nearest, ties away from zero
    weight_low = bits - (weight << 16)      int16
    bits       = (weight << 16) + weight_low

This is lossless for every bit pattern. (Ties to even is not: int16 holds -0x8000 but not 0x8000.)
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch

from pagoda.errors import ConfigError
from pagoda.optim.codecs import BLOCK, Key, Moments

Precision = Literal["bf16", "fp32"]


def check_precision(precision: str) -> None:
    """Raises ConfigError unless ``precision`` is one of `Precision`."""
    if precision not in get_args(Precision):
        raise ConfigError(f"precision is {precision!r}; use one of {', '.join(get_args(Precision))}")


def check_moments(moments: str) -> None:
    """Raises ConfigError unless ``moments`` is one of `Moments`."""
    if moments not in get_args(Moments):
        raise ConfigError(f"AdamW moments is {moments!r}; use one of {', '.join(get_args(Moments))}")


def gradient_dtype(precision: Precision) -> torch.dtype:
    """Dtype of gradients, and of the weights that forward and backward read."""
    check_precision(precision)
    return torch.bfloat16 if precision == "bf16" else torch.float32


@dataclass(frozen=True)
class StateSpec:
    """One flat state of a parameter: one element of ``dtype`` for every ``per`` elements of the parameter.

    The last element stands for what is left where ``per`` does not divide the parameter.
    """

    name: str
    dtype: torch.dtype
    per: int = 1

    def elements(self, numel: int) -> int:
        """Elements of the state for ``numel`` of the parameter; also the first one's place, if ``per`` divides it."""
        return -(-numel // self.per)

    def shape(self, parameter: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the state of a parameter of that shape: its own, or flat where elements stand for many."""
        return parameter if self.per == 1 else (self.elements(math.prod(parameter)),)

    def nbytes(self, numel: int) -> int:
        """Bytes of the state for ``numel`` elements of the parameter."""
        return self.elements(numel) * self.dtype.itemsize


_WEIGHTS: Mapping[Precision, tuple[StateSpec, ...]] = {
    "bf16": (StateSpec("weight", torch.bfloat16), StateSpec("weight_low", torch.int16)),
    "fp32": (StateSpec("weight", torch.float32),),
}
# Another codec has other names, so that a checkpoint of one is never taken for one of another.
_MOMENTS: Mapping[Moments, tuple[StateSpec, ...]] = {
    "fp32": (StateSpec("exp_avg", torch.float32), StateSpec("exp_avg_sq", torch.float32)),
    "bf16": (StateSpec("exp_avg_bf16", torch.bfloat16), StateSpec("exp_avg_sq_bf16", torch.bfloat16)),
    "8bit": (
        StateSpec("exp_avg_8bit", torch.uint8),
        StateSpec("exp_avg_sq_8bit", torch.uint8),
        StateSpec("exp_avg_scale", torch.float32, per=BLOCK),
        StateSpec("exp_avg_sq_scale", torch.float32, per=BLOCK),
    ),
}
MOMENT_NAMES = ("exp_avg", "exp_avg_sq")
"""The moments as torch names them, whatever they are kept in."""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check(name: str, value: float, holds: bool, rule: str) -> None:
    if not holds:
        raise ConfigError(f"AdamW {name} is {value!r}; it must be {rule}")


def _check_settings(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    _check("lr", lr, _is_number(lr) and lr >= 0, "a finite number >= 0")
    if len(betas) != 2:
        raise ConfigError(f"AdamW betas is {betas!r}; it must be two numbers")
    for index, beta in enumerate(betas):
        _check(f"betas[{index}]", beta, _is_number(beta) and 0 <= beta < 1, "in [0, 1)")
    # An eps of zero, or one that fp32 rounds to zero, turns a parameter with zero gradient into 0 / 0.
    _check("eps", eps, _is_number(eps) and _fp32(eps) > 0, "a finite number > 0 in fp32")
    _check("weight_decay", weight_decay, _is_number(weight_decay) and weight_decay >= 0, "a finite number >= 0")


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Settings of AdamW, with the names and defaults of ``torch.optim.AdamW``.

    lr: learning rate, >= 0.
    betas: decay rates of the first and second moment, each in [0, 1).
    eps: added to the denominator, > 0.
    weight_decay: decoupled weight decay coefficient, >= 0.

    Beside those of torch:
    moments: what the moments are kept in between updates (`codecs`): "fp32", exact; "bf16", rounded stochastically;
        "8bit", quantized in blocks.
    seed: of the stochastic rounding.

    Raises ConfigError, naming the field, for a value outside its range.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    moments: Moments = "fp32"
    seed: int = 0

    def __post_init__(self) -> None:
        _check_settings(self.lr, self.betas, self.eps, self.weight_decay)
        check_moments(self.moments)

    def states(self, precision: Precision) -> tuple[StateSpec, ...]:
        """States of one parameter, in the order in which the kernels take them; the gradient is not one."""
        check_precision(precision)
        return _WEIGHTS[precision] + _MOMENTS[self.moments]

    def states_of(self, moment: str) -> tuple[StateSpec, ...]:
        """The states that keep one of `MOMENT_NAMES`: codes, then scales."""
        return _MOMENTS[self.moments][MOMENT_NAMES.index(moment) :: len(MOMENT_NAMES)]

    def noise(self, name: str, step: int) -> Key | None:
        """What a parameter's moments are rounded with at its update number ``step``; None where nothing is random."""
        return Key.of(self.seed, name, step) if self.moments == "bf16" else None

    def defaults(self) -> dict[str, Any]:
        """Per-group settings for ``torch.optim.Optimizer``; schedulers change them in ``param_groups``."""
        return {"lr": self.lr, "betas": self.betas, "eps": self.eps, "weight_decay": self.weight_decay}


@dataclass(frozen=True, kw_only=True, slots=True)
class Hyper:
    """Hyperparameters of one parameter at one step, as the user set them (float64).

    step: number of this update of the parameter; the first is 1.
    grad_scale: the gradient is multiplied by it: the clip coefficient, or 1.

    Raises ConfigError for values no step can be taken with.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    grad_scale: float = 1.0

    def __post_init__(self) -> None:
        _check_settings(self.lr, (self.beta1, self.beta2), self.eps, self.weight_decay)
        _check("step", self.step, self.step >= 1, ">= 1: count the update before taking it")
        _check("grad_scale", self.grad_scale, _is_number(self.grad_scale), "a finite number")

    @classmethod
    def from_group(cls, group: Mapping[str, Any], step: int, grad_scale: float = 1.0) -> "Hyper":
        """Reads a torch ``param_groups`` entry as it stands now; ``lr`` may be a one-element tensor."""
        beta1, beta2 = group["betas"]
        return cls(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            step=step,
            grad_scale=float(grad_scale),
        )


class Scalars(NamedTuple):
    """The scalars of the contract, in the order of the kernels' arguments; each is exactly an fp32 value."""

    grad_scale: float
    decay: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    bias2_sqrt: float
    eps: float
    step_size: float


def step_scalars(hyper: Hyper) -> Scalars:
    """Scalars for one step: computed in float64, then rounded once to fp32.

    ``decay = 1 - lr * weight_decay``; with t the step, ``step_size = lr / (1 - beta1**t)`` and
    ``bias2_sqrt = sqrt(1 - beta2**t)`` hold the bias corrections.
    """
    exact = Scalars(
        grad_scale=hyper.grad_scale,
        decay=1.0 - hyper.lr * hyper.weight_decay,
        beta1=hyper.beta1,
        one_minus_beta1=1.0 - hyper.beta1,
        beta2=hyper.beta2,
        one_minus_beta2=1.0 - hyper.beta2,
        bias2_sqrt=math.sqrt(1.0 - hyper.beta2**hyper.step),
        eps=hyper.eps,
        step_size=hyper.lr / (1.0 - hyper.beta1**hyper.step),
    )
    return Scalars(*map(_fp32, exact))


def _fp32(value: float) -> float:
    return float(np.float32(value))
