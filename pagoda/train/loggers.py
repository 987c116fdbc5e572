"""Other destinations of metrics: TensorBoard, Weights & Biases, Trackio. Each is imported only if the user asks for
it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pagoda.errors import ConfigError, needed
from pagoda.train.evaluate import Evaluation
from pagoda.train.metrics import StepMetrics

_MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio"}


class Loggers:
    """Sends the metrics of a run to every destination in `names`. Opens them at the first step, when the run creates
    its directory.

    A destination that fails later is left out from then on. Raises ConfigError if a name is unknown, if its package is
    not installed, or if it cannot be opened.
    """

    def __init__(self, names: str | None, out: Path, warn: Callable[[str], None]) -> None:
        """`out`: the run's directory. `warn` gets a sentence when a destination fails."""
        self._out, self._warn = out, warn
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
            **{f"tier_use/{tier}": use["mean"] for tier, use in metrics.tier_use.items()},
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
        self._each(lambda name, logger: logger.close() if name == "tensorboard" else logger.finish())

    def _log(self, figures: Mapping[str, float], step: int) -> None:
        if self._opened is None:
            self._opened = {name: self._open(name, module) for name, module in self._modules.items()}

        def log(name: str, logger: Any) -> None:
            if name != "tensorboard":
                logger.log(dict(figures), step=step)
                return
            for figure, value in figures.items():
                logger.add_scalar(figure, value, step)

        self._each(log)

    def _each(self, work: Callable[[str, Any], None]) -> None:
        """Do `work` with each destination. One that fails is left out from then on."""
        opened = self._opened or {}
        for name, logger in [*opened.items()]:
            try:
                work(name, logger)
            except Exception as error:  # of another package, which may raise anything
                del opened[name]
                self._warn(f"--log {name} fails: {type(error).__name__}: {error}. The run continues without it")

    def _open(self, name: str, module: Any) -> Any:
        """A destination for one run: TensorBoard's writer of event files in the run's directory, or a run of wandb or
        trackio."""
        try:
            if name == "tensorboard":
                return module.SummaryWriter(str(self._out / "tensorboard"))
            module.init(project="pagoda", name=self._out.name)
        except Exception as error:
            raise ConfigError(f"--log {name} cannot be opened: {type(error).__name__}: {error}") from error
        return module
