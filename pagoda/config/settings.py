"""The base class of all settings, and helpers that check values."""

import math
from dataclasses import fields
from typing import Any, TypeVar

from pagoda.errors import ConfigError

T = TypeVar("T", bound="Settings")


class Settings:
    """Base of all frozen dataclasses of settings. A configuration inherits from the classes of its concerns."""

    def __post_init__(self) -> None:
        """Check the values. Each concern checks its own fields, then calls the next.

        Raises ConfigError if a value is out of range, or if two values exclude each other.
        """

    def part(self: Any, kind: type[T]) -> T:
        """The settings of one of the concerns that this configuration inherits."""
        return kind(**self.shared(kind))

    def shared(self: Any, kind: type["Settings"]) -> dict[str, Any]:
        """The values of the fields of `kind`, by name."""
        return {field.name: getattr(self, field.name) for field in fields(kind)}  # type: ignore[arg-type]


def require(holds: bool, name: str, value: object, rule: str) -> None:
    """Raises ConfigError with the setting's name unless `holds`."""
    if not holds:
        raise ConfigError(f"{name} is {value!r}; it must be {rule}.")


def require_count(name: str, value: object, least: int) -> None:
    """Raises ConfigError unless `value` is a whole number of at least `least`."""
    require(type(value) is int and value >= least, name, value, f"a whole number, at least {least}")


def require_bool(name: str, value: object) -> None:
    """Raises ConfigError with the setting's name unless `value` is True or False."""
    require(isinstance(value, bool), name, value, "True or False")


def is_finite(value: object) -> bool:
    """Whether a setting is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def are_texts(value: object) -> bool:
    """Whether a setting is a tuple or list of texts. A text alone would be taken for its letters."""
    return isinstance(value, tuple | list) and all(isinstance(each, str) for each in value)


def flag(name: str) -> str:
    """A setting's flag on the command line."""
    return "--" + name.replace("_", "-")
