"""Rows: what a rank sends each of the others of a unit's gradient, a header and a slice, and the buffers for them."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from pagoda.plan.slices import slice_elements
from pagoda.plan.units import UnitSpec


@dataclass(frozen=True)
class Flags:
    """Which parameters of a unit a rank, or some ranks together, have a gradient of."""

    given: frozenset[int] = frozenset()
    """Their slots."""
    dropped: frozenset[int] = frozenset()
    """Those of them whose earlier gradients the user has dropped since."""

    def write(self, header: torch.Tensor) -> None:
        """Into a header, uint8: a bit a slot, the first half for `given`."""
        half = header.numel() // 2
        bits = [0, 0]
        for which, slots in enumerate((self.given, self.dropped)):
            for slot in slots:
                bits[which] |= 1 << slot
        data = b"".join(number.to_bytes(half, "little") for number in bits)
        header.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    @classmethod
    def read(cls, header: torch.Tensor) -> "Flags":
        """What `write` has written."""
        data = header.cpu().numpy().tobytes()
        half = len(data) // 2
        numbers = (int.from_bytes(data[:half], "little"), int.from_bytes(data[half:], "little"))
        return cls(*(frozenset(bit for bit in range(number.bit_length()) if number >> bit & 1) for number in numbers))

    @classmethod
    def of_all(cls, flags: Iterable["Flags"]) -> "Flags":
        """What some ranks have together."""
        several = [*flags]
        return cls(
            frozenset().union(*(each.given for each in several)), frozenset().union(*(each.dropped for each in several))
        )


@dataclass(frozen=True)
class Buffers:
    """What gradients are added up in, where compute leaves them: constant in size, whatever the number of ranks."""

    dtype: torch.dtype
    """Of gradients."""
    header_bytes: int
    fills: tuple[torch.Tensor, torch.Tensor]
    """uint8, for the whole gradient of the widest unit: one that backward fills, one that is reduced."""
    landing: torch.Tensor
    """As large: what arrives from other ranks."""
    sums: torch.Tensor
    """fp32 [1 or, with replicas, one more than those, elements of a piece]: the sum over a replica's ranks, and those
    of all replicas."""

    def rows(self, buffer: torch.Tensor, spec: UnitSpec, group: int) -> torch.Tensor:
        """A buffer as what a rank sends each of `group` ones of an equal slice of a unit: header, gradient. uint8,
        shape [group, bytes]."""
        row = self.header_bytes + slice_elements(spec.trainable_numel, group) * self.dtype.itemsize
        return buffer[: group * row].view(group, row)

    def values(self, row: torch.Tensor) -> torch.Tensor:
        """The gradient in a row, shape [elements of a slice]."""
        return row[self.header_bytes :].view(self.dtype)
