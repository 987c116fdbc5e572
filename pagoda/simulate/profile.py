"""How long a model's own compute takes on one machine, as the planner and the simulator need it."""

import math
from dataclasses import dataclass, fields

from pagoda.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ComputeProfile:
    """Seconds of forward and backward of one batch, with all weights in memory and nothing of Pagoda.

    A layer is one block of the decoder and counts as many times as the model has layers. Backward includes what
    gradient checkpointing recomputes. The head is all that is neither layer nor embedding: the last norm, the output
    projection and the loss.
    """

    layer_forward_s: float
    layer_backward_s: float
    head_forward_s: float
    head_backward_s: float
    embedding_forward_s: float
    embedding_backward_s: float

    def __post_init__(self) -> None:
        for field in fields(self):
            seconds = getattr(self, field.name)
            if not (math.isfinite(seconds) and seconds >= 0):
                raise ConfigError(f"{field.name} of a compute profile is {seconds}: seconds are zero or more")

    def forward_s(self, layers: int) -> float:
        """One forward pass of a model of `layers` layers."""
        return self.embedding_forward_s + layers * self.layer_forward_s + self.head_forward_s

    def backward_s(self, layers: int) -> float:
        """One backward pass of a model of `layers` layers."""
        return self.embedding_backward_s + layers * self.layer_backward_s + self.head_backward_s
