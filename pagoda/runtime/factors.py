"""Factors: what the gradients of a step are multiplied by on their way into updates, by clipping or by the user."""

import zlib

from pagoda.runtime.unit import LiveUnit


class Factors:
    """One factor for each parameter's gradient; 1 where none is set."""

    def __init__(self) -> None:
        self._by_slot: dict[tuple[int, int], float] = {}

    def of(self, unit: LiveUnit, slot: int) -> float:
        """The factor of one gradient."""
        return self._by_slot.get((unit.index, slot), 1.0)

    def are_set(self, unit: LiveUnit, slot: int) -> bool:
        """Whether somebody has asked for a gradient to be multiplied, be it by 1."""
        return (unit.index, slot) in self._by_slot

    def set(self, unit: LiveUnit, slot: int, factor: float) -> None:
        """Replace the factor of one gradient."""
        self._by_slot[unit.index, slot] = factor

    def multiply(self, unit: LiveUnit, slot: int, factor: float) -> None:
        """Multiply one gradient."""
        self.set(unit, slot, self.of(unit, slot) * factor)

    def drop(self, unit: LiveUnit, slot: int) -> None:
        """Forget the factor of a gradient that has been dropped."""
        self._by_slot.pop((unit.index, slot), None)

    @property
    def digest(self) -> int:
        """A number that stands for all factors."""
        changed = sorted((key, factor) for key, factor in self._by_slot.items() if factor != 1.0)
        return zlib.crc32(repr(changed).encode())

    def clear(self) -> None:
        """Forget all factors."""
        self._by_slot.clear()
