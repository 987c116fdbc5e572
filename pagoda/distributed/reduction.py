"""The reduction: the mean of ranks' gradients of a unit, in slices, by all-to-alls and sums in the order of ranks."""

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pagoda.distributed.shards import Shards
from pagoda.distributed.transport import Group
from pagoda.optim.means import mean_into, sum_into
from pagoda.plan.layout import GRAD
from pagoda.plan.slices import Span, slice_elements
from pagoda.plan.units import ALIGN_ELEMENTS, UnitSpec

GIVEN, DROPPED, NOT_FINITE = 1, 2, 4
"""Bits of a flag, which a header has of each parameter: a rank has a gradient of it; the user has dropped earlier ones
since; it is NaN or infinite, where its update may begin before `step()`."""
Flags = Any
"""uint8 [parameters], of numpy: a flag of each."""


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


@dataclass(frozen=True, slots=True)
class Message:
    """What every rank sends the one at a place in one all-to-all."""

    span: Span
    """Elements of the unit, a part of that rank's slice."""
    at: int
    """Its first byte among the messages to all places, which lie one after another."""
    values_at: int
    """The first one behind the header, which messages of the first all-to-all have."""
    end: int

    def values(self, messages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The elements, of messages to all places."""
        return messages[self.values_at : self.values_at + len(self.span) * dtype.itemsize].view(dtype)


@dataclass(frozen=True, slots=True)
class Mean:
    """A part of the mean of all ranks' gradients."""

    span: Span
    """Elements of the unit."""
    values: torch.Tensor
    mine: bool
    """Whether they are of this rank's slice."""


class Reduction:
    """Adds up gradients of units over the ranks that share each.

    A rank's messages to all places lie one after another in a buffer, so an all-to-all takes them as they are. A
    header goes before the elements of each, so that a rank that has no gradient takes part all the same: its messages
    are zeros, and nobody reads more of them than the flags. Equal slices go in one all-to-all; of slices that differ,
    no more goes at a time than finds room where messages arrive. Each rank adds up what it gets in the order of ranks
    (`optim.means` states the rounding). With replicas, a replica's ranks are added up first, then the replicas' sums,
    in fp32 throughout.
    """

    def __init__(
        self, shards: Shards, sharing: dict[bool, Group], copying: Group, buffers: Buffers, divisor: int
    ) -> None:
        """`sharing` are the ranks that share units of experts, and others; `copying` those that have the same slices as
        this one, one a replica. Sums are divided by `divisor`."""
        self._shards = shards
        self._sharing = sharing
        self._copying = copying
        self._buffers = buffers
        self._divisor = divisor
        self._messages: dict[int, list[list[Message]]] = {}
        """unit -> of each all-to-all, the message to each place."""
        self._nothing: torch.Tensor | None = None

    def messages(self, spec: UnitSpec) -> list[list[Message]]:
        """Of each all-to-all, the message to each place; those of all lie one after another."""
        known = self._messages.get(spec.index)
        if known is None:
            known = self._messages[spec.index] = [*self._lay_out(spec)]
        return known

    def reduce(self, spec: UnitSpec, mine: torch.Tensor | None, flags: Flags) -> tuple[Flags, Iterator[Mean]]:
        """What all ranks together have of a unit's gradient, and the mean, as far as it belongs in this rank's extent.

        `mine` has this rank's messages without their headers; None where it has no gradient. The iterator must be
        exhausted: ranks communicate in it.
        """
        header, count = self._buffers.header_bytes, len(flags)
        first = self.messages(spec)[0]
        if mine is None:
            mine = self._zeros()
        else:
            for message in first:
                mine[message.at : message.at + count] = torch.from_numpy(flags)
        arriving = self._exchange(spec, first, mine)
        by_place = arriving[:, :count].cpu().numpy()
        everyone = np.bitwise_or.reduce(by_place)
        if len(self._shards.copies(spec)) > 1:
            headers = self._copies(header)
            headers[self._copying.place, :count] = torch.from_numpy(everyone)
            self._gather_rows(self._copying, headers)
            everyone = np.bitwise_or.reduce(headers[:, :count].cpu().numpy())
        return everyone, self._means(spec, mine, by_place & GIVEN)

    def _lay_out(self, spec: UnitSpec) -> Iterator[list[Message]]:
        slices, itemsize = self._shards.trained_slices(spec), self._buffers.dtype.itemsize
        header, places = self._buffers.header_bytes, len(slices)
        room = (self._buffers.landing.numel() // places - header) // itemsize // ALIGN_ELEMENTS * ALIGN_ELEMENTS
        padded = 0 if self._shards.differ else slice_elements(spec.trainable_numel, places)
        at = 0
        for start in range(0, max(1, *map(len, slices)), max(room, padded)):
            messages = []
            for of_place in slices:
                first = min(of_place.start + start, of_place.stop)
                span = Span(first, min(first + max(room, padded), of_place.stop))
                values_at = at + (header if start == 0 else 0)
                messages.append(Message(span, at, values_at, values_at + (padded or len(span)) * itemsize))
                at = messages[-1].end
            yield messages

    def _exchange(self, spec: UnitSpec, messages: Sequence[Message], given: torch.Tensor) -> torch.Tensor:
        """One all-to-all: what the rank at each place has for this one, uint8 [places, bytes]."""
        group = self._group(spec)
        sizes = [message.end - message.at for message in messages]
        nbytes = sizes[group.place]
        arriving = self._buffers.landing[: len(messages) * nbytes].view(len(messages), nbytes)
        group.exchange(arriving, given[messages[0].at : messages[-1].end], sizes)
        return arriving

    def _means(self, spec: UnitSpec, given: torch.Tensor, by_place: Flags) -> Iterator[Mean]:
        place, dtype, landing = self._group(spec).place, self._buffers.dtype, self._buffers.landing
        for number, messages in enumerate(self.messages(spec)):
            if number > 0:
                self._exchange(spec, messages, given)
            mine = messages[place]
            nbytes, header, size = len(mine.span) * dtype.itemsize, mine.values_at - mine.at, mine.end - mine.at
            rows = [landing[at * size + header :][:nbytes].view(dtype) for at in range(len(messages))]
            self._add_up(spec, mine.span, rows, by_place, rows[place])
            if self._shards.is_cut(spec, GRAD):
                yield Mean(mine.span, rows[place], mine=True)
                continue
            base, end = messages[0].at, messages[-1].end
            _move(landing[mine.values_at - base :][:nbytes], rows[place].view(torch.uint8))
            self._group(spec).gather(landing[: end - base], [(m.at - base, m.end - base) for m in messages])
            for at, message in enumerate(messages):
                values = landing[message.values_at - base :][: len(message.span) * dtype.itemsize].view(dtype)
                yield Mean(message.span, values, mine=at == place)

    def _add_up(
        self, spec: UnitSpec, span: Span, rows: Sequence[torch.Tensor], by_place: Flags, mean: torch.Tensor
    ) -> None:
        """Make `mean` that of a span of a unit; `rows` are those of the ranks at each place."""
        sums, group = self._buffers.sums, self._copying
        for start in range(0, len(span), sums.shape[1]):
            stop = min(start + sums.shape[1], len(span))
            total = sums[0, : stop - start]
            for first, last, places in _ranges(spec, by_place, span.start + start, span.start + stop):
                at = slice(first - span.start, last - span.start)
                sum_into(total[at.start - start : at.stop - start], [rows[place][at] for place in places])
            if len(self._shards.copies(spec)) > 1:
                others = self._copies(total.nbytes).view(torch.float32)
                others[group.place].copy_(total)
                self._gather_rows(group, others)
                sum_into(total, list(others))
            mean_into(mean[start:stop], total, self._divisor)
        if mean.is_cuda:  # other lanes and streams may read a mean from now on
            torch.cuda.current_stream(mean.device).synchronize()

    def _group(self, spec: UnitSpec) -> Group:
        return self._sharing[self._shards.is_expert(spec)]

    def _copies(self, nbytes: int) -> torch.Tensor:
        """Room for something of every replica, uint8 [replicas, bytes]."""
        rows = len(self._copying.ranks)
        return self._buffers.sums[1:].view(-1).view(torch.uint8)[: rows * nbytes].view(rows, nbytes)

    def _gather_rows(self, group: Group, rows: torch.Tensor) -> None:
        """Complete `rows`, of which each rank has the one at its place."""
        each = rows.shape[1]
        group.gather(rows.view(-1), [(place * each, (place + 1) * each) for place in range(len(rows))])

    def _zeros(self) -> torch.Tensor:
        """Messages of a rank that has no gradient. In RAM they take none, as nobody writes to them."""
        landing = self._buffers.landing
        if landing.is_cuda:
            return torch.zeros_like(landing)
        if self._nothing is None:
            self._nothing = torch.frombuffer(mmap.mmap(-1, landing.numel()), dtype=torch.uint8)
        return self._nothing


def _ranges(spec: UnitSpec, by_place: Flags, start: int, stop: int) -> Iterator[tuple[int, int, Sequence[int]]]:
    """[start, stop) of a unit in ranges of adjoining parameters that the ranks at the same places have a gradient of:
    (first element, last one's end, places)."""
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
    """Copy bytes to where they may overlap."""
    if source.is_cuda:
        target.copy_(source.clone())
    elif target.data_ptr() != source.data_ptr():
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
