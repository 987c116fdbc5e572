"""Rows: what a rank sends another one of a gradient, behind a header that says which parameters it is of."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from pagoda.plan.collective import NUMBER_BYTES, reduce_buffers
from pagoda.plan.slices import slice_elements
from pagoda.plan.units import UnitSpec
from pagoda.runtime.store import Store


@dataclass(frozen=True)
class Flags:
    """Which parameters of a unit a rank, or some ranks together, have a gradient of."""

    given: frozenset[int] = frozenset()
    """Their slots."""
    dropped: frozenset[int] = frozenset()
    """Those of them whose earlier gradients the user has dropped since."""
    bad: int | None = None
    """The first one whose gradient is NaN or infinite, where its update may begin before `step()`."""

    def write(self, header: torch.Tensor) -> None:
        """Into a header, uint8: a bit a slot, the first half for `given`, and then a number."""
        half = (header.numel() - NUMBER_BYTES) // 2
        bits = [0, 0]
        for which, slots in enumerate((self.given, self.dropped)):
            for slot in slots:
                bits[which] |= 1 << slot
        data = b"".join(number.to_bytes(half, "little") for number in bits)
        data += (0 if self.bad is None else self.bad + 1).to_bytes(NUMBER_BYTES, "little")
        header.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    @classmethod
    def read(cls, header: torch.Tensor) -> "Flags":
        """What `write` has written."""
        data = header.cpu().numpy().tobytes()
        half = (len(data) - NUMBER_BYTES) // 2
        parts = data[:half], data[half:-NUMBER_BYTES], data[-NUMBER_BYTES:]
        *several, bad = (int.from_bytes(part, "little") for part in parts)
        given, dropped = (frozenset(bit for bit in range(bits.bit_length()) if bits >> bit & 1) for bits in several)
        return cls(given, dropped, bad - 1 if bad else None)

    @classmethod
    def of_all(cls, flags: Iterable["Flags"]) -> "Flags":
        """What some ranks have together."""
        several = [*flags]
        given, dropped = ([getattr(each, name) for each in several] for name in ("given", "dropped"))
        bad = min((each.bad for each in several if each.bad is not None), default=None)
        return cls(frozenset().union(*given), frozenset().union(*dropped), bad)


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

    @classmethod
    def open(cls, store: Store, dtype: torch.dtype) -> "Buffers":
        """Take what the plan has for gradients of `dtype`."""
        tier, planned = store.device or store.host, reduce_buffers(store.plan.layout)
        assert planned is not None
        sizes, page = (planned.whole_pages, planned.whole_pages, planned.landing_pages), store.plan.page_bytes
        first, second, landing = (tier.take(pages).tensor(torch.uint8, pages * page) for pages in sizes)
        rest, shape = tier.take(planned.pages - sum(sizes)), (planned.rows, planned.piece)
        sums = rest.tensor(torch.float32, planned.rows * planned.piece).view(shape)
        return cls(dtype, planned.header_bytes, (first, second), landing, sums)

    def rows(self, buffer: torch.Tensor, spec: UnitSpec, group: int) -> torch.Tensor:
        """A buffer as what a rank sends each of `group` ones of an equal slice of a unit: header, gradient. uint8,
        shape [group, bytes]."""
        row = self.header_bytes + slice_elements(spec.trainable_numel, group) * self.dtype.itemsize
        return buffer[: group * row].view(group, row)

    def values(self, row: torch.Tensor) -> torch.Tensor:
        """The gradient in a row, shape [elements of a slice]."""
        return row[self.header_bytes :].view(self.dtype)
