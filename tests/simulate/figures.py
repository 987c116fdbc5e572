"""Every figure of a machine."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from pagoda.simulate.hardware import Figure


def walk(part: Any) -> Iterator[tuple[str, Figure]]:
    """(field, figure) of everything in a hardware."""
    for field in fields(part):
        value = getattr(part, field.name)
        if isinstance(value, Figure):
            yield field.name, value
        elif is_dataclass(value):
            yield from walk(value)
