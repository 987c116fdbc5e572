"""What the user fixes of a plan, and what the planner is left to choose."""

from dataclasses import dataclass

import torch

from pagoda.errors import ConfigError
from pagoda.plan.activations import ActivationMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How host RAM is divided where not everything fits it. The defaults are a good guess; `pagoda train --plan search`
    tries others.

    Raises ConfigError for a share or a number that cannot be.
    """

    weight_share: float = 1.0
    """Most of the weights, in pages, that RAM is home to."""
    grad_share: float = 1.0
    """Most of the gradients."""
    leases_ahead: int = 2
    """Leases, each as wide as the widest unit, beside what is in use at once; fewer where the budget is tight."""
    device_update_share: float = 0.0
    """Most of the parameters whose update runs on a device of its own: their states pass it, block by block, while the
    CPU updates the others. Only units with all their states in RAM are updated there."""
    device_home_share: float = 0.0
    """Most of the memory of a device of its own that is home to units, beside what leases and a ring need: all of their
    states and their gradients lie there and are updated there."""
    undo_first: bool = False
    """Where updates are speculative, copies of the weights come before moments, not after: two bytes a parameter in
    RAM, with bf16 weights, let the update of moments on SSD run under backward too."""

    undo_in_ram: bool = False
    """Where updates are speculative, so are those of units with all their states in RAM, if copies of these fit what is
    left of it. A copy takes about as long as the update itself, so this is for a CPU that has time under backward."""

    def __post_init__(self) -> None:
        for name in ("weight_share", "grad_share", "device_update_share", "device_home_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"split.{name} is {getattr(self, name)}; it must be from 0 to 1.")
        if self.leases_ahead < 1:
            raise ConfigError(f"split.leases_ahead is {self.leases_ahead}; it must be at least 1.")

    def __str__(self) -> str:
        return (
            f"RAM is home to at most {self.weight_share:.0%} of weights and {self.grad_share:.0%} of gradients; "
            f"at most {self.leases_ahead} leases are fetched ahead"
            f"{f'; {self.device_update_share:.0%} of updates run on the device' if self.device_update_share else ''}"
            f"{f'; {self.device_home_share:.0%} of the device is home to units' if self.device_home_share else ''}"
            f"{'; copies for undoing updates come before moments' * self.undo_first}"
            f"{'; updates of states in RAM are speculative too' * self.undo_in_ram} (as set)."
        )


DEFAULT_SPLIT = Split()


@dataclass(frozen=True)
class Options:
    """What the user fixed; None leaves the choice to the planner."""

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
    """Update under backward as if nothing would be clipped: False never, None where there is room to undo it, True even
    at the cost of moments in RAM, and where all states are there."""
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

    @property
    def update_under_backward(self) -> bool:
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
