"""The reduction: the mean of ranks' gradients of a unit, in slices, with all-to-alls and sums in the order of ranks."""

import ctypes
import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from pagoda.memory.region import Region
from pagoda.mesh.shards import Shards
from pagoda.plan.collective import reduce_buffers
from pagoda.plan.layout import GRAD, Layout
from pagoda.plan.ranks import Ranks
from pagoda.plan.slices import Span, slice_elements
from pagoda.plan.units import ALIGN_ELEMENTS, UnitSpec
from pagoda.ranks.transport import Group

GIVEN, DROPPED, NOT_FINITE = 1, 2, 4
"""Bits of a parameter's flag in a header: the rank has a gradient of it; the user has dropped earlier gradients of it;
the gradient is NaN or infinite (set only if the update may begin before `step()`)."""
Flags = Any
"""numpy uint8 [parameters]."""
_BLOCK = 1 << 15
"""Number of elements that a CPU adds up at a time."""


@dataclass(frozen=True)
class Buffers:
    """Memory in which gradients are summed, in the tier where compute leaves them. Its size does not depend on the
    number of ranks."""

    dtypes: Mapping[int, torch.dtype]
    """Unit -> the dtype of its gradient."""
    header_bytes: int
    fills: tuple[torch.Tensor, torch.Tensor]
    """Two uint8 buffers, each for the whole gradient of the largest unit. Backward fills one while the other is
    reduced."""
    landing: torch.Tensor
    """A uint8 buffer of the same size for messages from other ranks."""
    sums: torch.Tensor
    """fp32 [rows, elements of a piece]. The first row is the sum over a replica's ranks. With several replicas, one
    more row for each holds the replicas' sums."""

    @classmethod
    def open(cls, tier: Region, layout: Layout, dtypes: Mapping[int, torch.dtype]) -> "Buffers":
        """Take the planned buffers for gradients of `dtypes` from the tier where compute leaves gradients."""
        planned, page = reduce_buffers(layout), layout.page_bytes
        sizes = (planned.whole_pages, planned.whole_pages, planned.landing_pages)
        first, second, landing = (tier.take(pages).tensor(torch.uint8, pages * page) for pages in sizes)
        rest, shape = tier.take(planned.pages - sum(sizes)), (planned.rows, planned.piece)
        sums = rest.tensor(torch.float32, planned.rows * planned.piece).view(shape)
        return cls(dtypes, planned.header_bytes, (first, second), landing, sums)


@dataclass(frozen=True, slots=True)
class AllToAll:
    """The layout of one all-to-all: a rank's messages to all places, one after another in a buffer."""

    at: int
    """The first byte of the messages in the buffer."""
    spans: list[Span]
    """The elements of the unit in each message. They are a part of the slice of the rank at that place."""
    starts: list[int]
    """The first byte of each message and the end of the last one, relative to `at`."""
    header_bytes: int
    """The number of bytes before the elements of each message."""

    def messages(self, buffer: torch.Tensor) -> torch.Tensor:
        """All messages."""
        return buffer[self.at : self.at + self.starts[-1]]

    def values(self, place: int, messages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The elements of the message to a place."""
        return messages[self.starts[place] + self.header_bytes :].view(dtype)[: len(self.spans[place])]


Mean = tuple[Span, torch.Tensor, bool, Flags]
"""A span of a unit, the mean of ranks' gradients of it, whether the span is in this rank's slice, and the flags of the
parameters of which these ranks have gradients. With ordered sums, a mean for each rank: its gradient, divided."""


class Reduction:
    """Sums gradients of units over the ranks that share each unit.

    A rank's messages to all places are one after another in a buffer, so an all-to-all can send them without a copy.
    Each message has a header before its elements. A rank without a gradient takes part too. Its messages are zeros, of
    which others read only the flags. Slices of equal size need one all-to-all. Slices of different sizes need several,
    each as large as the room for arriving messages allows. Each rank sums the messages that it receives in the order of
    ranks. With replicas, the sums over a replica's ranks come first, and then the sum over replicas, all in fp32. Each
    sum is rounded once. The last one is divided by the number of all ranks, and rounded once to the gradient's dtype
    (to nearest, ties to even). So the mean is a function of the gradients and of the order of ranks alone.

    *Ordered sums*: the gradients of the ranks stay apart. Each is divided by the number of ranks, and they follow one
    another, as the micro-batches of one rank do.
    """

    def __init__(self, shards: Shards, groups: Mapping[tuple[int, ...], Group], buffers: Buffers, ranks: Ranks) -> None:
        """`groups` maps tuples of ranks to groups: the ranks that have the slices of a unit, and the ranks that have
        the same slices, one in each replica."""
        self._shards = shards
        self._groups = groups
        self._buffers = buffers
        self._divisor = ranks.data_parallel
        self._ordered = ranks.ordered_sums
        self._laid_out: dict[int, list[AllToAll]] = {}
        self._nothing: torch.Tensor | None = None

    def all_to_alls(self, spec: UnitSpec) -> list[AllToAll]:
        """The all-to-alls of a unit's gradient, which are one after another in a buffer."""
        known = self._laid_out.get(spec.index)
        if known is not None:
            return known
        slices, itemsize = self._shards.trained_slices(spec), self._buffers.dtypes[spec.index].itemsize
        header, places, at = self._buffers.header_bytes, len(slices), 0
        room = (self._buffers.landing.numel() // places - header) // itemsize // ALIGN_ELEMENTS * ALIGN_ELEMENTS
        padded = 0 if self._shards.slices.differ else slice_elements(spec.trainable_numel, places)
        padded = padded if len(slices[0]) <= padded else 0  # whole pages
        found = self._laid_out[spec.index] = []
        for start in range(0, max(1, *map(len, slices)), room):
            spans = [_part(span, start, start + room) for span in slices]
            starts = [*accumulate((header + (padded or len(span)) * itemsize for span in spans), initial=0)]
            found.append(AllToAll(at, spans, starts, header))
            header, at = 0, at + starts[-1]
        return found

    def reduce(self, spec: UnitSpec, mine: torch.Tensor | None, flags: Flags) -> tuple[Flags, Iterator[Mean]]:
        """The combined flags of all ranks, and the means of a unit's gradient that belong in this rank's extent.

        `mine` is a buffer with this rank's messages, in which this method fills in the flags. None if the rank has no
        gradient. The caller must exhaust the iterator, because ranks communicate in it.
        """
        count, first = len(flags), self.all_to_alls(spec)[0]
        if mine is None:
            mine = self._zeros()
        else:
            for start in first.starts[:-1]:
                mine[start : start + count] = torch.from_numpy(flags)
        by_place = self._exchange(spec, first, mine)[:, :count].cpu().numpy()
        everyone = np.bitwise_or.reduce(by_place)
        if len(self._shards.copies) > 1:
            everyone = np.bitwise_or.reduce(self._of_copies(torch.from_numpy(everyone)).cpu().numpy())
        return everyone, self._means(spec, mine, by_place & GIVEN, everyone)

    def _exchange(self, spec: UnitSpec, each: AllToAll, given: torch.Tensor) -> torch.Tensor:
        """The messages to this rank, uint8 [places, bytes]."""
        group = self._group(spec)
        sizes = [stop - start for start, stop in pairwise(each.starts)]
        mine = sizes[group.place]
        arriving = self._buffers.landing[: len(sizes) * mine].view(len(sizes), mine)
        group.exchange(arriving, each.messages(given), sizes)
        return arriving

    def _means(self, spec: UnitSpec, given: torch.Tensor, by_place: Flags, everyone: Flags) -> Iterator[Mean]:
        group, dtype, landing = self._group(spec), self._buffers.dtypes[spec.index], self._buffers.landing
        for number, each in enumerate(self.all_to_alls(spec)):
            if number > 0:
                self._exchange(spec, each, given)
            span, bounds = each.spans[group.place], [*pairwise(each.starts)]
            size = bounds[group.place][1] - bounds[group.place][0]
            rows = [landing[at * size + each.header_bytes :].view(dtype)[: len(span)] for at in range(len(bounds))]
            if self._ordered:
                for row in rows:
                    mean_into(row, row, self._divisor)
                _wait(landing)
                for row, of_place in zip(rows, by_place, strict=True):
                    yield span, row, True, of_place
                continue
            self._add_up(spec, span, rows, by_place, rows[group.place])
            if self._shards.is_sliced(spec, GRAD):
                _wait(landing)
                yield span, rows[group.place], True, everyone
                continue
            _move(each.values(group.place, landing, dtype), rows[group.place])
            group.gather(landing[: each.starts[-1]], bounds)
            _wait(landing)
            for place, of_place in enumerate(each.spans):
                yield of_place, each.values(place, landing, dtype), place == group.place, everyone

    def _add_up(
        self, spec: UnitSpec, span: Span, rows: Sequence[torch.Tensor], by_place: Flags, mean: torch.Tensor
    ) -> None:
        """Compute the `mean` of a span of a unit. `rows` are the gradients of the ranks at each place."""
        sums = self._buffers.sums
        for start in range(0, len(span), sums.shape[1]):
            stop = min(start + sums.shape[1], len(span))
            total = sums[0, : stop - start]
            for first, last, places in _ranges(spec, by_place, span.start + start, span.start + stop):
                at = slice(first - span.start, last - span.start)
                sum_into(total[at.start - start : at.stop - start], [rows[place][at] for place in places])
            if len(self._shards.copies) > 1:
                sum_into(total, list(self._of_copies(total)))
            mean_into(mean[start:stop], total, self._divisor)

    def _group(self, spec: UnitSpec) -> Group:
        return self._groups[self._shards.sharers(spec)]

    def _of_copies(self, mine: torch.Tensor) -> torch.Tensor:
        """The values of `mine` on all ranks that have the same slice, [replicas, elements of `mine`]."""
        group, count = self._groups[self._shards.copies], mine.numel()
        room = self._buffers.sums[1:].view(-1).view(mine.dtype)[: len(group.ranks) * count]
        found = room.view(len(group.ranks), count)
        found[group.place].copy_(mine)
        group.gather(room, [(place * count, (place + 1) * count) for place in range(len(group.ranks))])
        return found

    def _zeros(self) -> torch.Tensor:
        """The messages of a rank without a gradient. They are never written to, so in RAM they take no memory."""
        landing = self._buffers.landing
        if landing.is_cuda:
            return torch.zeros_like(landing)
        if self._nothing is None:
            self._nothing = torch.frombuffer(mmap.mmap(-1, landing.numel()), dtype=torch.uint8)
        return self._nothing


def sum_into(total: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Set `total`, fp32 [n], to the sum of `parts`, each [n] in one dtype, in their order. Zeros if there are none."""
    for block, *blocks in zip(_blocks(total), *map(_blocks, parts), strict=True):
        block.copy_(blocks[0]) if blocks else block.zero_()
        for each in blocks[1:]:
            block += each


def mean_into(mean: torch.Tensor, total: torch.Tensor, divisor: int) -> None:
    """Set `mean`, [n] in any gradient dtype, to `total`, [n], divided by a number of ranks. They may be one tensor."""
    # The divisor is a tensor: with a number, torch multiplies by its inverse on CUDA.
    by = torch.full_like(total[:1], divisor)
    for block, sums in zip(_blocks(mean), _blocks(total), strict=True):
        block.copy_(sums / by)


def _blocks(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """The tensor, on a CPU in blocks that stay in a core's cache, and which torch does not divide over threads."""
    return [tensor] if tensor.is_cuda else tensor.split(_BLOCK)  # type: ignore[no-untyped-call]


def _wait(means: torch.Tensor) -> None:
    """Wait until other lanes and streams can read what this lane has written."""
    if means.is_cuda:
        torch.cuda.current_stream(means.device).synchronize()


def _part(span: Span, start: int, stop: int) -> Span:
    """Elements [start, stop) of a span, counted from its own start."""
    return Span(min(span.start + start, span.stop), min(span.start + stop, span.stop))


def _ranges(spec: UnitSpec, by_place: Flags, start: int, stop: int) -> Iterator[tuple[int, int, Sequence[int]]]:
    """Split [start, stop) of a unit into ranges whose parameters have gradients on the same ranks. Yields (first
    element, end, places of these ranks)."""
    first, before = start, None
    for slot, placed in enumerate(spec.slots):
        if placed.offset >= stop or not placed.param.trainable:
            break
        places = by_place[:, slot].nonzero()[0].tolist()
        if placed.offset > first and places != before and before is not None:
            yield first, placed.offset, before
            first = placed.offset
        before = places
    if before is not None and first < stop:
        yield first, stop, before


def _move(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy bytes between ranges that may overlap."""
    if source.is_cuda:
        target.copy_(source.clone())
    elif target.data_ptr() != source.data_ptr():
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
