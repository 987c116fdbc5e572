"""`pagoda train`: the ready-made loop."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from pagoda.train.config import TrainConfig
from pagoda.train.run_dir import RunDir

_SIGNAL_BASE = 128


def run(config: TrainConfig, console: Console) -> int:
    """Runs the training and returns its exit code."""
    from pagoda.process import keep_freed_memory
    from pagoda.tiers import compute_device
    from pagoda.train.loop import run as train

    if compute_device(config.memory).type == "cpu":
        keep_freed_memory()
    result = train(config, console)
    return 0 if result is None or result.stopped_by is None else _SIGNAL_BASE + result.stopped_by


def resumed_config(args: Sequence[str]) -> TrainConfig | None:
    """With --resume, the configuration of the run in --out, which stands in for every flag not given.

    Raises:
        ConfigError: there is no run in --out.
    """
    if "--resume" not in args or not {"-h", "--help"}.isdisjoint(args):
        return None
    for i, arg in enumerate(args):
        name, _, value = arg.partition("=")
        if name == "--out" and (value or i + 1 < len(args)):
            out = Path(value or args[i + 1])
            return replace(RunDir(out).started_config(), out=out, resume=True, trace=None)
    return None
