"""The flags of a subcommand: parsed by tyro, with help in groups and errors of one line."""

import io
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields, is_dataclass
from itertools import pairwise
from typing import Any, TypeVar, get_type_hints

import tyro

from pagoda.config.settings import flag
from pagoda.errors import ConfigError

_T = TypeVar("_T")
_ESSENTIAL = (
    *("--model", "--data", "--prompt", "--out", "--hardware", "--gpus-per-node", "--download", "--eval-data"),
    *("--optim.lr", "--epochs", "--steps", "--batch-size", "--seq-len", "--precision", "--lora.rank", "--resume"),
)
"""Flags that come first, in this order."""
_OF_MEMORY = (
    *("--memory", "--quantize", "--activations", "--tile", "--batch-tiles", "--sequence-tiles", "--per-token"),
    *("--chunked", "--optim.moments"),
)
"""How flags begin that decide how much memory a run takes."""
_MAY_BE_EMPTY = ("--prompt", "--system")
_WIDTH = 100
_ENTRY = re.compile(r"  (-|[A-Z][A-Z_|]+( |$))")
"""How a flag or a positional argument begins in tyro's help, if that is not shown in a terminal."""
_NAME = re.compile(r"--[\w.-]+")
_UNREAD = re.compile(
    r"^Error parsing (?P<flags>\S+): (?:no type matching \{None\}\|\{?(?P<kind>[A-Z ]+)\}? could be instantiated from "
    r"\[|.*(?:base 10|to float): )(?P<value>'.*?')(?:\]|$)"
)
"""How tyro complains of a value of another type."""
_KINDS = {"INT": "a whole number", "FLOAT": "a number", "FLOAT FLOAT": "two numbers"}
_INDENT = " " * 8
"""How lines begin that explain a flag."""


def parsed(config: Callable[..., _T], args: list[str], prog: str, default: _T | None) -> _T:
    """The settings that `args` give. `default` provides the values of flags that are not given.

    Raises ConfigError for flags that cannot be read, and SystemExit after --help.
    """
    shown, complaint = io.StringIO(), io.StringIO()
    given: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with redirect_stdout(shown), redirect_stderr(complaint):
            found: _T = tyro.cli(config, args=args, prog=prog, **given)
            return found
    except SystemExit as exited:
        if exited.code:
            raise ConfigError(f"{_in_one_line(complaint.getvalue())} ({prog} --help lists all flags)") from None
        print(_in_groups(shown.getvalue(), prog), end="")
        raise


def check_not_empty(args: Sequence[str]) -> None:
    """Raises ConfigError for an empty value, such as that of a variable of the shell that is not set. As a path, it
    would be the current directory."""
    name = ""
    for arg in args:
        before, equals, value = arg.partition("=")
        name = before if arg.startswith("--") else name
        if not (value if arg.startswith("--") and equals else arg) and name not in _MAY_BE_EMPTY:
            raise ConfigError(f"{name or 'an argument'} is empty: give a value, or leave it out")


def with_flags(message: str, config: type | None) -> str:
    """A message about settings in Python with the names that their flags have, as far as `config` has such flags."""
    if config is None:
        return message
    names = {name for name, _ in _settings(config)}
    unusual = sorted((name for name in names if "_" in name or "." in name), key=len, reverse=True)
    several = "|".join(map(re.escape, unusual))
    call = r"(?:pagoda\.)?(?:wrap|Memory|Tiles|Updates|MixedPrecision|Activations)\((\w+)=([^()]*)\)"
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


def _settings(config: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, type) of every setting that has a flag."""
    hints = get_type_hints(config, include_extras=True)
    for field in fields(config):
        hint = hints[field.name]
        if is_dataclass(hint):
            yield from _settings(hint, f"{prefix}{field.name}.")  # type: ignore[arg-type]
        elif tyro.conf.Suppress not in getattr(hint, "__metadata__", ()):
            yield prefix + field.name, hint


def _in_one_line(complaint: str) -> str:
    """What tyro complains of, without its explanations of flags."""
    lines = [line.rstrip() for line in complaint.splitlines() if line.strip()][1:]
    parts: list[list[str]] = [[]]
    for line in lines:
        if line.strip(" -"):
            parts[-1].append(line)
        else:
            parts.append([])
    first, *others = filter(None, parts)
    text = " ".join(line.strip() for line in first if not line.startswith(_INDENT))
    text = re.sub(r"^Error parsing (?!-)\S+: ", "", text).rstrip(".")  # `text` names the setting itself
    if (unread := _UNREAD.search(text)) is not None:
        flags, of_several, value = unread.group("flags", "kind", "value")
        kind = _KINDS.get(of_several) or _KINDS["INT" if "int()" in text else "FLOAT"]
        text = f"{max(flags.split('/'), key=_is_whole)} is {value}; it must be {kind}"
    text = re.sub(r"^Missing value for argument '(\S+)'. Expected 1 values", r"\1 lacks its value", text)
    text = text.replace("('None', ", "(").replace(", 'None'", "")
    meant = next((part[1] for part in others if part[0].strip() == "Perhaps you meant:"), None)
    return text if meant is None else f"{text}; did you mean {max(_NAME.findall(meant), key=_is_whole)}?"


def _in_groups(text: str, prog: str) -> str:
    """tyro's help with its flags in groups."""
    description = text.split("\n\n")[1]
    entries = dict(_entries(text.splitlines()))
    del entries["-h"]
    groups: dict[str, list[str]] = {"essential": [], "memory": [], "advanced": []}
    positional = [name for name in entries if not name.startswith("-")]
    first = [*positional, *(name for name in _ESSENTIAL if name in entries)]
    usual = [f"{name} ..." if name.startswith("-") else name for name in first[: max(2, len(positional))]]
    groups["essential"] += [entries.pop(name) for name in first]
    for name, entry in entries.items():
        groups["memory" if name.startswith(_OF_MEMORY) else "advanced"].append(entry)
    shown = [f"usage: {' '.join([prog, *usual])} [flags]\n", *textwrap.wrap(" ".join(description.split()), _WIDTH)]
    for title, found in groups.items():
        shown += [f"\n{title}:", *found] if found else []
    return "\n".join(shown) + "\n"


def _entries(lines: list[str]) -> Iterator[tuple[str, str]]:
    """(name, text) of each flag in tyro's help."""
    starts = [at for at, line in enumerate(lines) if _ENTRY.match(line)]
    for start, end in pairwise([*starts, len(lines)]):
        usage, *explained = re.split(r" {2,}", lines[start].strip(), maxsplit=1)
        explained += [line.strip() for line in lines[start + 1 : end] if line.startswith(_INDENT)]
        text = " ".join(" ".join(explained).split()).removesuffix(" (default: None)")
        wrapped = textwrap.fill(text, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT, break_on_hyphens=False)
        usage = ", ".join(sorted(usage.split(", "), key=_is_whole, reverse=True))
        yield re.split(r"[ ,]", usage)[0], f"  {usage.replace('{None}|', '')}\n{wrapped}"


def _is_whole(name: str) -> bool:
    """Whether a name has the group of its setting, which aliases leave out."""
    return "." in name
