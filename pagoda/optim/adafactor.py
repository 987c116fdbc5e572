"""Adafactor: a second moment kept as the product of its row and column means.

Source: Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost" (ICML 2018). The math is that
of ``torch.optim.Adafactor``, operation by operation, so with its settings the bits are its too. Beside them are the
options of the paper (and of transformers) that torch leaves out: a first moment, and steps that do not shrink with
1 / sqrt(t) or scale with the parameter.

With t the step, R and C the means over rows and columns (over the last two dimensions; parameters with one or none keep
the whole moment), RMS(x) the root of the mean square, eps1 of fp32 if None::

    rate = min(lr, 1 / sqrt(t))                     relative_step, else lr
    rate = max(eps2, RMS(w)) * rate                 scale_parameter
    w    = w * (1 - lr * weight_decay)
    R, C = R + (mean(g * g) - R) * t ** beta2_decay
    u    = g / sqrt(max(R @ C / max(mean(R), eps1), eps1 ** 2))
    u    = u * rate / max(1, RMS(u) / d)            clipping by the update's RMS
    m    = m * beta1 + u * (1 - beta1);  u = m      where there is a first moment
    w    = w - u
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from pagoda.optim.rule import StateSpec, TensorRule, check, check_not_negative, is_number


def _rows(_name: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    return (*shape[:-1], 1) if len(shape) > 1 else None


def _columns(_name: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    return (*shape[:-2], 1, shape[-1]) if len(shape) > 1 else None


def _vectors(_name: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    return shape if len(shape) < 2 else None


@dataclass(frozen=True, kw_only=True)
class Adafactor(TensorRule):
    """Settings of Adafactor, with the names and defaults of ``torch.optim.Adafactor``.

    lr: most of the relative step, >= 0; without `relative_step`, the step itself.
    beta2_decay: exponent of the step in the second moment's rate, <= 0.
    eps: least second moment (None: the epsilon of fp32), and least RMS of a parameter that steps scale with.
    d: RMS above which an update is clipped to it, >= 1.
    weight_decay: decoupled weight decay coefficient, >= 0.

    Beside those of torch:
    beta1: rate of a first moment, in [0, 1); None: there is none, and state beside the weights is next to nothing.
    relative_step: the step shrinks with 1 / sqrt(t) once that is below lr.
    scale_parameter: the step is relative to the parameter's RMS.

    Param groups may differ in beta1, but it is None in all or in none.
    Raises ConfigError, naming the field, for a value outside its range.
    """

    name: ClassVar[str] = "Adafactor"
    lr: float = 1e-2
    beta2_decay: float = -0.8
    eps: tuple[float | None, float] = (None, 1e-3)
    d: float = 1.0
    weight_decay: float = 0.0
    beta1: float | None = None
    relative_step: bool = True
    scale_parameter: bool = True

    def __post_init__(self) -> None:
        check_not_negative(self, "lr", "weight_decay")
        check(self.name, "beta2_decay", self.beta2_decay, is_number(self.beta2_decay) and self.beta2_decay <= 0, "<= 0")
        check(self.name, "d", self.d, is_number(self.d) and self.d >= 1, "a finite number >= 1")
        fits = len(self.eps) == 2 and all(e is None or (is_number(e) and e >= 0) for e in self.eps)
        check(self.name, "eps", self.eps, fits and self.eps[1] is not None, "two numbers >= 0, the first possibly None")
        in_range = self.beta1 is None or (is_number(self.beta1) and 0 <= self.beta1 < 1)
        check(self.name, "beta1", self.beta1, in_range, "None or in [0, 1)")

    def own_states(self) -> tuple[StateSpec, ...]:
        """The factors, the second moment of vectors, and the first moment if there is one."""
        states = (
            StateSpec("row_var", torch.float32, shape_of=_rows),
            StateSpec("col_var", torch.float32, shape_of=_columns),
            StateSpec("variance", torch.float32, shape_of=_vectors),
        )
        return states if self.beta1 is None else (*states, StateSpec("exp_avg", torch.float32))

    def update(
        self, step: int, weight: torch.Tensor, gradient: torch.Tensor, states: Mapping[str, torch.Tensor]
    ) -> None:
        """One step, in place. Takes one more fp32 tensor as large as the parameter while it runs."""
        eps1, eps2 = self.eps
        eps1 = torch.finfo(torch.float32).eps if eps1 is None else eps1
        assert eps2 is not None
        root = weight.numel() ** 0.5
        rate = min(self.lr, 1 / (step**0.5)) if self.relative_step else self.lr
        if self.scale_parameter:
            rate = max(eps2, weight.norm(2).item() / root) * rate
        if self.weight_decay != 0:
            weight.mul_(1 - self.lr * self.weight_decay)
        update = self._second_moment(step, gradient, states, eps1).clamp_(min=eps1 * eps1).rsqrt_()
        update.mul_(gradient)
        rate /= max(1.0, update.norm(2).item() / (root * self.d))
        if self.beta1 is None:
            weight.add_(update, alpha=-rate)
        else:
            states["exp_avg"].mul_(self.beta1).add_(update.mul_(rate), alpha=1 - self.beta1)
            weight.sub_(states["exp_avg"])

    def _second_moment(
        self, step: int, gradient: torch.Tensor, states: Mapping[str, torch.Tensor], eps1: float
    ) -> torch.Tensor:
        """The estimate after this step, in the parameter's shape."""
        share = float(step) ** self.beta2_decay
        if gradient.dim() < 2:
            return states["variance"].lerp_(gradient * gradient, share).clone()
        rows, columns = states["row_var"], states["col_var"]
        rows.lerp_(torch.norm(gradient, dim=-1, keepdim=True).square_().div_(gradient.size(-1)), share)
        columns.lerp_(torch.norm(gradient, dim=-2, keepdim=True).square_().div_(gradient.size(-2)), share)
        return (rows @ columns).div_(rows.mean(dim=-2, keepdim=True).clamp_(min=eps1))
