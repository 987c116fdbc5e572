"""Other destinations of metrics: TensorBoard, Weights & Biases, Trackio. Each is imported only if the user asks for
it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagoda.errors import ConfigError, needed
from pagoda.train.evaluate import Evaluation
from pagoda.train.metrics import StepMetrics

_MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio"}


class Loggers:
    """Sends the metrics of a run to every destination in `names`. Opens them at the first step, when the run creates
    its directory.

    Raises ConfigError if a name is unknown, or if its package is not installed.
    """

    def __init__(self, names: str | None, out: Path) -> None:
        """`out`: the run's directory."""
        self._out = out
        self._modules: dict[str, Any] = {}
        self._opened: dict[str, Any] | None = None
        for name in filter(None, map(str.strip, (names or "").split(","))):
            if name not in _MODULES:
                known = ", ".join(_MODULES)
                raise ConfigError(f"--log {name!r} is not known: give some of {known}, with commas between")
            refusal = f"--log {name} needs the package {name}: pip install {name}"
            self._modules[name] = needed(_MODULES[name], refusal)

    def step(self, metrics: StepMetrics) -> None:
        """Logs a step."""
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
        """Returns once everything is written."""
        for name, logger in (self._opened or {}).items():
            logger.close() if name == "tensorboard" else logger.finish()

    def _log(self, figures: Mapping[str, float], step: int) -> None:
        if self._opened is None:
            self._opened = {name: self._open(name, module) for name, module in self._modules.items()}
        for name, logger in self._opened.items():
            if name == "tensorboard":
                for figure, value in figures.items():
                    logger.add_scalar(figure, value, step)
            else:
                logger.log(dict(figures), step=step)

    def _open(self, name: str, module: Any) -> Any:
        """A destination for one run: TensorBoard's writer of event files in the run's directory, or a run of wandb or
        trackio."""
        if name == "tensorboard":
            return module.SummaryWriter(str(self._out / "tensorboard"))
        module.init(project="pagoda", name=self._out.name)
        return module
