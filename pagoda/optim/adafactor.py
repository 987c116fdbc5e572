"""Adafactor: a second moment kept as the product of its row and column means.

Source: Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost" (ICML 2018). The math is that
of ``torch.optim.Adafactor``. There are also options of the paper (and of transformers) that torch leaves out: a first
moment, and steps that do not shrink with 1 / sqrt(t) or scale with the parameter.

t is the step, and g the gradient times grad_scale. R and C, the *factors*, are running means of g * g over each row and
each column of the last two dimensions. A parameter with fewer dimensions is one row: it keeps C alone, and r = 1.
RMS(x) is the root of the mean square. eps1 is the epsilon of fp32 if it is None::

    R, C = R + (mean(g * g) - R) * t ** beta2_decay
    r    = R / max(mean(R), eps1)
    u    = g / sqrt(max(r * C, eps1 ** 2))
    rate = min(lr, 1 / sqrt(t))                     relative_step, else lr
    rate = rate * max(eps2, RMS(w))                 scale_parameter
    rate = rate / max(1, RMS(u) / d)                clipping by the update's RMS
    u    = u * rate
    m    = m * beta1 + u * (1 - beta1);  u = m      where there is a first moment
    w    = w * (1 - lr * weight_decay) - u

All this is fp32, and each operation is rounded once. `factors` has the factors, `arithmetic` the rest.

**Sums** are fp64. Their order depends on the parameter's shape alone, so the CPU and the GPU give the same bits. To
*fold* n values is to add the second half to the first, repeatedly, until one value is left. The length of the first
half is the largest power of two below n. A matrix is cut into blocks of 64 rows and 1,024 columns. The last ones may be
smaller.

- Squares of a column: added in each block from the first row to the last. The sums of blocks are folded.
- Squares of a row: added in each block to 128 sums, element i to sum i modulo 128. These are folded, and then the sums
  of blocks.
- Squares of all weights, or of all updates: added in each block by column. These sums are folded, and then the sums of
  blocks, in the order of rows of blocks.
- The mean of R: all rows are folded.

A mean is the sum, rounded to fp32, divided by the number of elements in fp32.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from pagoda.optim.rule import Shape, StateSpec, TensorRule, are_values, fp32, is_number


def _rows(_name: str, shape: Shape) -> Shape | None:
    return (*shape[:-1], 1) if len(shape) > 1 else None


def _columns(_name: str, shape: Shape) -> Shape | None:
    return (*shape[:-2], 1, shape[-1]) if len(shape) > 1 else None


def _vectors(_name: str, shape: Shape) -> Shape | None:
    return shape if len(shape) < 2 else None


@dataclass(frozen=True, kw_only=True)
class Adafactor(TensorRule):
    """Settings of Adafactor, with the names and defaults of ``torch.optim.Adafactor``.

    lr: upper limit of the relative step, >= 0. Without `relative_step`, the step itself.
    beta2_decay: exponent of the step in the second moment's rate, <= 0.
    eps: lower limits of the second moment's root (None: the epsilon of fp32), and of the RMS in `scale_parameter`.
    d: upper limit of an update's RMS before it is multiplied by the step, >= 1.
    weight_decay: decoupled weight decay coefficient, >= 0.

    In addition to those of torch:
    beta1: decay rate of a first moment, in [0, 1). None: there is none, so states take almost no memory.
    relative_step: the step is 1 / sqrt(t) once that is below lr.
    scale_parameter: the step is multiplied by the parameter's RMS.

    Param groups may differ in beta1, but it is None in all or in none.
    Raises ConfigError, naming the field, for a value outside its range.
    """

    name: ClassVar[str] = "Adafactor"
    only: ClassVar[Mapping[str, Any]] = {"maximize": False}
    copies: ClassVar[bool] = False
    element_work: ClassVar[float] = 4.4
    lr: float = 1e-2
    beta2_decay: float = -0.8
    eps: tuple[float | None, float] = (None, 1e-3)
    d: float = 1.0
    weight_decay: float = 0.0
    beta1: float | None = None
    relative_step: bool = True
    scale_parameter: bool = True

    def __post_init__(self) -> None:
        self._require_not_negative("lr", "weight_decay")
        self._require("beta2_decay", is_number(self.beta2_decay) and self.beta2_decay <= 0, "<= 0")
        self._require("d", is_number(self.d) and self.d >= 1, "a finite number >= 1")
        fits = are_values(self.eps, 2) and all(e is None or (is_number(e) and e >= 0) for e in self.eps)
        self._require("eps", fits and self.eps[1] is not None, "two numbers >= 0, the first possibly None")
        self._require_bools("relative_step", "scale_parameter")
        in_range = self.beta1 is None or (is_number(self.beta1) and 0 <= self.beta1 < 1)
        self._require("beta1", in_range, "None or in [0, 1)")

    def own_states(self) -> tuple[StateSpec, ...]:
        """The factors, the second moment of vectors, and the first moment if there is one."""
        states = (
            StateSpec("row_var", torch.float32, shape_of=_rows),
            StateSpec("col_var", torch.float32, shape_of=_columns),
            StateSpec("variance", torch.float32, shape_of=_vectors),
        )
        return states if self.beta1 is None else (*states, StateSpec("exp_avg", torch.float32))

    def update(
        self,
        step: int,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        weight_low: torch.Tensor | None = None,
        grad_scale: float = 1.0,
    ) -> None:
        """Do one step in place. All tensors are on the CPU or all on a GPU.

        weight, gradient: bf16, fp16 or fp32, in the parameter's shape. The gradient is only read. weight_low: the low
        half of the master, flat. None if weights are fp32. grad_scale: the factor of the gradient.
        """
        if weight.device.type == "cuda":
            from pagoda.optim.triton_kernels import update_adafactor as update
        else:
            from pagoda.optim.adafactor_kernels import update
        scalars = self.scalars(step, grad_scale)
        update(weight, weight_low, gradient, states, as_matrices(weight.shape), scalars, self.scale_parameter)

    def scalars(self, step: int, grad_scale: float = 1.0) -> tuple[float, ...]:
        """The scalars of a step, each exactly an fp32 value: the gradient's factor, the share of new squares in the
        factors, eps1, eps1 ** 2, the step's rate, the least RMS of weights, d, the factor of weights, beta1, 1 - beta1.
        """
        eps1, least = self.eps
        eps1 = torch.finfo(torch.float32).eps if eps1 is None else eps1
        assert least is not None
        rate = min(self.lr, 1 / step**0.5) if self.relative_step else self.lr
        least = least if self.scale_parameter else 1.0
        beta1 = self.beta1 or 0.0
        numbers = grad_scale, float(step) ** self.beta2_decay, eps1, eps1 * eps1, rate, least, self.d
        return tuple(map(fp32, (*numbers, 1 - self.lr * self.weight_decay, beta1, 1 - beta1)))


def as_matrices(shape: Shape) -> tuple[int, int, int]:
    """(matrices, rows, columns) of a parameter, which is updated as a stack of matrices."""
    if len(shape) < 2:
        return 1, 1, math.prod(shape)
    return math.prod(shape[:-2]), shape[-2], shape[-1]
