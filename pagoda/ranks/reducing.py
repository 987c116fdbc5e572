"""Reducing: gradients of a unit from autograd, over a buffer of the unit's size, to slices of their mean over ranks."""

import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import numpy as np
import torch

from pagoda.errors import BudgetError, RankError
from pagoda.memory.arena import copy_bytes
from pagoda.mesh.world import rank_timeout_s
from pagoda.parameters.unit import LiveUnit
from pagoda.plan.lanes import LaneName
from pagoda.plan.slices import Span
from pagoda.plan.units import UnitSpec
from pagoda.ranks.collective import Collectives
from pagoda.ranks.mean import DROPPED, GIVEN, NOT_FINITE, Buffers, Flags, Reduction
from pagoda.ranks.order import Call, CollectiveKind
from pagoda.runtime.device import PAST, Device, Event
from pagoda.runtime.executor import Executor
from pagoda.runtime.gradients import GradientBuffers, UnitGradient
from pagoda.runtime.lanes import Handle, Lane

_LOOK_S = 0.2
"""Seconds after which a reduction without a buffer looks whether there will be one."""


@dataclass
class _Filling:
    """A buffer that one unit's gradients of one backward are going into."""

    gradient: UnitGradient
    buffer: torch.Tensor
    """All of it, uint8."""
    parts: Sequence[tuple[Span, torch.Tensor]]
    """Elements of the unit, and where they go."""
    arrived: set[int] = field(default_factory=set)
    dropped: set[int] = field(default_factory=set)
    copies: list[Handle] = field(default_factory=list)
    filled: Event = PAST
    received: bool = False
    """Whether ranks have come to its reduction."""

    def of_slot(self, slot: int) -> list[tuple[int, torch.Tensor]]:
        """Where a parameter's gradient goes: (its first element of those, elements)."""
        placed = self.gradient.unit.spec.slots[slot]
        found = []
        for span, values in self.parts:
            part = span.within(placed.offset, placed.offset + placed.param.numel)
            if part is not None:
                found.append((part.start - placed.offset, values[part.start - span.start : part.stop - span.start]))
        return found


@dataclass(eq=False, repr=False)
class Reducer:
    """Takes gradients from autograd, and gives each rank the mean of its slice (its extents in stage 1: of all).

    A gradient leaves autograd for a buffer; once each of the unit's parameters has one, or another unit's come, the
    buffer is reduced, and the mean is added to the extent. Ranks whose backward has not reached a parameter count as
    zero; they take part all the same, in what others ask for too.
    """

    _collectives: Collectives
    _gradients: GradientBuffers
    _buffers: Buffers
    _device: Device
    _copies: Lane
    _executor: Executor
    _tell: Callable[..., None]
    """Tells the scheduler an event of compute."""
    _filling: _Filling | None = None
    _next: int = 0
    """The buffer to fill next."""

    def __post_init__(self) -> None:
        self._driver = self._executor.driver
        collectives, ranks = self._collectives, self._collectives.mesh.ranks
        self._early = self._driver.scheduler.plan.during_backward
        """Whether units are updated during backward."""
        self._tensor_parallel = ranks.tensor_parallel > 1
        self.use(self._buffers)
        self._uses: list[Handle | None] = [None, None]
        """What last reduced each of the two buffers."""
        collectives.take_part |= {CollectiveKind.REDUCE: self._take_part, CollectiveKind.DROP: self._drop_others}

    def use(self, buffers: Buffers) -> None:
        """Use these buffers from now on. No gradient is in others."""
        collectives = self._collectives
        self._reduction = Reduction(collectives.shards, collectives.groups, buffers, collectives.mesh.ranks)
        self._fills = buffers.fills

    def add(self, gradient: UnitGradient, slot: int, grad: torch.Tensor, accumulate: bool) -> None:
        """Take a parameter's gradient; `accumulate` where earlier ones of this step have not been dropped."""
        self._collectives.await_backward()
        if self._filling is not None and (self._filling.gradient is not gradient or slot in self._filling.arrived):
            self.flush(last=False)
        filling = self._filling = self._filling or self._open(gradient)
        unit = gradient.unit
        if gradient.arrivals[slot] and not accumulate:
            filling.dropped.add(slot)
        self._gradients.count(gradient, slot, accumulate)
        filling.arrived.add(slot)
        grad = grad.to(self._dtype(unit)).contiguous().view(-1)
        copies = [(into, grad[first : first + into.numel()]) for first, into in filling.of_slot(slot)]
        if grad.is_cuda:
            for into, values in copies:
                into.copy_(values)
            filling.filled = self._device.fence()
        else:

            def copy() -> None:
                for into, values in copies:
                    copy_bytes(into, values)

            filling.copies.append(self._copies.submit(copy, (), grad.nbytes, f"offload {unit.spec.name}"))

    def flush(self, last: bool) -> None:
        """Reduce what has arrived since the last time; `last` as the scheduler has it."""
        filling, self._filling = self._filling, None
        if filling is None:
            return
        gradient = filling.gradient
        unit = gradient.unit

        def work(_: bool) -> None:
            filling.filled.synchronize()
            filling.received = True
            try:
                self._receive(unit, True, filling.buffer, self._flags(filling))
            except BudgetError:
                self._collectives.order.fail(Call(CollectiveKind.REDUCE, unit.index), None, alike=True)
                raise

        announced = Handle(LaneName.COLLECTIVE)
        nbytes = unit.spec.trainable_numel * self._dtype(unit).itemsize
        handle = self._collectives.submit(CollectiveKind.REDUCE, unit, work, (*filling.copies, announced), nbytes)
        gradient.pending.append(handle)
        self._uses[self._next ^ 1] = handle
        event = self._driver.scheduler.gradient
        try:  # it is told once the reduction has its turn, since what follows may share the updated weights
            self._tell(event, unit.index, gradient.complete, last, None, True)
        except BaseException as error:
            announced.finish(error)
            raise
        announced.finish()
        handle.then(partial(self._give_up, filling, handle))

    def drop(self) -> None:
        """Forget what has not been reduced yet."""
        filling, self._filling = self._filling, None
        if filling is not None:
            for copy in filling.copies:
                copy.wait()

    def _drop_others(self, _unit: LiveUnit, _version: int | None) -> None:
        """Other ranks drop gradients, and this rank has made none of them. Those that it makes later are reduced after
        this DROP."""
        for gradient in self._gradients.untaken():
            gradient.present.clear()
            gradient.bad_elsewhere.clear()

    def _open(self, gradient: UnitGradient) -> _Filling:
        unit, use = gradient.unit, self._uses[self._next]
        if use is not None and not use.done:
            self._gradients.meter.wait_for(use)
        buffer = self._fills[self._next]
        self._next ^= 1
        parts, dtype = [], self._dtype(unit)
        for each in self._reduction.all_to_alls(unit.spec):
            messages = each.messages(buffer)
            parts += [(span, each.values(place, messages, dtype)) for place, span in enumerate(each.spans)]
        return _Filling(gradient, buffer, parts)

    def _dtype(self, unit: LiveUnit) -> torch.dtype:
        return self._buffers.dtypes[unit.index]

    def _take_part(self, unit: LiveUnit, version: int | None) -> None:
        """Take part in a reduction that this rank has no gradient for, or has none yet."""
        if version is None:
            self._bad_of_parts(())
            return
        nothing = np.zeros(len(unit.spec.slots), dtype=np.uint8)
        if self._collectives.order.failed:
            self._reduce(unit.spec, None, nothing, None)
            return
        if self._collectives.edition(unit) != version:
            mine = self._collectives.shards.rank
            raise RankError(
                f"Another rank has a gradient of {unit.spec.name!r} for a step that rank {mine} has updated it for "
                "already. Run the same number of backward passes on every rank, or leave out "
                "wrap(gradient_accumulation_steps=...), so that updates wait for optimizer.step()."
            )
        self._receive(unit, False, None, nothing)

    def _receive(self, unit: LiveUnit, here: bool, mine: torch.Tensor | None, flags: Flags) -> None:
        """On the collective lane: reduce a unit's gradient into its buffer. `here`: the gradient was announced.

        The buffer is asked for only now, so what frees a buffer is never behind what waits for one. Raises BudgetError
        if there is no room, or none within the time after which ranks give each other up.
        """
        ended, opened = Handle(LaneName.COLLECTIVE), threading.Event()
        received: list[UnitGradient] = []

        def deliver(gradient: UnitGradient) -> Handle:
            received.append(gradient)
            opened.set()
            return ended

        try:
            self._driver.tell(self._driver.scheduler.reduce, unit.index, here, self._gradients.new(unit), deliver)
            self._await_buffer(unit, opened)
            self._reduce(unit.spec, mine, flags, received[0])
        except BaseException as error:
            ended.finish(error)
            raise
        ended.finish()

    def _give_up(self, filling: _Filling, handle: Handle, error: BaseException | None) -> None:
        """Ranks have not come to a reduction: its gradient is lost."""
        if error is not None and not filling.received:
            self._driver.tell(self._driver.scheduler.reduce, filling.gradient.unit.index, True, None, lambda _: handle)

    def _await_buffer(self, unit: LiveUnit, opened: threading.Event) -> None:
        deadline = time.monotonic() + rank_timeout_s()
        while not opened.wait(_LOOK_S):
            hopeless = time.monotonic() > deadline or self._driver.ask(lambda: self._driver.scheduler.buffers_exhausted)
            if hopeless and not opened.is_set():  # it may have got the buffer since it looked
                self._executor.refuse_gradient(unit)

    def _reduce(self, spec: UnitSpec, mine: torch.Tensor | None, flags: Flags, gradient: UnitGradient | None) -> None:
        """On the collective lane: the mean of every rank's gradient, to `gradient` if there is one. `mine` is this
        rank's buffer, if it has a gradient, and `flags` say of what."""
        everyone, means = self._reduction.reduce(spec, mine, flags)
        square_sums: dict[tuple[int, int], float] = {}
        """By slot and first element of a part. Of several means of a part, the last one is that of their sum."""
        for span, values, is_mine, flags_of_mean in means:
            for slot in np.flatnonzero(flags_of_mean & GIVEN).tolist() if gradient is not None else ():
                placed = spec.slots[slot]
                part = span.within(placed.offset, placed.offset + placed.param.numel)
                if part is None:
                    continue
                assert gradient is not None
                begun = slot in gradient.present and not everyone[slot] & DROPPED
                accumulate = begun or (slot, part.start) in square_sums
                elements = values[part.start - span.start : part.stop - span.start]
                square_sum = self._gradients.deliver(gradient, part.start, elements, accumulate)
                square_sums[slot, part.start] = square_sum if is_mine else 0.0
        bad = self._bad_of_parts(np.flatnonzero(everyone & NOT_FINITE).tolist())
        if gradient is not None:
            for slot in np.flatnonzero(everyone & GIVEN).tolist():
                gradient.square_sums[slot] = math.fsum(sum_ for (of, _), sum_ in square_sums.items() if of == slot)
                gradient.present.add(slot)
            gradient.bad_elsewhere.difference_update(np.flatnonzero(everyone & DROPPED).tolist())
            gradient.bad_elsewhere.update(bad)

    def _flags(self, filling: _Filling) -> Flags:
        """What this rank has of a unit's gradient. Whether that is finite is of use where its update may begin before
        `step()`: what other ranks have of it lies in their slices only."""
        flags = np.zeros(len(filling.gradient.unit.spec.slots), dtype=np.uint8)
        for slot in filling.arrived:
            flags[slot] = GIVEN | (DROPPED if slot in filling.dropped else 0)
            if self._early:
                largest = [torch.linalg.vector_norm(values, math.inf) for _, values in filling.of_slot(slot)]
                flags[slot] |= 0 if all(map(math.isfinite, largest)) else NOT_FINITE
        return flags

    def _bad_of_parts(self, mine: Collection[int]) -> Collection[int]:
        """Such slots of all parts of parameters, where tensor-parallel ranks have one each."""
        if not self._early or not self._tensor_parallel:
            return mine
        return {*chain(*self._collectives.transport.announce(mine))}
