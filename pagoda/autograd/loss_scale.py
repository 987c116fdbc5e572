"""Loss scaling: multiplies an fp16 loss by a power of two, so that small gradients do not become zero."""

from typing import Any

from pagoda.config.training import LossScale, check_power_of_two
from pagoda.errors import CheckpointError, ConfigError, UsageError


class LossScaler:
    """The current scale. Without scaling, or with a fixed scale of 1, `scale` is always 1, and no loss needs it."""

    def __init__(self, setting: LossScale | float | None) -> None:
        """`setting` says how the scale changes, or is a fixed scale. None means no scaling.

        Raises ConfigError for a number that is not a power of two.
        """
        self._dynamic = setting if isinstance(setting, LossScale) else None
        if isinstance(setting, LossScale):
            self.scale = setting.init_scale
        else:
            self.scale = 1.0 if setting is None else float(setting)
            check_power_of_two("loss_scale", self.scale)
        self._calm_steps = 0
        """Steps since the scale last changed or a step was skipped."""
        self.active = setting is not None and setting != 1.0
        self.used = False
        """True once a loss of this step has been scaled."""
        self.skips_always = False
        """Whether every step whose gradients are not finite is skipped, as a setting says."""

    @property
    def skips(self) -> bool:
        """Whether a step is skipped if its gradients are not finite. True as long as a lower scale may help."""
        return self.skips_always or (self._dynamic is not None and self.scale > 1)

    def end_step(self, skipped: bool) -> None:
        """A step was taken, or skipped because its gradients were not finite."""
        self.used = False
        if self._dynamic is None:
            return
        self._calm_steps = 0 if skipped else self._calm_steps + 1
        if skipped:
            self.scale = max(1.0, self.scale * self._dynamic.backoff_factor)
        elif self._calm_steps == self._dynamic.growth_interval:
            self.scale *= self._dynamic.growth_factor
            self._calm_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """The state from which a resumed run continues. Empty if the scale never changes."""
        return {} if self._dynamic is None else {"scale": self.scale, "calm_steps": self._calm_steps}

    def check_state(self, state: Any) -> None:
        """Raises CheckpointError for a state that `state_dict` cannot have returned."""
        try:
            if state:
                check_power_of_two("loss_scale", state["scale"])
                int(state["calm_steps"])
        except (ConfigError, LookupError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(f"the loss scale {state!r} cannot be used") from error

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state. A fixed scale keeps its value."""
        if state and self._dynamic is not None:
            self.scale, self._calm_steps = float(state["scale"]), int(state["calm_steps"])


def not_scaled(what: str) -> UsageError:
    """The error for a gradient of a loss that was not scaled."""
    return UsageError(
        f"{what} received the gradient of a loss that was not scaled: with precision='fp16', call "
        "optimizer.scale(loss).backward()."
    )
