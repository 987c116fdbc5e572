"""Packed states: states with shapes of their own, one parameter after another, in one extent per unit."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from pagoda.optim.rule import Shape
from pagoda.plan.units import UnitSpec

PACK_ELEMENTS = 64
"""The part of each parameter begins at a multiple of this many elements."""


@dataclass(frozen=True, slots=True)
class ShapedSpan:
    """The part of a unit's state that belongs to a parameter or a block of one: elements [first, first + count)."""

    first: int
    count: int
    shape: Shape


class Packed:
    """One state with shapes of its own, for all units."""

    def __init__(self, units: Sequence[UnitSpec], shape_of: Callable[[str, Shape], Shape | None]) -> None:
        self._units = [_pack(unit, shape_of) for unit in units]

    def span(self, unit: UnitSpec, slot: int) -> ShapedSpan | None:
        """The part of a parameter. None if it has none."""
        return self._units[unit.index][0][slot]

    def spans(self) -> Iterator[ShapedSpan]:
        """The parts of all parameters that have one."""
        return (span for spans, _ in self._units for span in spans if span is not None)

    def elements(self, unit: UnitSpec) -> int:
        """Number of elements of the state of a unit."""
        return self._units[unit.index][1]

    @property
    def total(self) -> int:
        """Number of elements of the state of all units."""
        return sum(total for _, total in self._units)

    def before(self, unit: UnitSpec, element: int) -> int:
        """The first element of the state that belongs to elements of a unit from `element` on.

        A parameter that may be cut has one element of the state per element of its own.
        """
        spans, total = self._units[unit.index]
        for placed, span in zip(unit.slots, spans, strict=True):
            if span is not None and element < placed.offset + max(placed.param.numel, 1):
                return span.first + max(0, element - placed.offset)
        return total


def _pack(unit: UnitSpec, shape_of: Callable[[str, Shape], Shape | None]) -> tuple[list[ShapedSpan | None], int]:
    """The part of each slot of a unit, and the number of elements of all parts."""
    spans: list[ShapedSpan | None] = []
    end = 0
    for placed in unit.slots:
        shape = shape_of(placed.param.name, placed.param.shape) if placed.param.trainable else None
        if shape is None:
            spans.append(None)
            continue
        spans.append(ShapedSpan(end, prod(shape), shape))
        end += -(-prod(shape) // PACK_ELEMENTS) * PACK_ELEMENTS
    return spans, end
