"""The built-in training loop on top of `pagoda.wrap`: configuration, text, metrics, progress, resuming."""

from pagoda.train.config import OptimConfig, TrainConfig

__all__ = ["OptimConfig", "TrainConfig", "TrainResult", "run"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pagoda.train.loop import run
    from pagoda.train.steps import TrainResult


def __getattr__(name: str) -> object:
    """Imports the loop, and with it torch, at first use: reading a configuration needs neither."""
    if name in ("TrainResult", "run"):
        from pagoda.train import loop, steps

        return loop.run if name == "run" else steps.TrainResult
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
