"""Reducing: gradients of a unit from autograd, over a buffer of the unit's size, to slices of their mean over ranks."""

import ctypes
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from pagoda.distributed.agreement import Call, CollectiveKind
from pagoda.distributed.groups import Group
from pagoda.distributed.world import rank_timeout_s
from pagoda.errors import BudgetError, RankError
from pagoda.optim.means import mean_into, sum_into, warm_up
from pagoda.plan.layout import GRAD
from pagoda.plan.ops import COLLECTIVE
from pagoda.plan.ranks import ring_bytes
from pagoda.plan.slices import Span
from pagoda.plan.units import UnitSpec
from pagoda.runtime.collective import Collectives
from pagoda.runtime.device import PAST, Device, Event
from pagoda.runtime.driver import Driver
from pagoda.runtime.gradients import Gradients, UnitGradient
from pagoda.runtime.lanes import Handle, Lane
from pagoda.runtime.rows import Buffers, Flags
from pagoda.runtime.unit import LiveUnit


@dataclass
class _Filling:
    """A buffer that one unit's gradients of one backward are going into."""

    record: UnitGradient
    parts: Sequence[tuple[Span, torch.Tensor]]
    """Elements of the unit, and where they go."""
    buffer: torch.Tensor
    """All of it, uint8."""
    arrived: set[int] = field(default_factory=set)
    dropped: set[int] = field(default_factory=set)
    copies: list[Handle] = field(default_factory=list)
    filled: Event = PAST


_Mean = tuple[Span, torch.Tensor, bool]
"""Elements of a unit, the mean of ranks' gradients of them, and whether they are this rank's slice."""


class Reducer:
    """Takes gradients from autograd, and gives each rank the mean of its slice (its extents in stage 1: of all).

    A gradient leaves autograd for the buffer; once each of the unit's parameters has one, or another unit's come, the
    buffer is reduced: each rank sends every sharer its slice, behind a header that says which parameters it has a
    gradient of, adds up what it gets in the order of ranks (`optim.means` states the rounding), and adds the mean to
    its extent. Ranks whose backward has not reached a parameter count as zero; they take part all the same, in what
    others ask for too. Slices of whole parameters, which have sizes of their own, go one after another.

    With replicas, a replica's ranks are added up first, then the replicas' sums, in fp32 throughout.
    """

    def __init__(
        self,
        collectives: Collectives,
        gradients: Gradients,
        units: Sequence[LiveUnit],
        buffers: Buffers,
        device: Device,
        copies: Lane,
        driver: Driver,
        stalled: Callable[[str, float], None],
        early: bool,
    ) -> None:
        """`early` says that units are updated under backward."""
        self._driver = driver
        self.bring: Callable[[UnitGradient, bool], None]
        """Has a gradient brought to its record's buffer; set by whoever asks for updates."""
        self._collectives = collectives
        self._shards = collectives.shards
        self._ranks = collectives.mesh.ranks
        self._gradients = gradients
        self._units = units
        self._buffers = buffers
        self._device = device
        self._copies = copies
        self._stalled = stalled
        self._early = early
        self._filling: _Filling | None = None
        self._uses: list[Handle | None] = [None, None]
        """What last reduced each of the two buffers."""
        self._next = 0
        self._dtype = buffers.dtype
        self._equal = not self._shards.differ
        warm_up(self._dtype)
        collectives.serve(CollectiveKind.REDUCE, self._take_part)

    def add(self, unit: LiveUnit, step: int, slot: int, grad: torch.Tensor, accumulate: bool) -> UnitGradient:
        """Take a parameter's gradient; `accumulate` where earlier ones of this step have not been dropped."""
        if self._filling is not None and (self._filling.record.unit is not unit or slot in self._filling.arrived):
            self.flush(last=False)
        filling = self._filling = self._filling or self._open(unit, step)
        record = filling.record
        if record.arrivals[slot] and not accumulate:
            filling.dropped.add(slot)
        self._gradients.count(record, slot, accumulate)
        filling.arrived.add(slot)
        placed = unit.spec.slots[slot]
        grad = grad.to(self._dtype).contiguous().view(-1)
        copies = []
        """(target, source)"""
        for span, values in filling.parts:
            part = span.within(placed.offset, placed.offset + placed.param.numel)
            if part is not None:
                into = values[part.start - span.start : part.stop - span.start]
                copies.append((into, grad[part.start - placed.offset : part.stop - placed.offset]))
        if grad.is_cuda:
            for into, values in copies:
                into.copy_(values)
            filling.filled = self._device.fence()
        else:
            label = f"offload {unit.spec.name}"
            filling.copies.append(self._copies.submit(lambda: _copy(copies), (), grad.nbytes, label))
        return record

    def flush(self, last: bool) -> None:
        """Reduce what has arrived since the last time, once its record has a buffer; `last` as the scheduler has it."""
        filling, self._filling = self._filling, None
        if filling is None:
            return
        record = filling.record
        call = Call(CollectiveKind.REDUCE, record.unit.index, record.unit.version)
        spec = record.unit.spec

        def work(_: bool) -> None:
            filling.filled.synchronize()
            flags = Flags(frozenset(filling.arrived), frozenset(filling.dropped), self._first_bad(filling))
            self._reduce(spec, filling.buffer, flags, record)

        sent = ring_bytes(spec.trainable_numel * self._dtype.itemsize, len(self._shards.sharers(spec)))
        room = Handle(COLLECTIVE)
        """Ends when the record has a buffer. When that is depends on what else goes on here, but the turn does not."""
        handle = self._collectives.submit(call, work, (*filling.copies, room), sent, f"reduce {spec.name}")
        self._uses[self._next ^ 1] = handle

        def offload(_: UnitGradient) -> Handle:
            room.finish()
            return handle

        record.waiting.append(offload)
        try:
            self.bring(record, last)
        except BaseException as error:
            if not room.done:
                room.finish(error)
            raise

    @property
    def is_empty(self) -> bool:
        """Whether nothing has arrived that has not been reduced."""
        return self._filling is None

    def drop(self) -> None:
        """Forget what has not been reduced yet."""
        filling, self._filling = self._filling, None
        if filling is not None:
            for copy in filling.copies:
                copy.wait()

    def _open(self, unit: LiveUnit, step: int) -> _Filling:
        record = self._gradients.open(unit, step)
        use = self._uses[self._next]
        if use is not None and not use.done:
            start = time.perf_counter()
            use.wait()
            self._stalled(COLLECTIVE, time.perf_counter() - start)
        buffer = self._buffers.fills[self._next]
        self._next ^= 1
        spec = unit.spec
        if self._equal:
            rows = self._buffers.rows(buffer, spec, len(self._shards.sharers(spec)))
            parts = [*zip(self._shards.trained_slices(spec), map(self._buffers.values, rows), strict=True)]
        else:
            parts = [(Span(0, spec.trainable_numel), buffer.view(self._dtype))]
        return _Filling(record, parts, buffer)

    def _take_part(self, unit: LiveUnit, version: int | None) -> None:
        """Take part in a reduction that this rank has no gradient for, or has none yet."""
        if version is None:
            self._bad_of_parts(None)
            return
        whole = torch.empty_like(self._buffers.landing)  # of which nobody reads anything
        if self._collectives.failed:
            self._reduce(unit.spec, whole, Flags(), None)
            return
        if unit.version != version:
            raise RankError(
                f"Another rank has a gradient of {unit.spec.name!r} for a step that rank {self._shards.rank} has "
                "updated it for already. Run the same number of backward passes on every rank, or leave out "
                "wrap(accumulation_steps=...), so that updates wait for optimizer.step()."
            )
        record = self._gradients.open(unit, self._driver.scheduler.steps)
        ended = Handle(COLLECTIVE)
        opened = threading.Event()

        def offload(_: UnitGradient) -> Handle:
            opened.set()
            return ended

        record.waiting.append(offload)
        self._driver.tell(self._driver.scheduler.gradient, unit.index, record.complete, False)
        # It may wait for what is being read or written, but what frees a buffer may be this lane's to do.
        if not opened.wait(rank_timeout_s()):
            raise BudgetError(self._gradients.exhausted(unit))
        try:
            self._reduce(unit.spec, whole, Flags(), record)
        finally:
            ended.finish()

    def _reduce(self, spec: UnitSpec, whole: torch.Tensor, flags: Flags, record: UnitGradient | None) -> None:
        """On the collective lane: the mean of every rank's gradient, to the record if there is one. `whole` is this
        rank's buffer, and `flags` say what it has of a gradient."""
        way = self._equal_slices if self._equal else self._whole_parameters
        everyone, means = way(spec, whole, flags)
        if record is None:
            for _ in means:
                pass
            return
        sums: dict[int, list[float]] = {}
        for span, values, mine in means:
            for slot in everyone.given:
                placed = spec.slots[slot]
                part = span.within(placed.offset, placed.offset + placed.param.numel)
                if part is None:
                    continue
                accumulate = slot in record.present and slot not in everyone.dropped
                elements = values[part.start - span.start : part.stop - span.start]
                square_sum = self._gradients.deliver(record, part.start, elements, accumulate)
                if mine:
                    sums.setdefault(slot, []).append(square_sum)
        for slot in everyone.given:
            record.square_sums[slot] = math.fsum(sums.get(slot, ()))
            record.present.add(slot)
        record.bad_elsewhere = self._bad_of_parts(everyone.bad)

    def _first_bad(self, filling: _Filling) -> int | None:
        """The first slot of what this rank gives that is NaN or infinite, where its update may begin before `step()`:
        what other ranks have of it lies in their slices only."""
        if not self._early:
            return None
        for slot in sorted(filling.arrived):
            placed = filling.record.unit.spec.slots[slot]
            for span, values in filling.parts:
                part = span.within(placed.offset, placed.offset + placed.param.numel)
                if part is not None:
                    largest = torch.linalg.vector_norm(
                        values[part.start - span.start : part.stop - span.start], math.inf
                    )
                    if not math.isfinite(largest):
                        return slot
        return None

    def _bad_of_parts(self, mine: int | None) -> int | None:
        """The first such slot of any part of a parameter, where tensor-parallel ranks have one each."""
        if not self._early or self._ranks.tensor_parallel == 1:
            return mine
        found = self._collectives.transport.announce([-1 if mine is None else mine])
        return min((slot for (slot,) in found if slot >= 0), default=None)

    def _equal_slices(self, spec: UnitSpec, whole: torch.Tensor, flags: Flags) -> tuple[Flags, Iterator[_Mean]]:
        """Every rank's flags, and the means that belong in this rank's extent: all slices go at once."""
        group, slices = self._collectives.sharing(spec), self._shards.trained_slices(spec)
        given, arriving = (self._buffers.rows(each, spec, len(slices)) for each in (whole, self._buffers.landing))
        header = self._buffers.header_bytes
        flags.write(given[0, :header])
        given[1:, :header] = given[0, :header]
        group.exchange(arriving, given)
        by_place = [Flags.read(row[:header]) for row in arriving]
        everyone = self._of_replicas(spec, Flags.of_all(by_place))
        rows = [self._buffers.values(row) for row in arriving]
        self._add_up(spec, slices[group.place], rows, by_place)
        if not self._shards.is_cut(spec, GRAD):
            group.gather_rows(arriving)
            return everyone, ((span, rows[p], p == group.place) for p, span in enumerate(slices))
        return everyone, iter([(slices[group.place], rows[group.place], True)])

    def _whole_parameters(self, spec: UnitSpec, whole: torch.Tensor, flags: Flags) -> tuple[Flags, Iterator[_Mean]]:
        """The same of slices of sizes of their own: piece by piece, each goes to whom it belongs."""
        group, slices = self._collectives.sharing(spec), self._shards.trained_slices(spec)
        headers = self._buffers.landing[: len(slices) * self._buffers.header_bytes].view(len(slices), -1)
        flags.write(headers[group.place])
        group.gather_rows(headers)
        by_place = [Flags.read(row) for row in headers]
        return self._of_replicas(spec, Flags.of_all(by_place)), self._pieces(spec, group, slices, whole, by_place)

    def _pieces(
        self, spec: UnitSpec, group: Group, slices: Sequence[Span], whole: torch.Tensor, by_place: Sequence[Flags]
    ) -> Iterator[_Mean]:
        size = self._dtype.itemsize
        most = self._buffers.landing.numel() // len(slices) // size
        for place, span in enumerate(slices):
            for start in range(span.start, span.stop, most):
                piece = Span(start, min(start + most, span.stop))
                landing = self._buffers.landing[: len(slices) * len(piece) * size].view(len(slices), -1)
                group.collect(place, whole[piece.start * size : piece.stop * size], landing)
                rows = [row.view(self._dtype) for row in landing]
                if place == group.place:
                    self._add_up(spec, piece, rows, by_place)
                if not self._shards.is_cut(spec, GRAD):
                    group.hand_out(place, landing[place])
                if place == group.place or not self._shards.is_cut(spec, GRAD):
                    yield piece, rows[place], place == group.place

    def _of_replicas(self, spec: UnitSpec, mine: Flags) -> Flags:
        """The flags of all replicas' ranks together."""
        copies = self._shards.copies(spec)
        if len(copies) == 1:
            return mine
        header, group = self._buffers.header_bytes, self._collectives.copying
        headers = self._buffers.sums.view(-1).view(torch.uint8)[: len(copies) * header].view(len(copies), header)
        mine.write(headers[group.place])
        group.gather_rows(headers)
        return Flags.of_all(map(Flags.read, headers))

    def _add_up(self, spec: UnitSpec, span: Span, rows: Sequence[torch.Tensor], by_place: Sequence[Flags]) -> None:
        """Put the mean of a span of a unit where this rank's own gradient of it is; `rows` are those of the ranks at
        each place."""
        sums, copies, group = self._buffers.sums, self._shards.copies(spec), self._collectives.copying
        for start in range(0, len(span), sums.shape[1]):
            stop = min(start + sums.shape[1], len(span))
            total = sums[0, : stop - start]
            for first, last, places in _ranges(spec, by_place, span.start + start, span.start + stop):
                at = slice(first - span.start, last - span.start)
                sum_into(total[first - span.start - start : last - span.start - start], [rows[p][at] for p in places])
            if len(copies) > 1:
                others = sums[1:].view(-1)[: len(copies) * (stop - start)].view(len(copies), -1)
                others[group.place].copy_(total)
                group.gather_rows(others)
                sum_into(total, list(others))
            mean_into(rows[self._collectives.sharing(spec).place][start:stop], total, self._ranks.data_parallel)
        if rows[0].is_cuda:  # other lanes and streams may read a mean from now on
            torch.cuda.current_stream(rows[0].device).synchronize()


def _ranges(
    spec: UnitSpec, by_place: Sequence[Flags], start: int, stop: int
) -> Iterator[tuple[int, int, Sequence[int]]]:
    """[start, stop) of a unit in ranges of adjoining parameters that the ranks at the same places have a gradient of:
    (first element, last one's end, places)."""
    first, before = start, None
    for slot, placed in enumerate(spec.slots):
        if placed.offset >= stop or not placed.param.trainable:
            break
        places = [place for place, flags in enumerate(by_place) if slot in flags.given]
        if placed.offset > first and places != before and before is not None:
            yield first, placed.offset, before
            first = placed.offset
        before = places
    if before is not None and first < stop:
        yield first, stop, before


def _copy(copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """A memcpy each, without the GIL and without torch's threads."""
    for into, values in copies:
        ctypes.memmove(into.data_ptr(), values.data_ptr(), into.nbytes)
