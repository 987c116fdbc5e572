"""`pagoda train`: configuration, data, metrics and resuming around transformers' trainer."""

from pagoda.train.config import OptimConfig, TrainConfig

__all__ = ["OptimConfig", "TrainConfig", "TrainResult", "run"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pagoda.train.assembly import run
    from pagoda.train.callbacks import TrainResult


def __getattr__(name: str) -> object:
    """Imports the loop, and with it torch, at first use: reading a configuration needs neither."""
    if name in ("TrainResult", "run"):
        from pagoda.train import assembly, callbacks

        return assembly.run if name == "run" else callbacks.TrainResult
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
