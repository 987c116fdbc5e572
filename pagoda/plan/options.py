"""Options of a plan: what the user fixes, and what the planner chooses."""

from dataclasses import dataclass

import torch

from pagoda.config.memory import Memory, Split
from pagoda.config.training import ActivationMode, Training
from pagoda.optim.rule import DTYPES

DEFAULT_SPLIT = Split(device_home_share=None)
"""The planner's first choice."""


@dataclass(frozen=True)
class Options:
    """The settings that a planner reads. None lets the planner choose."""

    page_bytes: int | None = None
    unit_limit: int | None = None
    gradient_accumulation_steps: int | None = None
    """Micro-batches per step, if announced."""
    clipping: bool = False
    split: Split | None = None
    """What the device updates and is home to."""
    keep_checkpoints: int | None = None
    """Number of checkpoints whose pages on SSD are kept at once. None: one if there is room."""
    asynchronous: bool = False
    """Whether weights lack the last step's update. If not, every update ends before the next forward of its unit."""
    speculate: bool = True
    """Whether units are updated during backward as if nothing will be clipped, if there is room for old and new states:
    units with moments on SSD, and with a separate device all others."""
    activations: ActivationMode = "keep"
    """What is done with activations."""
    partition_activations: bool = False
    """Whether each tensor-parallel rank keeps a part of the inputs of recomputed blocks."""
    activation_bytes: int | None = None
    """Most bytes of activations, in addition to the pages, if policies are to be chosen. None for no limit."""
    gradients: torch.dtype | None = None
    """The dtype in which gradients are accumulated. None: the weights' dtype."""
    may_skip: bool = False
    """Whether a step with a gradient that is not finite is skipped, as with dynamic loss scaling."""
    activations_limited: bool = False
    """Whether the user set `activation_bytes`, so that exceeding it is an error."""
    embedding_limit: int | None = None
    """Most bytes of weights of an embedding that is looked up where compute runs. Larger ones are looked up on the CPU.
    """

    @staticmethod
    def of(training: Training, memory: Memory) -> "Options":
        """The options of a run with these settings."""
        return Options(
            page_bytes=memory.page_bytes,
            unit_limit=memory.unit_bytes,
            embedding_limit=memory.embedding_bytes,
            gradient_accumulation_steps=training.gradient_accumulation_steps,
            clipping=training.clipping_norm is not None,
            split=memory.split,
            keep_checkpoints=memory.ssd_checkpoints,
            asynchronous=training.asynchronous,
            speculate=training.speculate,
            activations=training.activations or "recompute",
            partition_activations=training.partition_activations,
            gradients=None if training.gradients is None else DTYPES[training.gradients],
            may_skip=training.may_skip,
        )

    @property
    def update_during_backward(self) -> bool:
        """True if a gradient and its scale are final as soon as it has arrived."""
        return self._announced and not self._decided_last

    @property
    def may_offload(self) -> bool:
        """True if activations may leave the memory of compute."""
        return self.activations not in ("keep", "recompute")

    @property
    def may_speculate(self) -> bool:
        """True if a gradient is final as soon as it has arrived, but its scale is not."""
        return self._announced and self._decided_last and self.speculate

    @property
    def _announced(self) -> bool:
        return self.gradient_accumulation_steps is not None and not self.asynchronous

    @property
    def _decided_last(self) -> bool:
        """Whether only the end of backward shows the scale of gradients, or that they are dropped."""
        return self.clipping or self.may_skip
