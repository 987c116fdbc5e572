"""Gradient extents: where gradients go as soon as autograd has accumulated them."""

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable

import torch

from pagoda.errors import BudgetError
from pagoda.memory.page import Run
from pagoda.memory.sizes import format_bytes
from pagoda.memory.slabs import SlabRegion
from pagoda.optim.formats import arriving_dtype
from pagoda.optim.gradient_kernels import GradientKernels
from pagoda.plan.layout import GRAD, WEIGHT
from pagoda.plan.ops import HOST
from pagoda.plan.placement import BOUNCE, BOUNCE_ELEMENTS
from pagoda.runtime.device import PAST, Arrival, Device, Event
from pagoda.runtime.lanes import Handle, Lane, wait_all
from pagoda.runtime.store import Store
from pagoda.runtime.unit import LiveUnit


class UnitGradient:
    """The gradient of one unit for one step, from its first arrival to its update."""

    def __init__(self, unit: LiveUnit, home: torch.Tensor | None) -> None:
        self.unit = unit
        self.buffer = home
        """Flat gradient in host RAM, or None while it is on SSD only."""
        self.run: Run | None = None
        """Frames of a staging buffer; None for an extent whose home is host RAM."""
        self.on_ssd = False
        """True while the SSD extent holds all that has arrived."""
        self.users = 0
        """Lane work and updates that touch the buffer; above zero its frames stay."""
        self.queued = False
        """True once an update that will consume it has been queued."""
        self.lent = False
        """True while the queued update may still have to be undone: then another one will need the gradient again."""
        self.held = False
        """True while an update counts among the users."""
        self.used: list[int] | None = None
        """Slots whose gradient the update takes, from when it is queued on."""
        self.arrivals = [0] * unit.trainable
        """Gradients of each parameter that autograd has delivered here."""
        self.order = [0] * unit.trainable
        """When each parameter's gradient last arrived, by a count over all units."""
        self.present: set[int] = set()
        """Slots whose gradient lies in the buffer, where ranks reduce: some may have arrived on others only."""
        self.bad_elsewhere: int | None = None
        """Slot whose gradient is not finite on some rank, if that is known."""
        self.changes = 0
        """How often something has been on its way into the buffer."""
        self.loading: Handle | None = None
        """Ends when the buffer has what was on SSD."""
        self.square_sums = [0.0] * unit.trainable
        self.pending: list[Handle] = []
        self.issued = PAST
        """What compute had been told when an update was queued: all that reads the weights as they are."""

    @property
    def complete(self) -> bool:
        """Every parameter that trains now has had as many arrivals: this backward is through with the unit."""
        counts = {self.arrivals[slot] for slot in self.unit.expected}
        return len(counts) == 1 and 0 not in counts

    @property
    def settled(self) -> bool:
        """Whether what has arrived lies in the extent, or never will."""
        return all(handle.done for handle in list(self.pending))

    def settle(self) -> None:
        """Wait until what has arrived lies in the extent. Both the compute thread and the updater may wait."""
        wait_all(list(self.pending))

    def non_finite(self) -> tuple[int, str] | None:
        """When the gradient of a parameter arrived that is NaN or infinite, and its name; the first, if any."""
        at = self.non_finite_slot()
        return None if at is None else (at[0], self.unit.name(at[1]))

    def non_finite_slot(self) -> tuple[int, int] | None:
        """When the gradient of a parameter arrived that is NaN or infinite, and its slot; the first, if any."""
        if self.bad_elsewhere is not None:
            return self.order[self.bad_elsewhere], self.bad_elsewhere
        bad = [slot for slot, square_sum in enumerate(self.square_sums) if not math.isfinite(square_sum)]
        here = (slot for slot in bad if self.arrivals[slot] or slot in self.present)
        return min(((self.order[slot], slot) for slot in here), default=None)


class _Taken:
    """The event of a gradient that arrives: behind it, the record has its square sum."""

    def __init__(self, record: UnitGradient, slot: int, arrival: Arrival) -> None:
        self._record, self._slot, self.arrival = record, slot, arrival

    def synchronize(self) -> None:
        self._record.square_sums[self._slot] = self.arrival.square_sum()


class Gradients:
    """All gradient extents.

    A unit whose extent lives in host RAM has its buffer for good. Others share the staging region: a buffer is
    taken at the unit's first arrival and, when `write_behind` says so, written to SSD once the unit is complete;
    it keeps its frames until another unit needs them, so a gradient that is used soon never comes back from SSD.

    `add`, `take` and `clear` are the compute thread's, `load` and `release` the updater's; `_lock` guards records
    and frames. Frames are waited for only while lanes or updates are sure to free some.
    """

    def __init__(
        self,
        store: Store,
        staging: SlabRegion | None,
        kernels: GradientKernels,
        lanes: dict[str, Lane],
        device: Device,
        write_behind: bool,
        stalled: Callable[[str, float], None],
    ) -> None:
        self._store = store
        self._staging = staging
        self._kernels = kernels
        self._lanes = lanes
        self._device = device
        self.arriving = arriving_dtype(store.dtype(GRAD), store.dtype(WEIGHT))
        """What a gradient has on its way to its extent."""
        self._bounce = self._open_bounce()
        self._free = {unit.index: list(store.gradients(unit.index)) for unit in store.plan.units}
        """unit -> extents in RAM that nothing uses, where several steps' gradients may wait for their update."""
        self._queueing = store.plan.options.max_staleness is not None
        self._write_behind = write_behind
        self._stalled = stalled
        self._lock = threading.Condition()
        self._arrivals = itertools.count()
        self._records: dict[int, UnitGradient] = {}
        self._staged: list[UnitGradient] = []
        """Records with a staging buffer, oldest first."""
        self._write_error: BaseException | None = None
        """That of a spill that somebody waits for; raised once."""
        self._in_flight: deque[tuple[Handle, int]] = deque()
        self._in_flight_bytes = 0
        self._in_flight_limit = store.plan.gradients_in_flight_bytes

    @property
    def staging_peak_bytes(self) -> int:
        """Most bytes of staging in use at once."""
        return 0 if self._staging is None else self._staging.peak_bytes

    def get(self, unit: LiveUnit) -> UnitGradient | None:
        """The unit's gradient of this step, if any has arrived."""
        return self._records.get(unit.index)

    def records(self) -> list[UnitGradient]:
        """Gradients of this step, in unit order."""
        return [self._records[index] for index in sorted(self._records)]

    def add(self, unit: LiveUnit, slot: int, grad: torch.Tensor, accumulate: bool) -> UnitGradient:
        """Take a parameter's gradient into the unit's extent: store it, or add it to what is there.

        The copy runs on the d2h lane, which also computes the square sum of the result in float64.
        """
        record = self.open(unit)
        self.count(record, slot, accumulate)
        assert record.buffer is not None
        spec = unit.spec.slots[slot]
        into = record.buffer[spec.offset : spec.offset + spec.param.numel]
        grad = grad.to(self.arriving).contiguous().view(-1)
        issued = self._device.fence()

        def take() -> Event:
            taken = _Taken(record, slot, self._take(unit, into, grad, issued, accumulate))
            if not taken.arrival.is_there:
                return taken
            taken.synchronize()
            return PAST

        nbytes = grad.numel() * grad.element_size()
        stays = unit.index in self._store.plan.placement.resident
        moved = 0 if stays else nbytes
        # What is stored follows what was stored before in the device's queue; what is added to has to be there.
        after = record.pending[-1:] if accumulate or record.loading is not None else ()
        handle = self._lanes["d2h"].submit(take, after, moved, f"offload {unit.spec.name}")
        self.expect(record, handle)
        self._hold_back(handle, nbytes)
        return record

    def count(self, record: UnitGradient, slot: int, accumulate: bool) -> None:
        """Autograd has delivered a parameter's gradient, the first one of a step unless it is to `accumulate`."""
        record.arrivals[slot] = record.arrivals[slot] + 1 if accumulate else 1
        record.order[slot] = next(self._arrivals)

    def open(self, unit: LiveUnit, block: bool = True) -> UnitGradient:
        """The unit's gradient of this step, whose buffer is about to change; it is held until `let_go`.

        With `block` False, raises BudgetError where frames for the buffer would have to be waited for.
        """
        record = self._records.get(unit.index)
        if record is None:
            record = self._records.setdefault(unit.index, UnitGradient(unit, self._home(unit)))  # or another thread's
        start = time.perf_counter()
        took_frames = record.buffer is None
        with self._lock:
            if not self._hold(record, block):
                raise BudgetError(self._exhausted(record))
            record.on_ssd = False
            record.changes += 1
        if took_frames:
            self._stalled("ssd_write" if self._write_behind else "update", time.perf_counter() - start)
        return record

    def expect(self, record: UnitGradient, handle: Handle) -> None:
        """What was `open`ed for is in the buffer once `handle` has ended."""
        handle.then(lambda _: self.let_go(record))
        record.pending.append(handle)
        if self._write_behind and record.run is not None and record.complete:
            with self._lock:
                self._spill(record)

    def let_go(self, record: UnitGradient) -> None:
        """Nothing more of what was `open`ed for touches the buffer."""
        with self._lock:
            record.users -= 1
            self._lock.notify_all()

    def deliver(self, record: UnitGradient, start: int, values: torch.Tensor, accumulate: bool) -> float:
        """Store or add elements of a unit's gradient, from its element `start` on; returns the result's square sum.

        For whoever has opened the record; `values` lie where compute leaves gradients.
        """
        assert record.buffer is not None
        spec = record.unit.spec
        at = start - self._store.shards.updated(spec).start + self._store.shards.origin(spec, GRAD)
        return self._take(record.unit, record.buffer[at : at + values.numel()], values, PAST, accumulate).square_sum()

    def take(self, record: UnitGradient) -> None:
        """Hand a record to its update; arrivals from now on belong to the next step."""
        with self._lock:
            record.queued = True
            record.issued = self._device.fence()
            del self._records[record.unit.index]

    def lend(self, record: UnitGradient) -> None:
        """An update that may be undone is about to read a gradient, which stays this step's until `take`."""
        with self._lock:
            record.queued = record.lent = True

    def keep(self, record: UnitGradient) -> None:
        """The update that a gradient was lent to stands: its frames are free once that has read it."""
        with self._lock:
            del self._records[record.unit.index]
            reading, record.lent = record.lent, False
        if not reading:
            self.release(record)

    def clear(self) -> None:
        """Drop every gradient that no update has been queued for, also those that could not be moved."""
        records, self._records = self._records, {}
        for record in records.values():
            for handle in list(record.pending):
                handle.wait_until_done()
            self.release(record)

    def close(self) -> None:
        """Let go of all extents, once every lane has ended."""
        self._records.clear()
        self._staged.clear()
        self._free.clear()
        self._bounce.clear()

    def load(self, record: UnitGradient, block: bool) -> bool:
        """Bring a gradient into host RAM for its update; returns whether it is there or on its way.

        With `block` False it gives up when that takes waiting for frames.
        """
        with self._lock:
            record.held = self._hold(record, block)
            return record.held

    def release(self, record: UnitGradient) -> None:
        """An update has read the gradient; unless it was lent, nobody needs it any more, and its frames are free."""
        with self._lock:
            record.queued = False
            if record.lent:
                record.users -= record.held
            elif record.run is not None:
                self._drop_buffer(record)
            elif self._queueing and record.buffer is not None:
                self._free[record.unit.index].append(record.buffer)
                record.buffer = None
            record.lent = record.held = False
            self._lock.notify_all()

    def _home(self, unit: LiveUnit) -> torch.Tensor | None:
        """The extent in RAM for a unit's next gradient, once one is free; None where there is none at all."""
        if not self._queueing:
            return self._store.tensor(unit.index, GRAD)
        start = time.perf_counter()
        with self._lock:
            free = self._free[unit.index]
            waited = not free
            while not free:
                self._lock.wait()
            extent = free.pop()
        if waited:
            self._stalled("update", time.perf_counter() - start)
        return extent

    def _open_bounce(self) -> list[torch.Tensor]:
        """Two buffers in which gradients of a device of its own land to be added, shape [BOUNCE_ELEMENTS] at most."""
        pages = self._store.plan.placement.pages(HOST, BOUNCE) // 2
        dtype = self.arriving
        runs = [self._store.host.alloc(pages) for _ in range(2 if pages else 0)]
        return [
            self._store.host.tensor(run, dtype, pages * self._store.plan.page_bytes // dtype.itemsize) for run in runs
        ]

    def _take(self, unit: LiveUnit, into: torch.Tensor, grad: torch.Tensor, issued: Event, accumulate: bool) -> Arrival:
        """Store or add a flat gradient, shape [n]; the square sum is that of the result.

        On the d2h lane. What is added or widened comes in pieces: from a device of its own, each is on its way while
        the one before is added.
        """
        if accumulate and unit.index in self._store.plan.placement.resident:
            return self._device.add_gradient(self._kernels.add_gradient, into, grad, issued)
        if not accumulate and self._store.plan.layout.has_device_kernels:
            return self._device.store_gradient(self._kernels.store_gradient, into, grad, issued)
        kernel = self._kernels.add_gradient if accumulate else self._kernels.store_gradient
        starts = range(0, grad.numel(), BOUNCE_ELEMENTS)

        def fetch(start: int) -> tuple[torch.Tensor, Event]:
            piece = grad[start : start + BOUNCE_ELEMENTS]
            if not self._bounce:
                return piece, PAST
            landing = self._bounce[start // BOUNCE_ELEMENTS % 2][: piece.numel()]
            return landing, self._device.copy_out(landing, piece, issued)

        sums = []
        upcoming = fetch(0) if starts else None
        for start in starts:
            assert upcoming is not None
            piece, arrived = upcoming
            upcoming = fetch(start + BOUNCE_ELEMENTS) if start + BOUNCE_ELEMENTS < grad.numel() else None
            arrived.synchronize()
            sums.append(kernel(into[start:].data_ptr(), piece.data_ptr(), piece.numel()))
        return Arrival((), lambda: sums)

    # Everything below is called with the lock held, except `_hold_back` and lane callbacks.

    def _hold(self, record: UnitGradient, block: bool) -> bool:
        """Count one more user of the record's buffer, taking frames and reading it back from SSD if need be."""
        if record.buffer is None:
            assert self._staging is not None, "a gradient without a home in host RAM has a staging region"
            count = self._store.plan.layout.pages(record.unit.spec, GRAD)
            if not self._make_room(count, record, block):
                return False
            run = self._staging.pool.alloc(count)
            assert run is not None, "room for the run has just been made"
            record.run = run
            elements = self._store.plan.layout.elements(record.unit.spec, GRAD)
            record.buffer = self._staging.tensor(run, self._store.dtype(GRAD), elements)
            self._staged.append(record)
            if record.on_ssd:
                self._reload(record)
        record.users += 1
        return True

    def _make_room(self, count: int, record: UnitGradient, block: bool) -> bool:
        """Free frames until `count` adjoin: clean buffers first, oldest first; else wait for lanes or updates."""
        assert self._staging is not None
        while self._staging.pool.cheapest_window(count, lambda _: None) != []:
            idle = [other for other in self._staged if other.users == 0]
            clean = next((other for other in idle if other.on_ssd), None)
            if clean is not None:
                self._drop_buffer(clean)
                continue
            if not block:
                return False
            error, self._write_error = self._write_error, None
            if error is not None:
                raise error
            # Queued gradients free their frames by being used; the updater, which uses them, must not wait for itself.
            updating = record.queued
            if not any(other.users or (other.queued and not updating) for other in self._staged):
                victim = next((o for o in idle if self._store.run(o.unit.index, GRAD) is not None), None)
                if victim is None:
                    raise BudgetError(self._exhausted(record))
                self._spill(victim, awaited=True)
                continue  # it may have ended already, and then nobody would end this wait
            self._lock.wait()
        return True

    def _drop_buffer(self, record: UnitGradient) -> None:
        assert self._staging is not None
        assert record.run is not None
        self._staged.remove(record)
        self._staging.free(record.run)
        record.run = None
        record.buffer = None

    def _spill(self, record: UnitGradient, awaited: bool = False) -> None:
        """Write a buffer to its SSD extent; it is clean afterwards unless that fails or more has arrived meanwhile.

        A write that fails loses nothing: the gradient stays in the buffer, and is written again when its frames are
        needed. The error of that write, which is `awaited`, is raised.
        """
        changes = record.changes
        view, run = self._ssd_extent(record)
        ssd = self._store.ssd
        assert ssd is not None
        label = f"spill {record.unit.spec.name}"
        handle = self._lanes["ssd_write"].submit(lambda: ssd.store(run, 0, view), record.pending, view.nbytes, label)
        ended = Handle("ssd_write")
        """Behind it the buffer may change, whether it was written or not."""

        def written(error: BaseException | None) -> None:
            with self._lock:
                record.on_ssd = error is None and record.changes == changes
                if awaited:
                    self._write_error = error
            self.let_go(record)
            ended.finish()

        record.users += 1
        handle.then(written)
        record.pending.append(ended)

    def _reload(self, record: UnitGradient) -> None:
        view, run = self._ssd_extent(record)
        ssd = self._store.ssd
        assert ssd is not None
        label = f"gradient {record.unit.spec.name}"
        handle = self._lanes["ssd_read"].submit(lambda: ssd.load(run, 0, view), (), view.nbytes, label)
        record.users += 1
        handle.then(lambda _: self.let_go(record))
        record.pending.append(handle)
        record.loading = handle

    def _ssd_extent(self, record: UnitGradient) -> tuple[memoryview, Run]:
        run = self._store.run(record.unit.index, GRAD)
        assert run is not None
        assert self._staging is not None
        assert record.run is not None
        return self._staging.view(record.run, 0, run.count * self._staging.page_bytes), run

    def _exhausted(self, record: UnitGradient) -> str:
        waiting = ", ".join(repr(other.unit.spec.name) for other in self._staged)
        page = self._store.plan.page_bytes
        return (
            f"No room for the gradient of unit {record.unit.spec.name!r}: the buffers are held by {waiting}, whose "
            "parameters have not all received a gradient in this backward. Give wrap() no accumulation_steps, add "
            f"memory.ssd, or raise memory.host by {format_bytes(self._store.plan.layout.total_pages(GRAD) * page)}."
        )

    def _hold_back(self, handle: Handle, nbytes: int) -> None:
        """Keep the bytes on their way to extents bounded."""
        self._in_flight.append((handle, nbytes))
        self._in_flight_bytes += nbytes
        start = time.perf_counter()
        stalled = False
        while self._in_flight and (self._in_flight[0][0].done or self._in_flight_bytes > self._in_flight_limit):
            oldest, size = self._in_flight.popleft()
            stalled = stalled or not oldest.done
            self._in_flight_bytes -= size
            oldest.wait()
        if stalled:
            self._stalled("d2h", time.perf_counter() - start)


def non_finite_message(name: str) -> str:
    """The message for a gradient that is NaN or infinite."""
    return (
        f"The gradient of {name!r} is not finite, the first one in backward; no weight of its unit was changed. Lower "
        "the learning rate, check the loss and the batch, or set clip_grad_norm if it is off. A parameter read outside "
        "its module's forward gives NaN too: read it under `with pagoda.gathered([param]):`."
    )
