"""`pagoda train`: transformers' trainer, with state in pages."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from pagoda.cli.flags import value_of
from pagoda.config.decode import is_text
from pagoda.errors import ConfigError, check_installed
from pagoda.train.config import TrainConfig
from pagoda.train.run_dir import LAST, RunDir
from pagoda.train.settings_file import read_settings

_SIGNAL_BASE = 128


def run(config: TrainConfig, console: Console) -> int:
    """Train. Returns the exit code. Raises ConfigError if accelerate is not installed."""
    check_installed("accelerate", "pagoda train needs accelerate: pip install 'pagoda-train[train]'")
    from pagoda.budgets import compute_device
    from pagoda.process import keep_freed_memory
    from pagoda.train.assembly import run as train

    if compute_device(config.memory).type == "cpu":
        keep_freed_memory()
    result = train(config, console)
    return 0 if result is None or result.stopped_by is None else _SIGNAL_BASE + result.stopped_by


def defaults_of(args: Sequence[str]) -> TrainConfig | None:
    """The configuration that provides the values of flags that are not given: that of the run in --output-dir with
    --resume-from-checkpoint, or that of the file with --config. None: the defaults.

    Raises ConfigError if an argument is not UTF-8 text, if both flags are given, if --resume-from-checkpoint has no
    --output-dir, or if neither a run is there nor --model says which to begin, or if the file cannot be used.
    """
    if not {"-h", "--help"}.isdisjoint(args):
        return None
    for arg in args:
        if not is_text(arg):
            raise ConfigError(f"{arg!r} is not UTF-8 text, which the settings of a run are: rename it")
    given = value_of(args, "--config")
    if value_of(args, "--resume-from-checkpoint") is not None:
        if (out := value_of(args, "--output-dir")) is None:
            raise ConfigError("--resume-from-checkpoint continues a run: name its directory with --output-dir")
        if given:
            raise ConfigError(
                "--config starts another run, and --resume-from-checkpoint continues one: leave one of them out"
            )
        run_dir = RunDir(Path(out))
        if value_of(args, "--model") is not None and not run_dir.config.exists():
            return None  # the run was killed before the end of its first step, or never began: the flags describe it
        return replace(run_dir.started_config(), output_dir=Path(out), resume_from_checkpoint=LAST)
    return read_settings(Path(given)) if given else None
