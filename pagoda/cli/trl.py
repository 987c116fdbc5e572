"""`pagoda dpo`, `grpo`, `kto` and `reward`: TRL's training scripts, with training state in pages."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from pagoda.cli.flags import settings_of, value_of
from pagoda.config.commands import ScriptConfig
from pagoda.config.decode import decoded
from pagoda.config.settings import flag
from pagoda.errors import check_installed
from pagoda.train.settings_file import read_yaml

_T = TypeVar("_T", bound=ScriptConfig)


def run(config: ScriptConfig, console: Console) -> int:
    """Run TRL's script. Returns the exit code. Raises ConfigError if TRL is not installed."""
    _check_trl(config.script)
    from pagoda.budgets import compute_device
    from pagoda.integrations.trl import run_script
    from pagoda.process import keep_freed_memory

    if compute_device(config.memory).type == "cpu":
        keep_freed_memory()
    flags = [flag(name) for name, _ in settings_of(type(config))]
    run_script(config, flags, _settings_in_files(type(config)))
    return 0


def defaults_of_script(config: type[_T], args: Sequence[str]) -> _T | None:
    """The settings of Pagoda in the file with --config, which also has TRL's. None: the defaults. Before Pagoda's own
    help, prints the help of TRL's script.

    Raises ConfigError if the file or a setting in it cannot be used, and with --help if TRL is not installed.
    """
    if not {"-h", "--help"}.isdisjoint(args):
        _check_trl(config.script)
        from pagoda.integrations.trl import parser_of

        print(parser_of(config.script).format_help())
        return None
    if (path := value_of(args, "--config")) is None:
        return None
    settings, own = read_yaml(Path(path)), _settings_in_files(config)
    given = {name: value for name, value in settings.items() if name in own} if isinstance(settings, dict) else {}
    return decoded(config, given, of=f"--config {path}")


def _settings_in_files(config: type[ScriptConfig]) -> set[str]:
    return {field.name for field in fields(config)}.difference({"others"})


def _check_trl(script: str) -> None:
    check_installed("trl", f"pagoda {script} needs TRL: pip install 'pagoda-train[trl]'")
