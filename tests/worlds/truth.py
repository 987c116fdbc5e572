"""What the algorithm says of every layer, whatever the package believes.

All elements of a parameter are equal, and so are those of its gradient. So a number stands for each: the truth computes
with numbers, in fp32 and in the order that SGD's definition states. A wrong version, a lost gradient, or one that is
applied twice, in another order or with another factor, gives another number.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from pagoda.config.training import LossScale
from pagoda.optim.rule import StateSpec, TensorRule

from .model import first_value

LR, MOMENTUM = 0.125, 0.5


@dataclass(frozen=True)
class WholeSGD(TensorRule):
    """SGD with momentum as a rule that takes whole parameters."""

    name: ClassVar[str] = "WholeSGD"
    only: ClassVar[Mapping[str, Any]] = {}
    lr: float = LR

    def own_states(self) -> tuple[StateSpec, ...]:
        return (StateSpec("momentum_buffer", torch.float32),)

    def update(
        self, step: int, weight: torch.Tensor, gradient: torch.Tensor, states: Mapping[str, torch.Tensor]
    ) -> None:
        momentum = states["momentum_buffer"]
        momentum.mul_(MOMENTUM if step > 1 else 0.0).add_(gradient)
        weight.sub_(momentum * self.lr)


class Value(NamedTuple):
    """The states of a parameter."""

    weight: np.float32
    """The master weight."""
    momentum: np.float32
    steps: int
    """Its updates."""
    read: np.float32
    """What compute reads, before it is rounded: the master weight, or a prediction of it."""

    def updated(self, gradient: float, scale: float, lr: float, ahead: float) -> "Value":
        """After one more update. `ahead`: the number of steps by which weights are predicted."""
        taken = np.float32(gradient) * np.float32(scale)
        carried = np.float32(MOMENTUM if self.steps else 0.0)
        momentum = self.momentum * carried + taken
        weight = self.weight - np.float32(lr) * momentum
        return Value(weight, momentum, self.steps + 1, weight - (self.weight - weight) * np.float32(ahead))


def stored_weight(weight: np.float32, precision: str) -> float:
    """What is stored of a weight for compute. An fp16 master keeps its bits, as all here are zero or at least 2 ** -16
    in magnitude."""
    if precision != "bf16":
        return float(np.float16(weight) if precision == "fp16" else weight)
    bits = (int(np.asarray(weight, np.float32).view(np.int32)) + 0x8000) >> 16 << 16
    return float(np.array(bits & 0xFFFFFFFF, np.uint32).view(np.float32))


@dataclass
class Truth:
    """One layer."""

    values: list[tuple[Value, ...]]
    """By version, the states of each parameter."""
    shown: int = 0
    """The version that accesses must read."""
    before: int = 0
    """The newest version that the last step has asked for."""
    gradients: dict[int, float] = field(default_factory=dict)
    """Slot -> the sum of the gradients of this step that autograd has delivered."""
    ahead: float = 0.0
    """The number of steps by which weights are predicted."""

    @staticmethod
    def first(layer: int, parameters: int, ahead: float) -> "Truth":
        weights = [np.float32(first_value(layer, slot)) for slot in range(parameters)]
        return Truth([tuple(Value(weight, np.float32(0), 0, weight) for weight in weights)], ahead=ahead)

    @property
    def asked(self) -> int:
        """The newest version that `step()` has asked for."""
        return len(self.values) - 1

    @property
    def newest(self) -> tuple[Value, ...]:
        return self.values[-1]

    def apply(self, scale: float, lr: float) -> None:
        """`step()` asks for an update with this step's gradients."""
        if self.gradients:
            values = list(self.newest)
            for slot, gradient in self.gradients.items():
                values[slot] = values[slot].updated(gradient, scale, lr, self.ahead)
            self.values.append(tuple(values))
            self.gradients = {}

    def overwrite(self, slot: int, weight: float, precision: str) -> None:
        """The program writes a parameter's weights. If they have these values already, the master stays. Nothing is
        predicted until the next update."""
        for version in {self.shown, self.asked}:
            values = list(self.values[version])
            before = values[slot].weight
            master = before if stored_weight(before, precision) == weight else np.float32(weight)
            values[slot] = values[slot]._replace(weight=master, read=master)
            self.values[version] = tuple(values)

    def rewound(self) -> "Truth":
        """A copy without the gradients of this step, as a checkpoint has it."""
        return replace(self, values=[*self.values], gradients={})


@dataclass
class Scaling:
    """The factor of the loss, as its setting says. Gradients are told without it."""

    setting: LossScale | float
    scale: float = 1.0
    calm: int = 0
    """Steps since the last one that was skipped, or since the scale has changed."""

    def __post_init__(self) -> None:
        self.scale = self.setting.init_scale if isinstance(self.setting, LossScale) else self.setting

    @property
    def skips(self) -> bool:
        """Whether a step with gradients that are not finite is skipped. Otherwise it is refused."""
        return isinstance(self.setting, LossScale) and self.scale > 1

    def end_step(self, skipped: bool) -> None:
        if not isinstance(self.setting, LossScale):
            return
        self.calm = 0 if skipped else self.calm + 1
        if skipped:
            self.scale = max(1.0, self.scale * self.setting.backoff_factor)
        elif self.calm == self.setting.growth_interval:
            self.scale, self.calm = self.scale * self.setting.growth_factor, 0


def norm_of(truths: Sequence[Truth], sizes: Sequence[Sequence[int]]) -> float:
    """The norm of all gradients of this step."""
    squares = [
        sizes[layer][slot] * gradient**2
        for layer, truth in enumerate(truths)
        for slot, gradient in truth.gradients.items()
    ]
    return math.sqrt(math.fsum(squares))
