"""AdamW on the split master: its settings, its states, and the scalars of one step.

Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (ICLR 2019).

**Definition.** Every kernel of this rule (CPU, GPU, reference) computes, per element, in fp32, in this order,
rounding once after each operation (to nearest, ties to even), with no fused multiply-add, with division and
square root correctly rounded, and without flushing denormals::

    g     = float(gradient) * grad_scale
    w     = w * decay                           decay = 1 - lr * weight_decay
    m     = m * beta1 + g * one_minus_beta1
    v     = v * beta2 + (g * g) * one_minus_beta2
    denom = sqrt(v) / bias2_sqrt + eps
    w     = w - step_size * (m / denom)

The new state is then a function of the old state, the gradient and the scalars (`AdamW.scalars`) alone: the same bits
for any block size, thread count, tier or device.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

import torch

from pagoda.config.run import Moments
from pagoda.optim.adam import Adam
from pagoda.optim.moments import MOMENT_FORMATS, MOMENT_NAMES
from pagoda.optim.rule import Key, StateSpec


@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """Settings of AdamW, with the names and defaults of ``torch.optim.AdamW``.

    lr: learning rate, >= 0.
    betas: decay rates of the first and second moment, each in [0, 1).
    eps: added to the denominator, > 0.
    weight_decay: decoupled weight decay coefficient, >= 0.

    In addition to those of torch:
    moments: format of the moments between updates: "fp32", or "bf16" or "8bit", which are rounded stochastically.
    seed: seed of the stochastic rounding.

    Raises ConfigError, naming the field, for a value outside its range.
    """

    name: ClassVar[str] = "AdamW"
    only: ClassVar[Mapping[str, Any]] = {**Adam.only, "decoupled_weight_decay": True}
    fixed: ClassVar[tuple[str, ...]] = ("moments", "seed")
    weight_decay: float = 0.01
    moments: Moments = "fp32"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        known = get_args(Moments)
        self._require("moments", self.moments in known, f"one of {', '.join(known)}")
        self._require("seed", type(self.seed) is int, "a whole number")

    def own_states(self) -> tuple[StateSpec, ...]:
        """Both moments, as `MOMENT_FORMATS` has them."""
        return MOMENT_FORMATS[self.moments].states

    def states_of(self, key: str) -> tuple[StateSpec, ...]:
        """For one of `MOMENT_NAMES`: values or codes, then floors."""
        return self.own_states()[MOMENT_NAMES.index(key) :: len(MOMENT_NAMES)]

    def noise(self, parameter: str, step: int) -> Key | None:
        """A key, unless moments are fp32 and not rounded."""
        return None if self.moments == "fp32" else Key.of(self.seed, parameter, step)

    @property
    def element_work(self) -> float:
        return MOMENT_FORMATS[self.moments].element_work

    @property
    def kernel_name(self) -> str:
        return MOMENT_FORMATS[self.moments].kernel_name

    @property
    def _decay(self) -> float:
        return 1.0 - self.lr * self.weight_decay

    def torch_state(self, step: int, kept: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """The entry of torch's AdamW: moments in fp32, however they are stored."""
        from pagoda.optim.flat import decode_moment  # imports Numba

        moments = {}
        for name in MOMENT_NAMES:
            specs = self.states_of(name)
            if specs[0].name in kept:
                values = decode_moment(name, [kept[spec.name].reshape(-1) for spec in specs])
                moments[name] = values.view(kept[specs[0].name].shape)
        return {"step": torch.tensor(float(step)), **moments}

    def kept_states(self, state: Mapping[str, Any], parameter: str, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
        """Accepts moments of a run with another format. Moments from `torch_state` come back unchanged."""
        from pagoda.optim.flat import encode_moment

        kept: dict[str, torch.Tensor] = {}
        for name in MOMENT_NAMES:
            value = torch.zeros(shape) if state.get(name) is None else state[name]
            flat = value.detach().to("cpu", torch.float32).reshape(-1)
            specs = self.states_of(name)
            for spec, codes in zip(specs, encode_moment(name, flat, self.moments), strict=True):
                kept[spec.name] = codes.view(spec.shape(parameter, shape) or shape)
        return kept
