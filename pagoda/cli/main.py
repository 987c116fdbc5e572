"""Entry point of the `pagoda` command: picks the subcommand, and turns user errors into messages and exit codes.

Exit codes: 0: done. 1: a plan does not fit, damage was found, or `gc` left pages. 2: user error (message on stderr, no
traceback). 128 + signal: interrupted.
"""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any, Union

import tyro
from rich.console import Console

from pagoda.cli.train import defaults_of
from pagoda.config.commands import CalibrateConfig, ExportConfig, GcConfig, GenerateConfig, InspectConfig, ReportConfig
from pagoda.errors import PagodaError
from pagoda.forecast.config import PlanConfig
from pagoda.train.config import TrainConfig

USER_ERROR = 2
_INTERRUPTED = 130
_UNREAD = 141


@dataclass(frozen=True)
class Command:
    """A subcommand: a module whose `run` returns the exit code, and the dataclass that tyro fills from the flags."""

    name: str
    config: type
    defaults: Callable[[Sequence[str]], Any] | None = None
    """Returns, for the flags, the configuration that provides the values of flags that are not given. None: the
    dataclass's defaults."""
    interrupted: str = "interrupted; nothing was written"
    """The message after Ctrl-C."""


COMMANDS = (
    Command("train", TrainConfig, defaults_of, "interrupted; nothing after the last checkpoint is kept"),
    Command("plan", PlanConfig),
    Command("export", ExportConfig),
    Command("generate", GenerateConfig),
    Command("report", ReportConfig),
    Command("calibrate", CalibrateConfig),
    Command("inspect", InspectConfig),
    Command("gc", GcConfig, interrupted="interrupted"),
)
"""All subcommands. To add one, write a module with a `run` next to `train.py`, and add a line here."""


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line `args` (by default the process's own). Returns its exit code.

    Raises SystemExit: 0 after --help, 2 for flags that cannot be parsed.
    """
    args = sys.argv[1:] if args is None else list(args)
    interrupted = "interrupted"
    try:
        command, config = parse(args)
        interrupted = command.interrupted
        code: int = import_module(f"pagoda.cli.{command.name}").run(config, Console())
        return code
    except PagodaError as error:
        print(f"pagoda: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print(f"pagoda: {interrupted}", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:  # the reader has seen enough, as in `pagoda train --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python's exit writes there again
        return _UNREAD


def parse(args: Sequence[str]) -> tuple[Command, Any]:
    """The subcommand that `args` name, with its configuration."""
    arms = []
    for command in COMMANDS:
        chosen = bool(args) and args[0] == command.name
        default = command.defaults(args[1:]) if chosen and command.defaults else None
        given = {} if default is None else {"default": default}
        arms.append(Annotated[command.config, tyro.conf.subcommand(command.name, **given)])
    # tyro makes subcommands of a union, and a union needs a second member.
    union = Union[(*arms, Annotated[None, tyro.conf.Suppress])]  # type: ignore[valid-type]
    config: Any = tyro.cli(
        union,
        args=args,
        prog="pagoda",
        description="Train PyTorch models larger than memory: their state lives in pages on GPU, RAM and SSD. `pagoda "
        "--version` prints the version.",
    )
    return next(command for command in COMMANDS if isinstance(config, command.config)), config
