"""Lion: the sign of an interpolated momentum.

Source: Chen et al., "Symbolic Discovery of Optimization Algorithms" (NeurIPS 2023), algorithm 2. The order of
operations is that of the PyPI package ``lion-pytorch``.

**Contract**: per element, in fp32, in this order, rounding once after each operation, with no fused multiply-add::

    g = float(gradient) * grad_scale
    w = w * decay                               decay = 1 - lr * weight_decay
    c = m * beta1 + g * one_minus_beta1
    w = w - lr * sign(c)                        sign(0) = sign(NaN) = 0
    m = m * beta2 + g * one_minus_beta2

The package's code in torch fuses the second product of c and of m with the sum. If these products are exact, as with
betas that are powers of two, the bits are the package's. Otherwise c and m differ from the package's by one rounding at
most.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from pagoda.optim.rule import ElementwiseRule, StateSpec, check_betas, check_not_negative, fp32


@dataclass(frozen=True, kw_only=True)
class Lion(ElementwiseRule):
    """Settings of Lion: 8 bytes a parameter in all.

    lr: learning rate, >= 0: every weight moves by it. The paper advises a third to a tenth of AdamW's.
    betas: rates of the momentum in the update's direction and in what is kept, each in [0, 1).
    weight_decay: decoupled weight decay coefficient, >= 0; three to ten times AdamW's keeps lr * weight_decay.

    Raises ConfigError, naming the field, for a value outside its range.
    """

    name: ClassVar[str] = "Lion"
    counts_steps: ClassVar[bool] = False
    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_not_negative(self, "lr", "weight_decay")
        check_betas(self, self.betas)

    def own_states(self) -> tuple[StateSpec, ...]:
        """The momentum."""
        return (StateSpec("exp_avg", torch.float32, of_gradients=True),)

    @property
    def kernel_name(self) -> str:
        return "lion"

    def scalars(self, step: int, grad_scale: float = 1.0) -> tuple[float, ...]:
        """grad_scale, decay, beta1, one_minus_beta1, beta2, one_minus_beta2 and lr; every step is like the first."""
        beta1, beta2 = self.betas
        decay = 1.0 - self.lr * self.weight_decay
        return tuple(map(fp32, (grad_scale, decay, beta1, 1.0 - beta1, beta2, 1.0 - beta2, self.lr)))
