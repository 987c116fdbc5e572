"""Other places that figures go to: TensorBoard, Weights & Biases, Trackio. Each is imported only if it is asked for."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from pagoda.errors import ConfigError, needed
from pagoda.train.config import TrainConfig
from pagoda.train.evaluate import Evaluation
from pagoda.train.metrics import StepMetrics

KNOWN = ("jsonl", "tensorboard", "wandb", "trackio")
"""jsonl is what every run writes anyway: metrics.jsonl and evals.jsonl."""


class Logger(Protocol):
    """Takes figures by name."""

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Figures of a step."""

    def close(self) -> None:
        """Returns once all are written."""


class Loggers:
    """All places of a run, with the same figures under the same names.

    Raises ConfigError: a name is unknown, or its package is not installed.
    """

    def __init__(self, names: str | None, config: TrainConfig) -> None:
        asked = [name.strip() for name in (names or "").split(",") if name.strip()]
        for name in asked:
            if name not in KNOWN:
                raise ConfigError(f"--log {name!r} is not known: give some of {', '.join(KNOWN)}, with commas between")
        self._loggers: Sequence[Logger] = [_MAKERS[name](config) for name in asked if name != "jsonl"]

    def step(self, metrics: StepMetrics) -> None:
        """Logs a step."""
        if not self._loggers:
            return
        figures = {
            "train/loss": metrics.loss,
            "train/lr": metrics.lr,
            "train/tokens_per_s": metrics.tokens_per_s,
            "train/step_s": metrics.step_s,
            **{f"stall_share/{lane}": seconds / metrics.step_s for lane, seconds in metrics.stall_s.items()},
            **{f"peak_bytes/{tier}": float(nbytes) for tier, nbytes in metrics.peak_bytes.items()},
        }
        if metrics.grad_norm is not None:
            figures["train/grad_norm"] = metrics.grad_norm
        self._log(figures, metrics.step)

    def evaluation(self, found: Evaluation) -> None:
        """Logs an evaluation."""
        names = ("loss", "perplexity", "bits_per_byte")
        self._log({f"eval/{name}": getattr(found, name) for name in names}, found.step)

    def close(self) -> None:
        """Returns once all are written."""
        for logger in self._loggers:
            logger.close()

    def _log(self, figures: Mapping[str, float], step: int) -> None:
        for logger in self._loggers:
            logger.log(figures, step)


class _TensorBoard:
    """Event files in the run's directory, in `tensorboard/`."""

    def __init__(self, config: TrainConfig) -> None:
        self._make = _imported("tensorboard", "torch.utils.tensorboard").SummaryWriter
        self._folder = config.out / "tensorboard"
        self._writer: Any = None

    def log(self, figures: Mapping[str, float], step: int) -> None:
        if self._writer is None:  # a run makes its directory after its first step
            self._writer = self._make(str(self._folder))
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class _Tracker:
    """A package with `init`, `log` and `finish`, as wandb has them, and trackio after it."""

    def __init__(self, name: str, config: TrainConfig) -> None:
        self._module, self._config = _imported(name, name), config
        self._started = False

    def log(self, figures: Mapping[str, float], step: int) -> None:
        if not self._started:
            self._module.init(project="pagoda", name=Path(self._config.out).name)
            self._started = True
        self._module.log(dict(figures), step=step)

    def close(self) -> None:
        if self._started:
            self._module.finish()


_MAKERS: Mapping[str, Callable[[TrainConfig], Logger]] = {
    "tensorboard": _TensorBoard,
    "wandb": partial(_Tracker, "wandb"),
    "trackio": partial(_Tracker, "trackio"),
}


def _imported(package: str, module: str) -> Any:
    """A module of a package. Raises ConfigError where that is not installed."""
    return needed(module, f"--log {package} needs the package {package}: pip install {package}")
