"""Adam with coupled weight decay, as ``torch.optim.Adam`` has it.

Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization" (ICLR 2015).

**Contract**, as that of `adamw`, in all but where the decay goes::

    g     = float(gradient) * grad_scale
    g     = g + w * weight_decay
    m     = m * beta1 + g * one_minus_beta1
    v     = v * beta2 + (g * g) * one_minus_beta2
    denom = sqrt(v) / bias2_sqrt + eps
    w     = w - step_size * (m / denom)
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from pagoda.optim.adamw import AdamW, Scalars, check_adam_settings
from pagoda.optim.rule import ElementwiseRule, StateSpec, fp32


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
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_adam_settings(self.name, self.lr, self.betas, self.eps, self.weight_decay)

    def own_states(self) -> tuple[StateSpec, ...]:
        """Both moments."""
        return AdamW().own_states()

    def defaults(self) -> dict[str, Any]:
        """Per-group settings for ``torch.optim.Optimizer``."""
        return {"lr": self.lr, "betas": self.betas, "eps": self.eps, "weight_decay": self.weight_decay}

    @property
    def kernel_name(self) -> str:
        return "adam"

    def scalars(self, step: int, grad_scale: float = 1.0) -> Scalars:
        """Those of AdamW, whose ``decay`` is ``weight_decay`` here."""
        decoupled = AdamW(lr=self.lr, betas=self.betas, eps=self.eps).scalars(step, grad_scale)
        return decoupled._replace(decay=fp32(self.weight_decay))
