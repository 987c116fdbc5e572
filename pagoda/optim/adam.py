"""Adam with coupled weight decay, as ``torch.optim.Adam`` has it.

Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization" (ICLR 2015).

**Definition**, like that of `adamw` except that the decay is added to the gradient::

    g     = float(gradient) * grad_scale
    g     = g + w * decay                       decay = weight_decay
    m     = m * beta1 + g * one_minus_beta1
    v     = v * beta2 + (g * g) * one_minus_beta2
    denom = sqrt(v) / bias2_sqrt + eps
    w     = w - step_size * (m / denom)
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from pagoda.optim.rule import ElementwiseRule, StateSpec, fp32, is_number


@dataclass(frozen=True, kw_only=True)
class Adam(ElementwiseRule):
    """Settings of Adam, with the names and defaults of ``torch.optim.Adam``.

    lr: learning rate, >= 0.
    betas: decay rates of the first and second moment, each in [0, 1).
    eps: added to the denominator, > 0.
    weight_decay: coefficient of the weight that is added to the gradient (L2 penalty), >= 0.

    Raises ConfigError, naming the field, for a value outside its range.
    """

    name: ClassVar[str] = "Adam"
    only: ClassVar[Mapping[str, Any]] = {"amsgrad": False, "maximize": False, "decoupled_weight_decay": False}
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        self._require_not_negative("lr", "weight_decay")
        self._require_betas(self.betas)
        # If eps is zero, or rounds to zero in fp32, the update of a parameter with zero gradient is 0 / 0.
        fits = is_number(self.eps) and fp32(self.eps) > 0
        self._require("eps", fits, "a finite number > 0 in fp32")

    def own_states(self) -> tuple[StateSpec, ...]:
        """The two moments."""
        return StateSpec("exp_avg", torch.float32), StateSpec("exp_avg_sq", torch.float32)

    @property
    def kernel_name(self) -> str:
        return "adam"

    @property
    def _decay(self) -> float:
        """The scalar ``decay`` of the definition."""
        return self.weight_decay

    def scalars(self, step: int, grad_scale: float = 1.0) -> tuple[float, ...]:
        """grad_scale, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, bias2_sqrt, eps and step_size.

        With t the step, ``step_size = lr / (1 - beta1**t)`` and ``bias2_sqrt = sqrt(1 - beta2**t)`` hold the bias
        corrections.
        """
        beta1, beta2 = self.betas
        moments = beta1, 1.0 - beta1, beta2, 1.0 - beta2
        corrected = math.sqrt(1.0 - beta2**step), self.eps, self.lr / (1.0 - beta1**step)
        return tuple(map(fp32, (grad_scale, self._decay, *moments, *corrected)))
