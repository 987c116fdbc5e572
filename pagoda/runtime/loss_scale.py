"""Loss scaling: fp16 gradients of a loss times a power of two, so that small ones do not become zero."""

from typing import Any

from pagoda.config.training import LossScale, check_power_of_two
from pagoda.errors import CheckpointError, ConfigError


class LossScaler:
    """The scale as it is now. `scale` is 1 for good where nothing is scaled."""

    def __init__(self, setting: LossScale | float | None) -> None:
        """`setting` is how the scale moves, or a number that it always is; None scales nothing.

        Raises ConfigError for a number that is no power of two.
        """
        self._dynamic = setting if isinstance(setting, LossScale) else None
        if isinstance(setting, LossScale):
            self.scale = setting.initial
        else:
            self.scale = 1.0 if setting is None else float(setting)
            check_power_of_two("loss_scale", self.scale)
        self._calm_steps = 0
        """Steps since the scale last changed, or a step was skipped."""
        self.active = setting is not None
        self.used = False
        """True once a loss of this step has been scaled."""

    @property
    def dynamic(self) -> bool:
        """Whether the scale moves."""
        return self._dynamic is not None

    @property
    def skips(self) -> bool:
        """Whether a step whose gradients are not finite is skipped: as long as a lower scale may help."""
        return self._dynamic is not None and self.scale > 1

    def end_step(self, skipped: bool) -> None:
        """A step has been taken, or skipped because its gradients were not finite."""
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
        """What a resumed run goes on with; empty where the scale never changes."""
        return {} if self._dynamic is None else {"scale": self.scale, "calm_steps": self._calm_steps}

    def check_state(self, state: Any) -> None:
        """Raises CheckpointError for what `state_dict` cannot have given."""
        try:
            if state:
                check_power_of_two("loss_scale", state["scale"])
                int(state["calm_steps"])
        except (ConfigError, LookupError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(f"the loss scale {state!r} cannot be used") from error

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; a scale that does not move stays as it was set."""
        if state and self._dynamic is not None:
            self.scale, self._calm_steps = float(state["scale"]), int(state["calm_steps"])
