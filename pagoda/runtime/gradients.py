"""Gradients: from autograd to the buffers in which they wait for their update."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from pagoda.errors import NonFiniteGradientError
from pagoda.memory.sizes import format_bytes
from pagoda.memory.versions import EMPTY
from pagoda.optim.gradient_kernels import arriving_dtype, gradient_kernels
from pagoda.optim.rule import Hyper
from pagoda.parameters.unit import LiveUnit
from pagoda.plan.buffers import BOUNCE_ELEMENTS
from pagoda.plan.lanes import LaneName, update_threads
from pagoda.plan.layout import GRAD, WEIGHT
from pagoda.plan.placement import BOUNCE, STAGING
from pagoda.plan.slices import Span
from pagoda.plan.tiers import HOST
from pagoda.runtime.buffer_pool import BufferPool
from pagoda.runtime.device import PAST, Arrival, Device, Event, StoreGradient, store_in_ram
from pagoda.runtime.lanes import Handle, Lane, wait_all
from pagoda.runtime.meter import StepMeter
from pagoda.runtime.next_update import Segment
from pagoda.runtime.store import Store
from pagoda.schedule.operations import Offload, Reload, Spill
from pagoda.schedule.records import GradientRecord
from pagoda.schedule.scheduler import Scheduler
from pagoda.schedule.waits import InFlight

_WORTH_BYTES = 256 << 10
"""From this many bytes on, gradients of a unit are copied to its buffer before all of them exist."""

Delivery = Callable[["UnitGradient"], Handle]
"""Starts the copy of a part of a gradient to its buffer, which exists by then."""


class _Made(NamedTuple):
    """A parameter's gradient from autograd."""

    slot: int
    values: torch.Tensor
    """Shape [elements of the parameter]."""
    issued: Event
    """The point that compute's queue had reached then."""
    accumulate: bool


class UnitGradient:
    """What the executor knows of the gradient of one unit in one step, from its first arrival to its update. The
    scheduler's record of it alone holds this."""

    def __init__(self, unit: LiveUnit, shared: bool) -> None:
        """`shared`: ranks gather the updated weights after the update."""
        self.unit = unit
        self.place: Callable[[], torch.Tensor] | None = None
        """Returns the buffer. None until there is one."""
        self.made: list[_Made] = []
        """Gradients from autograd that will be copied to the buffer together."""
        self.hypers: dict[int, Hyper] = {}
        """slot -> hyperparameters of its update, for slots whose gradient it uses. Until the update is requested, this
        is a guess, as are `segments`."""
        self.segments: tuple[Segment, ...] = ()
        """The elements that its update changes."""
        self.arrivals = [0] * unit.trainable
        """Number of gradients that autograd has delivered for each parameter."""
        self.order = [0] * unit.trainable
        """Position of each parameter's last arrival among all arrivals of all units."""
        self.present: set[int] = set()
        """Slots whose gradient is in the buffer, because ranks have added it up or the user has written it. With
        several ranks, some parameters may have gradients on other ranks only."""
        self.by_hand = False
        """Whether the user has written any of it."""
        self.bad_elsewhere: set[int] = set()
        """Slots whose gradients are known to be not finite on some rank."""
        self.square_sums = [0.0] * unit.trainable
        self.pending: list[Handle] = []
        self.issued = PAST
        """The point that compute's queue had reached when the update was issued. All work that reads the old weights is
        before it."""
        self.weights = EMPTY
        """Where its update writes the weights."""
        self.updated = Handle()
        """Ends when the update has written this rank's new weights."""
        self.shown = Handle() if shared else self.updated
        """Ends when all new weights are in their home."""
        self.written = Handle()
        """Ends when every state is written."""

    @property
    def buffer(self) -> torch.Tensor:
        """The flat gradient in RAM or on the device, once it has a buffer. While the gradient is on SSD only, this is
        another gradient's buffer.

        A tensor of shared pages is made for each use. If it were kept here, this small object would fragment the free
        memory that autograd's large tensors come from.
        """
        assert self.place is not None, "an OFFLOAD has come"
        return self.place()

    @property
    def complete(self) -> bool:
        """Whether every parameter that trains now has had equally many arrivals, so that this backward has finished the
        unit."""
        counts = {self.arrivals[slot] for slot in self.unit.expected}
        return len(counts) == 1 and 0 not in counts

    @property
    def is_due(self) -> bool:
        """Whether the gradients that exist are large enough for a transfer."""
        return bool(self.made) and (self.complete or sum(each.values.nbytes for each in self.made) >= _WORTH_BYTES)

    def request(self) -> None:
        """Its update is requested, with these hyperparameters."""
        for slot, hyper in self.hypers.items():
            self.unit.steps[slot] = hyper.step

    def settle(self) -> None:
        """Wait until every started OFFLOAD has ended."""
        wait_all(list(self.pending))

    def non_finite(self) -> tuple[int, int] | None:
        """The first gradient that is NaN or infinite: the position of its arrival, and its slot. None if there is
        none."""
        if self.bad_elsewhere:
            return min((self.order[slot], slot) for slot in self.bad_elsewhere)
        bad = [slot for slot, square_sum in enumerate(self.square_sums) if not math.isfinite(square_sum)]
        here = (slot for slot in bad if self.arrivals[slot] or slot in self.present)
        return min(((self.order[slot], slot) for slot in here), default=None)


class _Arrived(NamedTuple):
    """The event of arriving gradients of parameters. After it, the unit's gradient has their sums of squares."""

    gradient: UnitGradient
    arrivals: Sequence[tuple[int, Arrival]]

    def synchronize(self) -> None:
        for slot, arrival in self.arrivals:
            self.gradient.square_sums[slot] = arrival.square_sum()


class _Added(NamedTuple):
    """The event of the end of additions on other threads."""

    additions: Sequence[Handle]

    def synchronize(self) -> None:
        wait_all(self.additions)


@dataclass(eq=False, repr=False)
class GradientBuffers:
    """The gradients of a process: what the scheduler's records hold of them, and the memory that they are in.

    A unit has buffers of its own, one for each step whose gradients may wait, or it shares the pages of `staging` with
    others. The scheduler decides which gradient gets which buffer, and which gradients are on SSD.
    """

    _store: Store
    _scheduler: Scheduler
    _units: Sequence[LiveUnit]
    _lanes: dict[str, Lane]
    _device: Device
    meter: StepMeter

    def __post_init__(self) -> None:
        store = self._store
        adds = store.plan.placement.pages(HOST, BOUNCE) > 0
        self._adders = Lane("add", update_threads(torch.get_num_threads())) if adds else None
        """Adds gradients from a separate device."""
        self._arrivals = itertools.count()
        self.take_memory()

    def take_memory(self) -> None:
        """Take the buffers that the plan has for gradients. There are no gradients yet."""
        self._in_flight = InFlight[Handle]()
        store, plan = self._store, self._store.plan
        self._staging = store.host.take(plan.placement.pages(HOST, STAGING))
        pages, (buffers, self._bounced) = plan.placement.pages(HOST, BOUNCE), plan.layout.bounce
        landings = [store.host.take(pages // buffers) for _ in range(buffers if pages else 0)]
        self._bounce = BufferPool(landings)
        """Room for `_bounced` elements each, in which gradients from a separate device land before they are added."""
        self._most_in_flight = plan.gradients_in_flight_bytes

    def dtype(self, unit: LiveUnit) -> torch.dtype:
        """The dtype of a unit's gradient in its buffer."""
        return self._store.dtype(unit.index, GRAD)

    def arriving(self, unit: LiveUnit) -> torch.dtype:
        """The dtype of a unit's gradient on its way to its extent."""
        return arriving_dtype(self.dtype(unit), self._store.dtype(unit.index, WEIGHT))

    # --- of this step ---

    def get(self, unit: LiveUnit) -> UnitGradient | None:
        """The unit's gradient of this step, if one has arrived and no update has taken it."""
        return _payload(self._scheduler.gradient_of(unit.index))

    def latest(self, unit: LiveUnit) -> UnitGradient | None:
        """The unit's gradient of this step, even if an update has taken it."""
        return _payload(self._scheduler.weights(unit.index).announced) if unit.updated else self.get(unit)

    def untaken(self) -> list[UnitGradient]:
        """The gradients of this step that no update has taken, in unit order."""
        return [*filter(None, map(self.get, self._units))]

    def taken(self) -> list[UnitGradient]:
        """The gradients of this step that updates during backward have taken, in unit order."""
        return [gradient for gradient in self.of_step().values() if gradient.unit.updated]

    def of_step(self) -> dict[int, UnitGradient]:
        """unit -> its gradient of this step, in unit order."""
        return {gradient.unit.index: gradient for gradient in filter(None, map(self.latest, self._units))}

    def non_finite(self) -> tuple[int, int, int] | None:
        """The first gradient of this step that is NaN or infinite: the position of its arrival, its unit, and its slot.
        None if there is none."""
        found = ((at[0], unit, at[1]) for unit, gradient in self.of_step().items() if (at := gradient.non_finite()))
        return min(found, default=None)

    def new(self, unit: LiveUnit) -> UnitGradient:
        """What a record of the unit's gradient holds when the gradient begins."""
        return UnitGradient(unit, shared=self._store.plan.layout.gathers_after_update(unit.spec))

    def add(self, gradient: UnitGradient, slot: int, grad: torch.Tensor, accumulate: bool) -> None:
        """Accept a parameter's gradient, to be stored in its buffer or added to it."""
        self.count(gradient, slot, accumulate)
        grad = grad.to(self.arriving(gradient.unit)).contiguous().view(-1)
        self._device.computing()
        gradient.made.append(_Made(slot, grad, self._device.fence(), accumulate))

    def gather(self, gradient: UnitGradient) -> Delivery:
        """One transfer of all existing gradients to the buffer.

        The copies run on the d2h lane, which also computes the sums of squares of the results in float64.
        """
        made, gradient.made = gradient.made, []
        return partial(self._submit, made)

    def copy_of(self, gradient: UnitGradient, slot: int) -> torch.Tensor:
        """A copy of a parameter's gradient, flat, in the dtype and the memory of its buffer. The gradient has arrived,
        and is lent to compute. Elements that only other ranks have are undefined: see `Collectives.completed`."""
        buffer = gradient.buffer
        copy = buffer.new_empty(gradient.unit.spec.slots[slot].param.numel)
        for first, part in self._parts(gradient.unit, slot):
            copy[first : first + len(part)] = buffer[part.at : part.at + len(part)]
        return copy

    def replace(self, gradient: UnitGradient, slot: int, values: torch.Tensor) -> Delivery:
        """The transfer that stores `values`, flat and in the dtype of buffers, as a parameter's gradient."""
        unit, spec = gradient.unit, gradient.unit.spec
        gradient.present.add(slot)
        gradient.by_hand = True
        gradient.bad_elsewhere.discard(slot)
        self._device.computing()
        on_device, issued = self._store.lives_on_device(unit.index, GRAD), self._device.fence()
        values = values if on_device else values.cpu()
        kernel = gradient_kernels(values.dtype).store_gradient
        mine = self._store.shards.updated(spec)

        def store() -> None:
            sums = []
            for first, part in self._parts(unit, slot):
                inside = (at for at in (mine.start, mine.stop) if part.start < at < part.stop)
                for start, stop in itertools.pairwise((part.start, *inside, part.stop)):
                    into = gradient.buffer[part.at + start - part.start :][: stop - start]
                    given = values[first + start - part.start :][: stop - start]
                    if on_device:
                        arrived = [self._device.store_gradient(kernel, into, given, issued).square_sum()]
                    else:
                        arrived = store_in_ram(kernel, into, given)
                    sums += arrived if mine.start <= start < mine.stop else []
            gradient.square_sums[slot] = math.fsum(sums)

        moved = 0 if unit.spec.on_host or on_device else values.nbytes
        return lambda _: self._lanes[LaneName.D2H].submit(store, (), moved, f"offload {spec.name}")

    def _parts(self, unit: LiveUnit, slot: int) -> Iterator[tuple[int, Span]]:
        """This rank's elements of a parameter's gradient: where they begin in the parameter, and their place in the
        unit and in the buffer."""
        placed = unit.spec.slots[slot]
        for span in self._store.shards.spans(unit.spec, GRAD):
            part = span.within(placed.offset, placed.offset + placed.param.numel)
            if part is not None:
                yield part.start - placed.offset, part

    def count(self, gradient: UnitGradient, slot: int, accumulate: bool) -> None:
        """Autograd has delivered a parameter's gradient. It is the first of the step unless `accumulate`."""
        gradient.arrivals[slot] = gradient.arrivals[slot] + 1 if accumulate else 1
        gradient.order[slot] = next(self._arrivals)

    def hold_back(self) -> None:
        """Wait while too many bytes are on their way to buffers."""
        self.meter.hold_back(self._in_flight, self._most_in_flight)

    # --- operations ---

    def offload(self, operation: Offload) -> Handle:
        """Start an OFFLOAD."""
        gradient: UnitGradient = operation.gradient.payload
        self._place(operation.gradient)
        handle: Handle = operation.delivery(gradient)
        gradient.pending.append(handle)
        return handle

    def transfer(self, operation: Spill | Reload) -> Handle:
        """Start a SPILL or RELOAD: move a gradient's buffer to SSD or back."""
        pages, reading = operation.gradient.run, isinstance(operation, Reload)
        assert pages is not None, "it has a buffer while it is moved"
        lane, verb = (LaneName.SSD_READ, "gradient") if reading else (LaneName.SSD_WRITE, "spill")
        move = self._store.load if reading else self._store.save
        if reading:
            self._place(operation.gradient)
        view = self._staging.part(pages).view()
        label = f"{verb} {self._store.plan.units[operation.unit].name}"
        run = self._store.run_on_ssd(operation.unit, GRAD)
        assert run is not None, "the plan has room for it on SSD"
        return self._lanes[lane].submit(partial(move, run, 0, view), (), view.nbytes, label)

    def deliver(self, gradient: UnitGradient, start: int, values: torch.Tensor, accumulate: bool) -> float:
        """Store or add elements of a unit's gradient, starting at element `start`. Returns the result's sum of squares.

        Carries out an OFFLOAD. `values` are in the memory where compute leaves gradients.
        """
        spec = gradient.unit.spec
        at = start - self._store.shards.updated(spec).start + self._store.shards.origin(spec, GRAD)
        into = gradient.buffer[at : at + values.numel()]
        return self._put(gradient.unit, into, values, PAST, accumulate).square_sum()

    def let_go(self) -> None:
        """Let go of all buffers."""
        self._bounce = BufferPool(())

    def close(self) -> None:
        """Join the threads that add gradients."""
        if self._adders is not None:
            self._adders.close()

    def exhausted(self, unit: LiveUnit) -> str:
        """The error message for a gradient without a buffer."""
        waiting = ", ".join(repr(gradient.unit.spec.name) for gradient in self.untaken() if gradient.place is not None)
        page = self._store.plan.page_bytes
        return (
            f"No room for the gradient of unit {unit.spec.name!r}: the buffers are held by {waiting}, whose "
            "parameters have not all received a gradient in this backward. Give wrap() no gradient_accumulation_steps, "
            "add "
            f"memory.ssd, or raise memory.host by {format_bytes(self._store.plan.layout.total_pages(GRAD) * page)}."
        )

    def _place(self, record: GradientRecord) -> None:
        """Give a gradient the buffer that the scheduler has chosen."""
        gradient: UnitGradient = record.payload
        if record.run is None:
            own = self._store.gradients[gradient.unit.index][record.own_buffer or 0]
            gradient.place = lambda: own
            return
        elements = self._store.plan.layout.elements(gradient.unit.spec, GRAD)
        gradient.place = partial(
            self._staging.part(record.run).tensor, self._store.dtype(gradient.unit.index, GRAD), elements
        )

    def _submit(self, made: list[_Made], gradient: UnitGradient) -> Handle:
        unit = gradient.unit

        def deliver() -> Event:
            arrivals, buffer = [], gradient.buffer
            for slot, values, issued, accumulate in made:
                spec = unit.spec.slots[slot]
                into = buffer[spec.offset : spec.offset + spec.param.numel]
                arrivals.append((slot, self._put(unit, into, values, issued, accumulate)))
            event = _Arrived(gradient, arrivals)
            if not all(arrival.is_there for _, arrival in arrivals):
                return event
            event.synchronize()
            return PAST

        stays = unit.spec.on_host or self._store.lives_on_device(unit.index, GRAD)
        nbytes = sum(each.values.nbytes for each in made)
        # A store follows earlier stores in the device's queue. An addition needs the earlier gradients to have arrived.
        after = gradient.pending if any(each.accumulate for each in made) else ()
        handle = self._lanes[LaneName.D2H].submit(deliver, after, 0 if stays else nbytes, f"offload {unit.spec.name}")
        self._in_flight.add(handle, nbytes)
        return handle

    def _put(self, unit: LiveUnit, into: torch.Tensor, grad: torch.Tensor, issued: Event, accumulate: bool) -> Arrival:
        """Store or add a flat gradient of shape [n]. The sum of squares is that of the result. Runs on the d2h lane."""
        kernels = gradient_kernels(into.dtype, grad.dtype)
        kernel = kernels.add_gradient if accumulate else kernels.store_gradient
        in_ram = unit.spec.on_host
        lives_there = self._store.lives_on_device(unit.index, GRAD)
        if accumulate and lives_there:
            return self._device.add_gradient(kernel, into, grad, issued)
        if not accumulate and not in_ram and (lives_there or into.dtype is grad.dtype):
            return self._device.store_gradient(kernel, into, grad, issued)
        if self._adders is not None and not in_ram:
            return self._add_bounced(into, kernel, grad, issued, self._adders)
        sums = store_in_ram(kernel, into, grad)
        return Arrival((), lambda: sums)

    def _add_bounced(
        self, into: torch.Tensor, kernel: StoreGradient, grad: torch.Tensor, issued: Event, adders: Lane
    ) -> Arrival:
        """Add a gradient from a separate device, or widen it. Several threads do so, each with another piece. For a
        small gradient, waking them would take longer."""
        sums: list[float] = []

        def add(at: int) -> None:
            piece = grad[at : at + self._bounced]
            with self._bounce.one() as room:
                landing = room.tensor(piece.dtype, piece.numel())
                self._device.copy_out(landing, piece, issued).synchronize()
                sums.extend(store_in_ram(kernel, into[at:], landing))

        if grad.numel() <= BOUNCE_ELEMENTS:
            add(0)
            return Arrival((), lambda: sums)
        starts = range(0, grad.numel(), self._bounced)
        return Arrival([_Added([adders.submit(partial(add, at)) for at in starts])], lambda: sums)


def _payload(record: GradientRecord | None) -> UnitGradient | None:
    return None if record is None else record.payload


def non_finite_error(name: str) -> NonFiniteGradientError:
    """The error for a gradient that is NaN or infinite."""
    return NonFiniteGradientError(
        f"The gradient of {name!r} is not finite, the first one in backward. Lower the learning rate, check the loss "
        "and the batch, or set max_grad_norm if it is off."
    )
