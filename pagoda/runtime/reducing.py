"""Reducing: gradients of a unit from autograd, over a buffer of the unit's size, to slices of their mean over ranks."""

import ctypes
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from pagoda.errors import BudgetError, RankError
from pagoda.optim.means import mean_into, sum_into, warm_up
from pagoda.parallel.agreement import Asks, Call
from pagoda.parallel.wire import Parcel
from pagoda.parallel.world import rank_timeout_s
from pagoda.plan.layout import GRAD
from pagoda.plan.ops import COLLECTIVE
from pagoda.plan.ranks import ring_bytes
from pagoda.plan.slices import Span
from pagoda.plan.units import UnitSpec
from pagoda.runtime.collective import Collectives, askers
from pagoda.runtime.device import PAST, Device, Event
from pagoda.runtime.driver import Driver
from pagoda.runtime.gradients import Gradients, UnitGradient
from pagoda.runtime.lanes import Handle, Lane
from pagoda.runtime.unit import LiveUnit


@dataclass
class _Filling:
    """A buffer that one unit's gradients of one backward are going into."""

    record: UnitGradient
    buffer: torch.Tensor
    """Shape [trainable elements of the unit]."""
    arrived: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    copies: list[Handle] = field(default_factory=list)
    filled: Event = PAST


@dataclass(frozen=True)
class Buffers:
    """What gradients are added up in, where compute leaves them: constant in size, whatever the number of ranks."""

    fills: tuple[torch.Tensor, torch.Tensor]
    """Whole gradients: one that backward fills, one that is reduced. Shape [elements of the widest unit]."""
    landing: torch.Tensor
    """uint8: what arrives from other ranks, a piece from each; twice, as the next pieces come while these are added."""
    sums: torch.Tensor
    """fp32 [1 or, with replicas, 2, elements of a piece]: the sum over a replica's ranks, and over replicas."""
    means: torch.Tensor
    """Shape [elements of a piece]."""

    @property
    def piece(self) -> int:
        """Elements of a slice that are reduced at a time."""
        return self.means.numel()

    def landings(self, half: int, ranks: int, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Room for `count` elements, a piece at most, from each of some ranks, in half 0 or 1."""
        each, first = self.piece * dtype.itemsize, half * self.landing.numel() // 2
        starts = (first + i * each for i in range(ranks))
        return [self.landing[start : start + count * dtype.itemsize].view(dtype) for start in starts]


class Reducer:
    """Takes gradients from autograd, and gives each rank the mean of its slice (its extents in stage 1: of all).

    A gradient leaves autograd for the buffer; once each of the unit's parameters has one, or another unit's come, the
    buffer is reduced: each rank sends every sharer its slice, piece by piece, adds up what it gets in the order of
    ranks (`optim.means` states the rounding), and adds the mean to its extent. Ranks whose backward has not reached a
    parameter count as zero; they take part all the same, in what others ask for too.

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
        self._dtype = buffers.means.dtype
        warm_up(self._dtype)
        collectives.serve(Asks.REDUCE, self._serve)

    def add(self, unit: LiveUnit, step: int, slot: int, grad: torch.Tensor, accumulate: bool) -> UnitGradient:
        """Take a parameter's gradient; `accumulate` where earlier ones of this step have not been dropped."""
        if self._filling is not None and (self._filling.record.unit is not unit or slot in self._filling.arrived):
            self.flush(last=False)
        filling = self._filling = self._filling or self._open(unit, step)
        record = filling.record
        if record.arrivals[slot] and not accumulate:
            filling.dropped.append(slot)
        self._gradients.count(record, slot, accumulate)
        filling.arrived.append(slot)
        placed = unit.spec.slots[slot]
        into = filling.buffer[placed.offset : placed.offset + placed.param.numel]
        grad = grad.to(into.dtype).contiguous().view(-1)
        if into.is_cuda:
            into.copy_(grad)
            filling.filled = self._device.fence()
        else:
            label = f"offload {unit.spec.name}"
            filling.copies.append(self._copies.submit(lambda: _copy(into, grad), (), grad.nbytes, label))
        return record

    def flush(self, last: bool) -> None:
        """Reduce what has arrived since the last time, once its record has a buffer; `last` as the scheduler has it."""
        filling, self._filling = self._filling, None
        if filling is None:
            return
        record = filling.record
        call = Call(Asks.REDUCE, record.unit.index, record.unit.version, tuple(filling.arrived), tuple(filling.dropped))

        def work(calls: Sequence[Call]) -> None:
            filling.filled.synchronize()
            self._reduce(record, filling.buffer, call, calls)

        spec = record.unit.spec
        sent = ring_bytes(filling.buffer.nbytes, len(self._shards.sharers(spec)))

        def offload(record: UnitGradient) -> Handle:
            after = [*filling.copies, *record.pending[-1:]]
            handle = self._collectives.submit(call, work, after, sent, f"reduce {spec.name}")
            self._uses[buffer] = handle
            return handle

        buffer = self._next ^ 1
        record.waiting.append(offload)
        self.bring(record, last)

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
        buffer = self._buffers.fills[self._next][: unit.spec.trainable_numel]
        self._next ^= 1
        return _Filling(record, buffer)

    def _serve(self, call: Call, calls: Sequence[Call]) -> None:
        """Take part in a reduction that this rank has no gradient for, or has none yet."""
        unit = self._units[call.about]
        asking = askers(call, calls, self._shards.family(unit.spec))
        if not asking:
            self._compare(None)
            return
        if unit.version != calls[asking[0]].version:
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
            self._reduce(record, None, call, calls)
        finally:
            ended.finish()

    def _reduce(self, record: UnitGradient, whole: torch.Tensor | None, call: Call, calls: Sequence[Call]) -> None:
        """On the collective lane: the mean of every asking rank's gradient, to the record. `whole` is this rank's."""
        spec = record.unit.spec
        asking = askers(call, calls, self._shards.family(spec))
        flags = {rank: frozenset(calls[rank].flags) for rank in asking}
        dropped = {slot for rank in flags for slot in calls[rank].dropped}
        sums: dict[int, list[float]] = {}
        for given in _ranges(spec, flags):
            mine = whole if self._shards.rank in given.givers else None
            for window, trade in self._trades(spec, given, mine):
                mean = self._mean_of(spec, window, trade)
                for span, values in self._whose(spec, window, mean, trade.half):
                    for slot in given.slots:
                        placed = spec.slots[slot]
                        part = span.within(placed.offset, placed.offset + placed.param.numel)
                        if part is None:
                            continue
                        accumulate = slot in record.present and slot not in dropped
                        elements = values[part.start - span.start : part.stop - span.start]
                        square_sum = self._gradients.deliver(record, part.start, elements, accumulate)
                        if span is window.get(self._shards.rank):
                            sums.setdefault(slot, []).append(square_sum)
        for slot in set().union(*flags.values()):
            record.square_sums[slot] = math.fsum(sums.get(slot, ()))
            record.present.add(slot)
        record.bad_elsewhere = self._compare(record)

    def _compare(self, record: UnitGradient | None) -> int | None:
        """The first slot whose gradient is not finite on some rank, where its update may begin before `step()`."""
        if not self._early:
            return None
        mine = record.non_finite_slot() if record is not None else None
        found = self._collectives.wire.announce([-1 if mine is None else mine[1]])
        return min((slot for (slot,) in found if slot >= 0), default=None)

    def _windows(self, spec: UnitSpec, start: int, stop: int) -> Iterator[Mapping[int, Span]]:
        """By rank, the piece of its slice that is reduced at once; all pieces of all slices in [start, stop)."""
        slices = {rank: self._shards.updated(spec, rank) for rank in self._shards.sharers(spec)}
        longest = max(len(piece) for piece in slices.values())
        for at in range(0, longest, self._buffers.piece):
            window = {}
            for rank, piece in slices.items():
                first = piece.start + at
                part = piece.within(max(start, first), min(stop, first + self._buffers.piece))
                if part is not None:
                    window[rank] = part
            if window:
                yield window

    def _trades(
        self, spec: UnitSpec, given: "_Range", whole: torch.Tensor | None
    ) -> Iterator[tuple[Mapping[int, Span], "_Trade"]]:
        """The windows of a range, each with what brings the gradients of this rank's piece of it. That of the next one
        has begun by then, so that ranks do not wait for each other's sums."""
        windows = list(self._windows(spec, given.start, given.stop))
        coming = [self._begin(spec, given, window, whole, half=0) for window in windows[:1]]
        for number, window in enumerate(windows):
            following = windows[number + 1 : number + 2]
            coming += [self._begin(spec, given, later, whole, half=(number + 1) % 2) for later in following]
            yield window, coming.pop(0)

    def _begin(
        self, spec: UnitSpec, given: "_Range", window: Mapping[int, Span], whole: torch.Tensor | None, half: int
    ) -> "_Trade":
        """Send every sharer its piece of a window, and have their gradients of this rank's come to a half."""
        me = self._shards.rank
        mine = window.get(me)
        count = len(mine) if mine is not None else 0
        near = [rank for rank in given.givers if rank in self._shards.sharers(spec)]
        sends: list[Parcel] = []
        if whole is not None:
            sends = [(rank, whole[span.start : span.stop]) for rank, span in window.items() if rank != me]
        parts = dict(zip(near, self._buffers.landings(half, len(near), count, self._dtype), strict=True))
        arrived = self._collectives.wire.start(sends, [(rank, part) for rank, part in parts.items() if rank != me])
        if whole is not None and mine is not None:
            parts[me] = whole[mine.start : mine.stop]
        return _Trade(arrived, list(parts.values()), half)

    def _mean_of(self, spec: UnitSpec, window: Mapping[int, Span], trade: "_Trade") -> torch.Tensor:
        """The mean of this rank's piece, shape [its length], empty where it has none."""
        me, wire = self._shards.rank, self._collectives.wire
        trade.arrived()
        if me not in window:
            return self._buffers.means[:0]
        count = len(window[me])
        total = self._buffers.sums[0, :count]
        sum_into(total, trade.parts)
        copies = self._shards.copies(spec)
        if len(copies) > 1:
            landings = self._buffers.landings(trade.half, len(copies), count, torch.float32)
            others = dict(zip(copies, landings, strict=True))
            wire.trade(((r, total) for r in copies if r != me), ((r, t) for r, t in others.items() if r != me))
            others[me] = total
            total = self._buffers.sums[1, :count]
            sum_into(total, list(others.values()))
        mean = self._buffers.means[:count]
        mean_into(mean, total, self._ranks.data_parallel)
        self._finish(mean)
        return mean

    def _whose(
        self, spec: UnitSpec, window: Mapping[int, Span], mean: torch.Tensor, half: int
    ) -> Iterator[tuple[Span, torch.Tensor]]:
        """What of a window goes into this rank's extent: its piece, and in stage 1 those of all sharers, which come to
        a half."""
        me = self._shards.rank
        if me in window:
            yield window[me], mean
        if self._shards.is_cut(spec, GRAD):
            return
        others = [rank for rank in window if rank != me]
        landings = self._buffers.landings(half, len(others), self._buffers.piece, self._dtype)
        arrived = {r: land[: len(window[r])] for r, land in zip(others, landings, strict=True)}
        sends = ((rank, mean) for rank in self._shards.sharers(spec) if rank != me)
        self._collectives.wire.trade(sends, arrived.items())
        for rank in others:
            yield window[rank], arrived[rank]

    def _finish(self, mean: torch.Tensor) -> None:
        """Other lanes and streams may read a mean from now on."""
        if mean.is_cuda:
            torch.cuda.current_stream(mean.device).synchronize()


@dataclass(frozen=True)
class _Trade:
    """Gradients of one piece on their way from other ranks."""

    arrived: Callable[[], None]
    """Waits for them, once."""
    parts: list[torch.Tensor]
    """Where they will be, and this rank's own, in the order of ranks."""
    half: int
    """Of the landing, which is this trade's until the next but one begins."""


@dataclass(frozen=True)
class _Range:
    """Adjoining parameters that the same ranks have a gradient of."""

    start: int
    stop: int
    slots: tuple[int, ...]
    givers: tuple[int, ...]
    """In the order of ranks."""


def _ranges(spec: UnitSpec, flags: Mapping[int, frozenset[int]]) -> list[_Range]:
    """The parameters that some rank has a gradient of; `flags` are their slots, by rank."""
    found: list[_Range] = []
    for slot, placed in enumerate(spec.slots):
        givers = tuple(rank for rank in sorted(flags) if slot in flags[rank])
        start, stop = placed.offset, placed.offset + placed.param.numel
        if found and found[-1].givers == givers and found[-1].slots[-1] == slot - 1:
            found[-1] = _Range(found[-1].start, stop, (*found[-1].slots, slot), givers)
        elif givers:
            found.append(_Range(start, stop, (slot,), givers))
    return found


def _copy(into: torch.Tensor, grad: torch.Tensor) -> None:
    """One memcpy, without the GIL and without torch's threads."""
    ctypes.memmove(into.data_ptr(), grad.data_ptr(), into.nbytes)
