"""The trackers of `--report-to`: those of `accelerate.tracking`, which are imported only if the user asks for them."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from pagoda.errors import ConfigError
from pagoda.train.config import TrainConfig, flat
from pagoda.train.evaluate import Evaluation
from pagoda.train.metrics import StepMetrics

_IN_RUN = {"tensorboard": "torch.utils.tensorboard", "aim": "aim"}
"""Trackers whose files are in the run's directory -> the module that they import."""
_SERVICES = {
    "wandb": ("WANDB_PROJECT", "name"),
    "trackio": ("TRACKIO_PROJECT", "name"),
    "swanlab": ("SWANLAB_PROJECT", "experiment_name"),
    "mlflow": ("MLFLOW_EXPERIMENT_NAME", "run_name"),
    "comet_ml": ("COMET_PROJECT_NAME", ""),
}
"""The variable that names a project, and what the tracker calls the name of a run, if it takes one."""


class Trackers:
    """Sends the metrics of a run, and its settings, to the trackers that `config.report_to` names.

    A tracker that fails later is left out from then on.
    """

    def __init__(self, config: TrainConfig, done: int, warn: Callable[[str], None]) -> None:
        """Start all trackers but those that write into the run's directory, so that a wrong key ends the run before its
        first step. The others start with the first figures.

        `done`: number of steps before the run was resumed. `warn` gets a sentence when a tracker fails.

        Raises ConfigError if a tracker cannot be started.
        """
        self._config, self._done, self._warn = config, done, warn
        self._started: dict[str, Any] = {}
        self._waiting: list[str] = list(dict.fromkeys(config.report_to))
        try:
            for name in [*self._waiting]:
                with _starting(name):
                    import_module(_IN_RUN.get(name, name))
                if name not in _IN_RUN:
                    self._start(name)
        except ConfigError:
            self.close()
            raise

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
        self._each(lambda tracker: tracker.finish())

    def _log(self, figures: Mapping[str, float], step: int) -> None:
        for name in [*self._waiting]:
            try:
                self._start(name)
            except ConfigError as error:
                self._warn(f"{error}. The run continues without it")
        self._each(lambda tracker: tracker.log(dict(figures), step=step))

    def _each(self, work: Callable[[Any], None]) -> None:
        """Do `work` with each tracker. One that fails is left out from then on."""
        for name, tracker in [*self._started.items()]:
            try:
                work(tracker)
            except Exception as error:  # of another package, which may raise anything
                del self._started[name]
                self._warn(f"--report-to {name} fails: {type(error).__name__}: {error}. The run continues without it")

    def _start(self, name: str) -> None:
        """Start a tracker: in the run's directory, or as a run of its name in the project that a variable names."""
        self._waiting.remove(name)
        out, (variable, called) = self._config.output_dir, _SERVICES.get(name, ("", ""))
        assert out is not None, "it is chosen now"
        place = (name, out) if name in _IN_RUN else (os.environ.get(variable) or "pagoda",)
        given: dict[str, Any] = {called: out.name} if called else {}
        if name == "tensorboard":
            given["purge_step"] = self._done + 1  # steps after the checkpoint that the run is resumed from run again
        settings = {
            key: value if value is None or isinstance(value, int | float) else str(value)
            for key, value in flat(self._config.settings())
        }
        with _starting(name):
            from accelerate import PartialState
            from accelerate.tracking import LOGGER_TYPE_TO_CLASS

            threads = torch.get_num_threads()
            PartialState()  # trackers write to a log that asks it for this process's rank
            torch.set_num_threads(threads)  # accelerate may choose a number, and sums would have other bits
            tracker = LOGGER_TYPE_TO_CLASS[name](*place, **given)
            tracker.start()
            self._started[name] = tracker
            tracker.store_init_configuration(settings)


@contextmanager
def _starting(name: str) -> Iterator[None]:
    """Raises ConfigError for what a package raises inside, which may be anything."""
    try:
        yield
    except Exception as error:
        raise ConfigError(f"--report-to {name} cannot be started: {type(error).__name__}: {error}") from error
