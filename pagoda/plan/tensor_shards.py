"""Tensor shards: equal parts of a parameter along one of its dimensions, of which each rank of a group has one."""

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class TensorShard:
    """How a parameter is divided over tensor-parallel ranks; which of the parts a rank has is not said here.

    Seen flat, the whole is `rows` rows of `row` elements, of each of which a part has `width` adjoining ones. A part
    has them one row after another.
    """

    shape: tuple[int, ...]
    """Of the whole."""
    dim: int
    ranks: int
    """Parts, which are equal."""

    @property
    def rows(self) -> int:
        return prod(self.shape[: self.dim])

    @property
    def row(self) -> int:
        return prod(self.shape[self.dim :])

    @property
    def width(self) -> int:
        return self.row // self.ranks

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of each part."""
        return (*self.shape[: self.dim], self.shape[self.dim] // self.ranks, *self.shape[self.dim + 1 :])

    def name_of_part(self, name: str, index: int) -> str:
        """What part number `index` of the parameter `name` is called where all parts are."""
        return f"{name}@{index}/{self.ranks}"
