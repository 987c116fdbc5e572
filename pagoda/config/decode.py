"""Builds dataclasses of settings from decoded JSON, and checks every value against the type of its field."""

from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from reprlib import repr as short
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pagoda.errors import ConfigError

_T = TypeVar("_T")
_MOST = 1 << 63
"""Exclusive limit on the absolute value of numbers. No valid setting reaches it."""


def decoded(kind: type[_T], settings: Any, prefix: str = "", of: str = "the configuration") -> _T:
    """Make a dataclass of type `kind` from the settings in a JSON object.

    Raises ConfigError if a setting is unknown, missing, of another type, or out of range. The message names `of`, the
    source of the settings.
    """
    assert is_dataclass(kind)
    if not isinstance(settings, dict):
        where = f" as {prefix.rstrip('.')}" if prefix else ""
        raise ConfigError(
            f"{of} has {short(settings)}{where}, which is not an object with the settings of {kind.__name__}"
        )
    hints = get_type_hints(kind)
    if unknown := sorted(f"'{prefix}{key}'" for key in settings.keys() - hints.keys()):  # in YAML, a key may be no text
        raise ConfigError(f"{of} has unknown settings: {', '.join(unknown)[:200]}")
    needed = {field.name for field in fields(kind) if field.default is field.default_factory is MISSING}
    if missing := sorted(needed - settings.keys()):
        raise ConfigError(f"{of} is incomplete: it lacks {', '.join(missing)}")
    return kind(**{name: _value(hints[name], value, prefix + name, of) for name, value in settings.items()})


def _value(hint: Any, value: Any, name: str, of: str) -> Any:
    """Convert a value to its field's type. Raises ConfigError if it is of another type."""
    for kind in get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,):
        if is_dataclass(kind) and (kind is hint or isinstance(value, dict)):
            return decoded(kind, value, f"{name}.", of)  # type: ignore[arg-type]
        if _is_of(kind, value):
            if get_origin(kind) is tuple:
                return tuple(value)
            return Path(value) if kind is Path else value
    raise ConfigError(f"{of} has {name} as {short(value)}, which is a value of the wrong type")


def _is_of(kind: Any, value: Any) -> bool:
    if get_origin(kind) is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(kind))
    if get_origin(kind) is tuple:
        kinds = get_args(kind)
        if not isinstance(value, list):
            return False
        kinds = kinds[:1] * len(value) if kinds[1:] == (...,) else kinds
        return len(kinds) == len(value) and all(map(_is_of, kinds, value))
    if kind in (str, Path):
        return isinstance(value, str) and is_text(value) and (kind is str or value != "")
    if kind is float:
        return type(value) is float or (type(value) is int and abs(value) < _MOST)
    if kind is int:
        return type(value) is int and abs(value) < _MOST
    return type(value) is kind and kind in (bool, NoneType)


def is_text(value: str) -> bool:
    """Whether the operating system accepts the value as an argument or a path."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in value
