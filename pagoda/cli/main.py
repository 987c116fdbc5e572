"""Entry point of the `pagoda` command: picks the subcommand, and turns user errors into messages and exit codes.

Exit codes: 0: done. 1: a plan does not fit, something is damaged, or `gc` left pages. 2: user error (message on stderr,
no traceback). 128 + signal: interrupted.
"""

import io
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import IO, Any, cast

from rich.console import Console

from pagoda.cli.flags import check_not_empty, parsed, with_flags
from pagoda.cli.train import defaults_of
from pagoda.cli.trl import defaults_of_script
from pagoda.config.commands import (
    CalibrateConfig,
    DataConfig,
    DpoConfig,
    ExportConfig,
    GcConfig,
    GenerateConfig,
    GrpoConfig,
    InspectConfig,
    KtoConfig,
    ReportConfig,
    RewardConfig,
)
from pagoda.console import FailingOnce
from pagoda.errors import PagodaError, StorageError, unknown_name
from pagoda.forecast.config import PlanConfig
from pagoda.memory.sizes import directory_and_size
from pagoda.train.config import TrainConfig, flat

USER_ERROR = 2
_INTERRUPTED = 130
_UNREAD = 141
_LAST_KEPT = "interrupted; nothing after the last checkpoint is kept"


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
    module: str | None = None
    """The name of the module, if it is not that of the command."""

    @property
    def purpose(self) -> str:
        """What it is for, in a sentence."""
        return " ".join(str(self.config.__doc__).split()).partition(". ")[0].rstrip(".")


COMMANDS = (
    Command("train", TrainConfig, defaults_of, _LAST_KEPT),
    *(
        Command(each.script, each, partial(defaults_of_script, each), _LAST_KEPT, "trl")
        for each in (DpoConfig, GrpoConfig, KtoConfig, RewardConfig)
    ),
    Command("data", DataConfig),
    Command("plan", PlanConfig),
    Command("export", ExportConfig),
    Command("generate", GenerateConfig),
    Command("report", ReportConfig),
    Command("calibrate", CalibrateConfig),
    Command("inspect", InspectConfig),
    Command("gc", GcConfig, interrupted="interrupted"),
)
"""All subcommands. To add one, write a module with a `run` next to `train.py`, and add a line here."""


class _Output(FailingOnce):
    """Standard output. Its first error raises StorageError, or BrokenPipeError if the pipe was closed."""

    def failed(self, error: OSError | ValueError) -> None:
        if isinstance(error, BrokenPipeError):
            raise error
        why = error.strerror if isinstance(error, OSError) else error
        raise StorageError(f"the output cannot be written: {why}") from error


class _Console(Console):
    """A console that lets `main` handle a closed pipe."""

    def on_broken_pipe(self) -> None:
        """Raise the BrokenPipeError that rich is handling."""
        raise


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line `args` (by default the process's own). Returns its exit code.

    Raises SystemExit after --help.
    """
    output = _Output(sys.stdout or io.StringIO())  # a process may have none
    try:
        with redirect_stdout(cast(IO[str], output)):
            try:
                return _run(sys.argv[1:] if args is None else list(args))
            finally:
                output.flush()
    except BrokenPipeError:  # the reader has seen enough, as in `pagoda train --help | head`
        return _UNREAD
    except StorageError as error:
        return _tell(str(error), USER_ERROR)


def _run(args: Sequence[str]) -> int:
    interrupted, settings = "interrupted", next((each.config for each in COMMANDS if [each.name] == args[:1]), None)
    config = None
    try:
        with _warnings_in_one_line(settings):
            command, config = parse(args)
            interrupted = command.interrupted
            code: int = import_module(f"pagoda.cli.{command.module or command.name}").run(config, _Console())
            return code
    except PagodaError as error:
        return _tell(with_flags(str(error), settings), USER_ERROR)
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.filename is None or not (config is None or _is_named(str(error.filename), config)):
            raise  # a fault of a library
        return _tell(f"{error.filename} cannot be used: {error.strerror or error}", USER_ERROR)
    except KeyboardInterrupt:
        return _tell(interrupted, _INTERRUPTED)


def _is_named(path: str, config: Any) -> bool:
    """Whether a command's settings name a path, or something in it or around it."""
    there = Path(path).absolute()
    texts = (part for _, value in flat(asdict(config)) for part in (value if isinstance(value, tuple) else [value]))
    parts = (part for text in texts if isinstance(text, str | Path) for part in str(text).split(","))
    named = [Path(directory_and_size(part)[0]).absolute() for part in parts if part]
    return any(there.is_relative_to(name) or name.is_relative_to(there) for name in named)


@contextmanager
def _warnings_in_one_line(settings: type | None) -> Iterator[None]:
    """Inside, warnings are one line each. Those that only the developers of a library can heed are not shown."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        _tell(f"warning: {with_flags(str(message), settings)}", 0)

    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns at its import of GPUs that are not there
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.showwarning = show
        yield


def _tell(message: str, code: int) -> int:
    """Print a message to stderr, if that can be written. Returns the exit code."""
    with suppress(OSError):
        print(f"pagoda: {message}", file=sys.stderr, flush=True)
    return code


def parse(args: Sequence[str]) -> tuple[Command, Any]:
    """The subcommand that `args` name, with its configuration.

    Raises ConfigError for an unknown subcommand and for flags that cannot be read, and SystemExit after --help.
    """
    name, *flags = args or ("",)
    if name in ("-h", "--help"):
        print(_HELP)
        raise SystemExit(0)
    command = next((command for command in COMMANDS if command.name == name), None)
    if command is None:
        names = [command.name for command in COMMANDS]
        given = f"there is no command {name!r}." if name else "a command is missing."
        raise unknown_name(name, names, given, f"Commands: {', '.join(names)}. `pagoda --help` describes them.")
    check_not_empty(flags)
    default = command.defaults(flags) if command.defaults else None
    return command, parsed(command.config, flags, f"pagoda {name}", default)


_HELP = "\n".join(
    [
        "usage: pagoda COMMAND [flags]\n",
        "Train PyTorch models larger than memory: their state lives in pages on GPU, RAM and SSD.\n",
        *(f"  {command.name:<10} {command.purpose}" for command in COMMANDS),
        "\n`pagoda COMMAND --help` lists its flags. `pagoda --version` prints the version.",
    ]
)
