"""Lion: the sign of an interpolated momentum.

Source: Chen et al., "Symbolic Discovery of Optimization Algorithms" (NeurIPS 2023), algorithm 2. The order of
operations is that of the PyPI package ``lion-pytorch``.

**Contract**: per element, in fp32, in this order, rounding once after each operation, with no fused multiply-add::

    g = float(gradient) * grad_scale
    w = w * decay                               decay = 1 - lr * weight_decay
    c = m * beta1 + g * one_minus_beta1
    w = w - lr * sign(c)                        sign(0) = sign(NaN) = 0
    m = m * beta2 + g * one_minus_beta2

The package's code in torch fuses the second product of c and of m with the sum. So the bits are its where these
products are exact, as with betas that are powers of two, and else c and m are within a rounding of its.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from pagoda.optim.rule import ElementwiseRule, StateSpec, check, fp32, is_number


class LionScalars(NamedTuple):
    """The scalars of the contract, in the order of the kernels' arguments; each is exactly an fp32 value."""

    grad_scale: float
    decay: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    lr: float


@dataclass(frozen=True, kw_only=True)
class Lion(ElementwiseRule):
    """Settings of Lion: 8 bytes a parameter in all.

    lr: learning rate, >= 0: every weight moves by it. The paper advises a third to a tenth of AdamW's.
    betas: rates of the momentum in the update's direction and in what is kept, each in [0, 1).
    weight_decay: decoupled weight decay coefficient, >= 0; three to ten times AdamW's keeps lr * weight_decay.

    Raises ConfigError, naming the field, for a value outside its range.
    """

    name: ClassVar[str] = "Lion"
    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        for field in ("lr", "weight_decay"):
            value = getattr(self, field)
            check(self.name, field, value, is_number(value) and value >= 0, "a finite number >= 0")
        check(self.name, "betas", self.betas, len(self.betas) == 2, "two numbers")
        for index, beta in enumerate(self.betas):
            check(self.name, f"betas[{index}]", beta, is_number(beta) and 0 <= beta < 1, "in [0, 1)")

    def own_states(self) -> tuple[StateSpec, ...]:
        """The momentum."""
        return (StateSpec("exp_avg", torch.float32),)

    def defaults(self) -> dict[str, Any]:
        """Per-group settings for ``torch.optim.Optimizer``."""
        return {"lr": self.lr, "betas": self.betas, "weight_decay": self.weight_decay}

    @property
    def kernel_name(self) -> str:
        return "lion"

    def scalars(self, step: int, grad_scale: float = 1.0) -> LionScalars:
        """As the contract says; every step is like the first."""
        beta1, beta2 = self.betas
        exact = LionScalars(
            grad_scale=grad_scale,
            decay=1.0 - self.lr * self.weight_decay,
            beta1=beta1,
            one_minus_beta1=1.0 - beta1,
            beta2=beta2,
            one_minus_beta2=1.0 - beta2,
            lr=self.lr,
        )
        return LionScalars(*map(fp32, exact))

    def torch_state(self, step: int, kept: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """As ``lion-pytorch`` has it: the momentum, and no count of steps."""
        return dict(kept)

    def steps_in(self, state: Mapping[str, Any]) -> int:
        """0 before the first update; how many there were does not matter."""
        return int(state.get("exp_avg") is not None)
