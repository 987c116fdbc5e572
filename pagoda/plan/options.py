"""What the user fixes of a plan, and what the planner is left to choose."""

from dataclasses import dataclass

import torch

from pagoda.config.memory import Memory, Split
from pagoda.config.training import ActivationMode, Training
from pagoda.optim.rule import kept_dtype

DEFAULT_SPLIT = Split()


@dataclass(frozen=True)
class Options:
    """What the settings say to the planner; None leaves the choice to it."""

    page_bytes: int | None = None
    unit_limit: int | None = None
    accumulation_steps: int | None = None
    """Micro-batches per step, if announced."""
    clipping: bool = False
    split: Split | None = None
    """How host RAM is divided where not everything fits it."""
    keep_checkpoints: int | None = None
    """Checkpoints whose pages on SSD are kept at once; None: one where there is room."""
    max_staleness: int | None = None
    """Bound of asynchronous updates, in steps; None: every update ends before the next forward of its unit."""
    speculate: bool | None = None
    """Update during backward as if nothing would be clipped. False: never. None: units with states on SSD, if there is
    room to undo it. True: units with all states in RAM too, even if moments then leave RAM."""
    activations: ActivationMode = "keep"
    """What becomes of activations."""
    partition_activations: bool = False
    """Whether tensor-parallel ranks keep a part each of what blocks that are recomputed are given."""
    activation_bytes: int | None = None
    """Most bytes of activations beside the pages, where that is to be chosen; None for no limit."""
    gradients: torch.dtype | None = None
    """What gradients are accumulated in; None: what weights have."""
    may_skip: bool = False
    """Whether a step is skipped where a gradient is not finite, as with dynamic loss scaling."""
    activations_limited: bool = False
    """Whether the user set `activation_bytes`, so that more is refused."""

    @staticmethod
    def of(training: Training, memory: Memory) -> "Options":
        """The options of a run with these settings."""
        return Options(
            page_bytes=memory.page_bytes,
            unit_limit=memory.unit_bytes,
            accumulation_steps=training.accumulation_steps,
            clipping=training.clip_grad_norm is not None,
            split=memory.split,
            keep_checkpoints=memory.ssd_checkpoints,
            max_staleness=training.staleness,
            speculate=training.speculate,
            activations=training.activations,
            partition_activations=training.partition_activations,
            gradients=kept_dtype(training.gradients),
            may_skip=training.may_skip,
        )

    @property
    def update_during_backward(self) -> bool:
        """True when a gradient is known to be final, and its scale too, as soon as it has arrived."""
        return self._announced and not self._decided_last

    @property
    def may_offload(self) -> bool:
        """True when activations may leave the memory that compute uses."""
        return self.activations not in ("keep", "recompute")

    @property
    def may_speculate(self) -> bool:
        """True when a gradient is known to be final as soon as it has arrived, but not its scale."""
        return self._announced and self._decided_last and self.speculate is not False

    @property
    def _announced(self) -> bool:
        return self.accumulation_steps is not None and self.max_staleness is None

    @property
    def _decided_last(self) -> bool:
        """Whether only the end of backward shows what the gradients are multiplied by, or that they do not count."""
        return self.clipping or self.may_skip
