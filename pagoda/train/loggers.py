"""Other destinations of metrics: TensorBoard, Weights & Biases, Trackio. Each is imported only if the user asks for
it."""

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from pagoda.errors import ConfigError, needed
from pagoda.train.config import TrainConfig
from pagoda.train.evaluate import Evaluation
from pagoda.train.metrics import StepMetrics

_TENSORBOARD = "tensorboard"


class Loggers:
    """Sends the metrics of a run to the destinations that `config.log` names, and the settings of the run.

    A destination that fails later is left out from then on.
    """

    def __init__(self, config: TrainConfig, done: int, warn: Callable[[str], None]) -> None:
        """Log in to services, so that a wrong key ends the run before its first step. TensorBoard's files are created
        with the first figures, because they are in the run's directory.

        `done`: number of steps before the run was resumed. `warn` gets a sentence when a destination fails.

        Raises ConfigError if a package is not installed, or if a destination cannot be opened.
        """
        self._config, self._done, self._warn = config, done, warn
        self._opened: dict[str, Any] = {}
        self._modules = {}
        for name in config.logs:
            module = "torch.utils.tensorboard" if name == _TENSORBOARD else name
            self._modules[name] = needed(module, f"--log {name} needs the package {name}: pip install {name}")
        for name in self._modules.keys() - {_TENSORBOARD}:
            self._open(name)

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
        self._each(lambda name, logger: logger.close() if name == _TENSORBOARD else logger.finish())

    def _log(self, figures: Mapping[str, float], step: int) -> None:
        if _TENSORBOARD in self._modules and _TENSORBOARD not in self._opened:
            try:
                self._open(_TENSORBOARD)
            except ConfigError as error:
                del self._modules[_TENSORBOARD]
                self._warn(f"{error}. The run continues without it")

        def log(name: str, logger: Any) -> None:
            if name != _TENSORBOARD:
                logger.log(dict(figures), step=step)
                return
            for figure, value in figures.items():
                logger.add_scalar(figure, value, step)

        self._each(log)

    def _each(self, work: Callable[[str, Any], None]) -> None:
        """Do `work` with each destination. One that fails is left out from then on."""
        for name, logger in [*self._opened.items()]:
            try:
                work(name, logger)
            except Exception as error:  # of another package, which may raise anything
                del self._opened[name], self._modules[name]
                self._warn(f"--log {name} fails: {type(error).__name__}: {error}. The run continues without it")

    def _open(self, name: str) -> None:
        """Open a destination for one run: TensorBoard's writer of event files in the run's directory, or a run of wandb
        or trackio in the project that WANDB_PROJECT or TRACKIO_PROJECT names."""
        module, out, settings = self._modules[name], self._config.out, self._config.settings()
        assert out is not None, "it is chosen now"
        try:
            if name == _TENSORBOARD:
                # Steps after the checkpoint from which the run is resumed run again.
                module = module.SummaryWriter(str(out / _TENSORBOARD), purge_step=self._done + 1)
                module.add_text("settings", f"```json\n{json.dumps(settings, indent=2)}\n```", self._done)
            else:
                project = os.environ.get(f"{name.upper()}_PROJECT") or "pagoda"
                module.init(project=project, name=out.name, config=settings)
        except Exception as error:
            raise ConfigError(f"--log {name} cannot be opened: {type(error).__name__}: {error}") from error
        self._opened[name] = module
