"""Packed: where parameters' states with shapes of their own lie, one after another, in all that their unit has."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from pagoda.optim.rule import Shape
from pagoda.plan.units import UnitSpec

PACK_ELEMENTS = 64
"""Each parameter's begins on a multiple of this many elements."""


@dataclass(frozen=True, slots=True)
class ShapedSpan:
    """What a parameter, or a block of one, has of a state: elements [first, first + count) of all that the unit has."""

    first: int
    count: int
    shape: Shape


class Packed:
    """One state with shapes of its own, of every unit."""

    def __init__(self, units: Sequence[UnitSpec], shape_of: Callable[[str, Shape], Shape | None]) -> None:
        self._units = [_pack(unit, shape_of) for unit in units]

    def span(self, unit: UnitSpec, slot: int) -> ShapedSpan | None:
        """What a parameter has of it; None where it has none."""
        return self._units[unit.index][0][slot]

    def spans(self) -> Iterator[ShapedSpan]:
        """Of every parameter that has some."""
        return (span for spans, _ in self._units for span in spans if span is not None)

    def elements(self, unit: UnitSpec) -> int:
        """What a unit has of it."""
        return self._units[unit.index][1]

    @property
    def total(self) -> int:
        """Elements of all units."""
        return sum(total for _, total in self._units)

    def before(self, unit: UnitSpec, element: int) -> int:
        """Where begins what belongs to the elements of a unit from `element` on.

        Of a parameter that is cut, the state has one element for each of its own.
        """
        spans, total = self._units[unit.index]
        for placed, span in zip(unit.slots, spans, strict=True):
            if span is not None and element < placed.offset + placed.param.numel:
                return span.first + max(0, element - placed.offset)
        return total


def _pack(unit: UnitSpec, shape_of: Callable[[str, Shape], Shape | None]) -> tuple[list[ShapedSpan | None], int]:
    """The span of each slot of a unit, and the elements of all."""
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
