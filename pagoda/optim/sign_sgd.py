"""SignSGD: each weight moves by the learning rate, against the sign of its gradient.

Source: Bernstein et al., "signSGD: Compressed Optimisation for Non-Convex Problems" (ICML 2018), algorithm 1.

**Definition**: per element, in fp32, in this order, rounding once after each operation, with no fused multiply-add::

    g = float(gradient) * grad_scale
    w = w * decay                               decay = 1 - lr * weight_decay
    w = w - lr * sign(g)                        sign(0) = sign(NaN) = 0
"""

from dataclasses import dataclass
from typing import ClassVar

from pagoda.optim.rule import ElementwiseRule, StateSpec, fp32


@dataclass(frozen=True, kw_only=True)
class SignSGD(ElementwiseRule):
    """Settings of SignSGD. It has no state, so weights take 4 bytes a parameter. Clipping does not change its steps.

    lr: learning rate, >= 0. Each step changes every weight by lr.
    weight_decay: decoupled weight decay coefficient, >= 0.

    With momentum it is Signum, which `Lion` computes if both of its betas are equal, with 8 bytes a parameter.

    Raises ConfigError, naming the field, for a value outside its range.
    """

    name: ClassVar[str] = "SignSGD"
    counts_steps: ClassVar[bool] = False
    kernel_name: ClassVar[str] = "sign_sgd"
    element_work: ClassVar[float] = 0.4
    """That of SGD, which moves the same bytes."""
    lr: float = 1e-4
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        self._require_not_negative("lr", "weight_decay")

    def own_states(self) -> tuple[StateSpec, ...]:
        """None."""
        return ()

    def scalars(self, step: int, grad_scale: float = 1.0) -> tuple[float, ...]:
        """grad_scale, decay and lr: the same in every step."""
        return tuple(map(fp32, (grad_scale, 1.0 - self.lr * self.weight_decay, self.lr)))
