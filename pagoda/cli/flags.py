"""The flags of a subcommand, which tyro parses, and messages that name them."""

import io
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, get_type_hints

import tyro

from pagoda.config.settings import flag
from pagoda.errors import ConfigError, PagodaError, unknown_name

_T = TypeVar("_T")
_MANY = 30
"""Help describes the flags of a command that has fewer; of others, --help lists them and --help-verbose describes them.
"""
_MAY_BE_EMPTY = ("--prompt", "--system")


def parsed(config: Callable[..., _T], args: list[str], prog: str, default: _T | None) -> _T:
    """The settings that `args` give. `default` provides the values of flags that are not given. A configuration of
    another program's script gets unknown flags as `others`.

    Raises ConfigError for an unknown flag, and what the settings refuse. Raises SystemExit after help, and after tyro
    has printed what it cannot read.
    """
    names = [flag(name) for name, _ in settings_of(config)]  # type: ignore[arg-type]
    given: dict[str, Any] = {} if default is None else {"default": default}
    complaint = io.StringIO()
    try:
        with redirect_stderr(complaint):
            found: _T
            found, unknown = tyro.cli(
                config, args=args, prog=prog, return_unknown_args=True, compact_help=len(names) > _MANY, **given
            )
    except SystemExit as exited:
        error: BaseException | None = exited
        while error is not None and not isinstance(error, PagodaError):
            error = error.__context__
        if error is not None:  # tyro calls a refusal a value error, and leaves it as the context
            raise error from None
        print(complaint.getvalue(), end="", file=sys.stderr)
        raise
    if hasattr(found, "others"):
        return replace(found, others=tuple(unknown))  # type: ignore[type-var]
    if unknown:
        name = unknown[0].partition("=")[0]
        raise unknown_name(name, names, f"{prog} has no flag or argument {name!r}.", f"`{prog} --help` lists all.")
    return found


def check_not_empty(args: Sequence[str]) -> None:
    """Raises ConfigError for an empty value, such as that of a variable of the shell that is not set. As a path, it
    would be the current directory."""
    name = ""
    for arg in args:
        before, equals, value = arg.partition("=")
        name = before if arg.startswith("--") else name
        if not (value if arg.startswith("--") and equals else arg) and name not in _MAY_BE_EMPTY:
            raise ConfigError(f"{name or 'an argument'} is empty: give a value, or leave it out")


def value_of(args: Sequence[str], flag: str) -> str | None:
    """The value of a flag in a command line, or None."""
    for arg, after in zip(args, [*args[1:], ""], strict=bool(args)):
        if name_of(arg) == flag:
            return arg.partition("=")[2] or after or None
    return None


def name_of(arg: str) -> str:
    """The name of a flag in an argument. tyro takes --output_dir for --output-dir, as users of Trainer type it."""
    return arg.partition("=")[0].replace("_", "-")


def with_flags(message: str, config: type | None) -> str:
    """A message about settings in Python with the names that their flags have, as far as `config` has such flags."""
    if config is None:
        return message
    names = {name for name, _ in settings_of(config)}
    unusual = sorted((name for name in names if "_" in name or "." in name), key=len, reverse=True)
    several = "|".join(map(re.escape, unusual))
    call = r"(?:pagoda\.)?(?:wrap|Paging|Memory|Tiles|Updates|MixedPrecision|Activations)\((\w+)=([^()]*)\)"
    value = r"(?:=('[^']*'|\.\.\.|[\w.]+\w))?"

    def named(name: str, given: str | None) -> str:
        text = "" if given in (None, "...") else " " + str(given).strip("'")
        return flag(name) + text

    def of_call(match: re.Match[str]) -> str:
        name = next((name for name in (match[1], f"memory.{match[1]}") if name in names), None)
        return match[0] if name is None else named(name, match[2])

    message = re.sub(call, of_call, message)
    if unusual:
        bare = rf"(?<![\w./'-])({several}){value}(?![\w/-]|\.\w)"
        message = re.sub(bare, lambda match: named(match[1], match[2]), message)
    return re.sub(r"^(\w+)(?= is )", lambda match: flag(match[1]) if match[1] in names else match[0], message)


def settings_of(config: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, type) of every setting that has a flag."""
    hints = get_type_hints(config, include_extras=True)
    for field in fields(config):
        hint = hints[field.name]
        if is_dataclass(hint):
            yield from settings_of(hint, f"{prefix}{field.name}.")  # type: ignore[arg-type]
        elif {tyro.conf.Suppress, tyro.conf.Positional}.isdisjoint(getattr(hint, "__metadata__", ())):
            yield prefix + field.name, hint
