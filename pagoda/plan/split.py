"""How host RAM is divided where not everything fits it."""

from dataclasses import dataclass

from pagoda.errors import ConfigError


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
        for name, share in (
            ("weight_share", self.weight_share),
            ("grad_share", self.grad_share),
            ("device_update_share", self.device_update_share),
            ("device_home_share", self.device_home_share),
        ):
            if not 0 <= share <= 1:
                raise ConfigError(f"split.{name} is {share}; it must be from 0 to 1.")
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


USUAL_SPLIT = Split()
