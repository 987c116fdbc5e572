"""SGD with momentum, as ``torch.optim.SGD`` has it.

Source: Sutskever, Martens, Dahl and Hinton, "On the importance of initialization and momentum in deep learning" (ICML
2013), in torch's form, where the learning rate is not in the buffer.

**Definition**: per element, in fp32, in this order, rounding once after each operation, where ``fma(a, b, c)`` is one
operation, a * b + c::

    g = float(gradient) * grad_scale
    g = fma(w, weight_decay, g)                 unless weight_decay is 0
    m = fma(g, taken, m * carried)
    d = fma(m, momentum, g) where nesterov is 1, else m
    w = fma(d, minus_lr, w)

``carried`` is the momentum and ``taken`` is 1 - dampening. At a parameter's first update, torch sets the buffer to the
gradient, whatever the dampening. So ``taken`` is then 1 and ``carried`` is -0.0, which also keeps the sign of zeros.
Without momentum there is no buffer, and d is g.

These are the operations of torch's kernels on CPUs with AVX2 or AVX-512, with ``foreach`` or without. On older CPUs,
torch rounds each product. With ``fused=True`` and momentum, it fuses another product.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from pagoda.optim.rule import ElementwiseRule, StateSpec, fp32, is_number

BUFFER = "momentum_buffer"


@dataclass(frozen=True, kw_only=True)
class SGD(ElementwiseRule):
    """Settings of SGD, with the names and defaults of ``torch.optim.SGD``.

    lr: learning rate, >= 0.
    momentum: factor of the buffer in each step, >= 0. With 0 there is no buffer, and weights take 4 bytes a parameter.
    dampening: share of the gradient that is left out of the buffer.
    weight_decay: coefficient of the weight that is added to the gradient (L2 penalty), >= 0.
    nesterov: look ahead by one step of momentum; needs momentum, and no dampening.

    Param groups may differ in momentum, but it is 0 in all of them or in none.
    Raises ConfigError, naming the field, for a value outside its range.
    """

    name: ClassVar[str] = "SGD"
    only: ClassVar[Mapping[str, Any]] = {"maximize": False}
    counts_steps: ClassVar[bool] = False
    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        self._require_not_negative("lr", "momentum", "weight_decay")
        self._require("dampening", is_number(self.dampening), "a finite number")
        self._require_bools("nesterov")
        allowed = not self.nesterov or (self.momentum > 0 and self.dampening == 0)
        self._require("nesterov", allowed, "False without momentum, and with dampening")

    @property
    def element_work(self) -> float:
        return 0.7 if self.momentum else 0.4

    def own_states(self) -> tuple[StateSpec, ...]:
        """The momentum buffer, if there is momentum."""
        return (StateSpec(BUFFER, torch.float32),) if self.momentum else ()

    @property
    def kernel_name(self) -> str:
        return "sgd_momentum" if self.momentum else "sgd"

    def scalars(self, step: int, grad_scale: float = 1.0) -> tuple[float, ...]:
        """grad_scale, weight_decay, carried, taken, momentum, nesterov and minus_lr."""
        carried, taken = (-0.0, 1.0) if step == 1 else (self.momentum, 1.0 - self.dampening)
        exact = (grad_scale, self.weight_decay, carried, taken, self.momentum, float(self.nesterov), -self.lr)
        return tuple(map(fp32, exact))
