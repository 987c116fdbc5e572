"""Lion: the sign of an interpolated momentum.

Source: Chen et al., "Symbolic Discovery of Optimization Algorithms" (NeurIPS 2023), algorithm 2. The order of
operations is that of the PyPI package ``lion-pytorch``.

**Definition**: per element, in fp32, in this order, rounding once after each operation, where ``fma(a, b, c)`` is one
operation, a * b + c::

    g = float(gradient) * grad_scale
    w = w * decay                               decay = 1 - lr * weight_decay
    c = fma(g, one_minus_beta1, m * beta1)
    w = w - lr * sign(c)                        sign(0) = sign(NaN) = 0
    m = fma(g, one_minus_beta2, m * beta2)

These are the operations of the package on CPUs with AVX2 or AVX-512.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from pagoda.optim.rule import ElementwiseRule, StateSpec, fp32


@dataclass(frozen=True, kw_only=True)
class Lion(ElementwiseRule):
    """Settings of Lion. Weight and momentum take 8 bytes a parameter.

    lr: learning rate, >= 0. Each step changes every weight by lr. The paper advises a third to a tenth of AdamW's.
    betas: decay rates of the momentum, in the direction of the update and in the stored momentum, each in [0, 1).
    weight_decay: decoupled weight decay coefficient, >= 0. Three to ten times AdamW's keeps lr * weight_decay.

    Raises ConfigError, naming the field, for a value outside its range.
    """

    name: ClassVar[str] = "Lion"
    counts_steps: ClassVar[bool] = False
    kernel_name: ClassVar[str] = "lion"
    element_work: ClassVar[float] = 0.7
    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        self._require_not_negative("lr", "weight_decay")
        self._require_betas(self.betas)

    def own_states(self) -> tuple[StateSpec, ...]:
        """The momentum."""
        return (StateSpec("exp_avg", torch.float32),)

    def scalars(self, step: int, grad_scale: float = 1.0) -> tuple[float, ...]:
        """grad_scale, decay, beta1, one_minus_beta1, beta2, one_minus_beta2 and lr: the same in every step."""
        beta1, beta2 = self.betas
        decay = 1.0 - self.lr * self.weight_decay
        return tuple(map(fp32, (grad_scale, decay, beta1, 1.0 - beta1, beta2, 1.0 - beta2, self.lr)))
