"""The engine: follows the live step along the plan, and is the only one who knows all the parts."""

import atexit
import math
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

import torch
from torch.profiler import record_function

from pagoda.errors import NonFiniteGradientError, UsageError
from pagoda.memory.page import Run
from pagoda.optim.adamw import AdamW, Hyper, Precision
from pagoda.optim.kernels import kernels_for, warm_up
from pagoda.plan.layout import WEIGHT
from pagoda.plan.ops import HOST, SSD
from pagoda.plan.placement import LEASES
from pagoda.plan.planner import Plan
from pagoda.plan.timeline import Timeline
from pagoda.plan.trace import Phase
from pagoda.runtime.async_updates import AsyncUpdater
from pagoda.runtime.brackets import Brackets
from pagoda.runtime.capture import Capture, Piece
from pagoda.runtime.device import Device, Event
from pagoda.runtime.fetch import Fetcher
from pagoda.runtime.gradients import Gradients, UnitGradient
from pagoda.runtime.lanes import SSD_THREADS, Handle, Lane
from pagoda.runtime.leases import Lease
from pagoda.runtime.next_update import Group, check_frozen, check_hypers_are_as_used, next_hypers, segments_of
from pagoda.runtime.packing import Packing, outside_use
from pagoda.runtime.pilot import Pilot
from pagoda.runtime.publisher import Publisher
from pagoda.runtime.regions import open_leases, open_staging
from pagoda.runtime.saver import Saver
from pagoda.runtime.speculation import Speculation
from pagoda.runtime.stats import Meter, StepStats
from pagoda.runtime.store import Store
from pagoda.runtime.tape import Tape
from pagoda.runtime.unit import LiveUnit
from pagoda.runtime.updates import BlockStream, Updater, non_finite_message

_OPEN: "weakref.WeakSet[Engine]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close what the user did not: lanes that the interpreter ends inside native code would abort the process."""
    with ExitStack() as stack:
        for engine in _OPEN:
            stack.callback(engine.close)


class Engine:
    """Executes a plan on a live model.

    The compute thread (whoever runs forward, backward and `step()`) calls `acquire` at every use of a unit and
    `on_gradient` at every gradient; lanes and the updater do the rest. Where the model departs from the plan,
    accesses are served on demand, correctly and counted as faults.
    """

    def __init__(
        self,
        plan: Plan,
        units: list[LiveUnit],
        precision: Precision,
        rule: AdamW,
        directories: Mapping[Path, int | None],
        clip_grad_norm: float | None,
        poison: bool,
        device: Device,
    ) -> None:
        self.units = units
        self.clip_grad_norm = clip_grad_norm
        self.stats = StepStats()
        self.group_of: Callable[[LiveUnit, int], Group]
        """The param group of a parameter; set by the optimizer."""
        self.timeline: Timeline | None = None
        """The last step that was recorded."""
        self._meter = Meter()
        self._step = 0
        self.device = device
        self.ssd_directories = tuple(directories)
        self.store = Store(plan, directories, poison, device)
        ssd_threads = SSD_THREADS * max(1, len(directories))
        self._lanes = {
            "h2d": Lane("h2d"),
            "d2h": Lane("d2h"),
            "ssd_read": Lane("ssd_read", ssd_threads),
            "ssd_write": Lane("ssd_write", ssd_threads),
            "update": Lane("update", torch.get_num_threads()),
        }
        self._rule = rule
        warm_up(precision, rule.moments)
        kernels = kernels_for(precision, rule.moments)
        self.gradients = Gradients(
            self.store,
            open_staging(self.store),
            kernels,
            self._lanes,
            device,
            write_behind=not plan.options.update_under_backward,
            stalled=self._meter.stalled,
        )
        self._fetcher = Fetcher(self.store, self._lanes, device)
        self.leases = open_leases(self.store, device, units, self._fill, poison)
        self.packing = Packing(self)
        self.packing.register(units)
        self.brackets = Brackets(self.packing, self.acquire, self._before_evaluation)
        stream = BlockStream(self.store, kernels, self._lanes, lambda record: self.gradients.release(record))
        self._updater: Updater | AsyncUpdater
        self._publisher: Publisher | None = None
        if plan.options.max_staleness is None:
            self._updater = Updater(self.store, self.gradients, stream)
        else:
            self._updater = AsyncUpdater(self.store, units, stream)
            self._publisher = Publisher(
                self._updater, units, plan.options.max_staleness, self._show_published, self._meter.stalled
            )
        self._stream = stream
        self.saver = Saver()
        speculated_on = self._updater if isinstance(self._updater, Updater) else None
        self._speculation = Speculation(
            plan.placement.speculated, self.gradients, speculated_on, self.saver, self.leases.drop
        )
        self._pilot = Pilot(plan, units, self.leases, self._meter, self._wait, self._may_fetch)
        self._due: list[LiveUnit] = []
        """Units whose update under backward waits for a graph to let go of their weights."""
        self._norm_terms: dict[int, UnitGradient] = {}
        self._used_groups: dict[int, Hyper] = {}
        self._manual_scale: float | None = None
        self._closed = False
        _OPEN.add(self)

    @property
    def plan(self) -> Plan:
        """The plan followed now."""
        return self._pilot.plan

    # --- accesses -------------------------------------------------------------------------------------------

    def acquire(self, unit: LiveUnit, phase: Phase) -> Lease:
        """The unit's weights, where compute can read them, after every update that is due."""
        if phase is Phase.BACKWARD and unit.updated:
            raise UsageError(
                f"Unit {unit.spec.name!r} is needed in backward after its update under backward. Leave out "
                "wrap(accumulation_steps=...), so that updates wait for optimizer.step()."
            )
        self._speculation.undo(unit)
        unit.used = True
        if self._publisher is not None:
            self._publisher.before_use(unit, phase)
        lease = self._pilot.lease(unit, phase, recorded=phase is Phase.BACKWARD or torch.is_grad_enabled())
        unit.wait_for_update(self._wait)
        if lease.ready is not None:
            self._wait(lease.ready)
        if self._meter.tape is not None:
            self._note_access(self._meter.tape, unit, phase)
        return lease

    # --- gradients ------------------------------------------------------------------------------------------

    def on_gradient(self, unit: LiveUnit, slot: int, grad: torch.Tensor, accumulate: bool) -> None:
        """Autograd has finished one parameter's gradient."""
        announced = self.plan.options.accumulation_steps
        if not unit.used:
            raise UsageError(outside_use(unit.name(slot)))
        if unit.updated:
            raise UsageError(
                f"{unit.name(slot)!r} received a gradient after its update under backward: more backward passes than "
                f"the {announced} announced by wrap(accumulation_steps=...) ran before optimizer.step(), or a "
                "reentrant checkpoint delivers gradients in parts (use use_reentrant=False)."
            )
        if grad.layout is not torch.strided:
            raise UsageError(f"{unit.name(slot)!r} received a sparse gradient; build it with sparse=False.")
        self._speculation.undo(unit)
        if unit.update is not None:
            unit.wait_for_update(self._wait)
        if self._manual_scale is not None:
            raise UsageError(
                f"{unit.name(slot)!r} received a gradient after optimizer.clip_grad_norm_, whose factor is for the "
                "gradients before it. Clip after the last backward, right before optimizer.step()."
            )
        record = self.gradients.add(unit, slot, grad, accumulate)
        if announced is not None and record.arrivals[slot] > announced:
            raise UsageError(
                f"{unit.name(slot)!r} received {record.arrivals[slot]} gradients since the last optimizer.step(), but "
                f"wrap(accumulation_steps={announced}) announced {announced}. Announce as many as you run."
            )
        if record.complete and record.arrivals[slot] == announced:
            self._due.append(unit)
        self._update_due()

    def zero_grad(self) -> None:
        """Drop the gradients of this step."""
        if any(unit.updated for unit in self.units):
            raise UsageError(
                "Gradients were already applied under backward, so they cannot be dropped: call optimizer.step() after "
                "every announced backward, or leave out wrap(accumulation_steps=...)."
            )
        self._speculation.undo_all()
        self.gradients.clear()
        self._due.clear()
        self._manual_scale = None

    # --- the update -----------------------------------------------------------------------------------------

    def grad_norm(self) -> float:
        """Global 2-norm of this step's gradients; waits until all have arrived in their extents.

        Raises NonFiniteGradientError when one is NaN or infinite.
        """
        terms = {**self._norm_terms, **{r.unit.index: r for r in self.gradients.records()}}
        start = time.perf_counter()
        for record in terms.values():
            record.settle()
        self._meter.stalled("d2h", time.perf_counter() - start)
        for index in sorted(terms):
            name = terms[index].non_finite()
            if name is not None:
                raise NonFiniteGradientError(non_finite_message(name))
        return math.sqrt(math.fsum(s for i in sorted(terms) for s in self._square_sums(terms[i])))

    def scale_for(self, norm: float, limit: float) -> float:
        """The factor that clips gradients of 2-norm `norm` to `limit`, as torch's clip_grad_norm_ computes it."""
        return min(1.0, limit / (norm + 1e-6))

    def clip(self, limit: float) -> float:
        """Clip this step's gradients; returns their norm before."""
        if self.plan.options.update_under_backward:
            raise UsageError(
                "optimizer.clip_grad_norm_ comes too late: units are updated under backward. Pass "
                "wrap(clip_grad_norm=...), or leave out accumulation_steps."
            )
        norm = self.grad_norm()
        self._manual_scale = self.scale_for(norm, limit)
        return norm

    def step(self) -> None:
        """Queue every update whose gradients have arrived; they run ahead of the next forward."""
        self.brackets.drop_interrupted()
        if self._meter.tape is not None:
            self._meter.tape.access("step")
        check_hypers_are_as_used(self.units, self._used_groups, self.group_of)
        check_frozen(self.units)
        try:
            norm = self.grad_norm()
        except NonFiniteGradientError:
            self._abandon()
            raise
        scale = 1.0
        if self._manual_scale is not None:
            scale = self._manual_scale
        elif self.clip_grad_norm is not None:
            scale = self.scale_for(norm, self.clip_grad_norm)
        if scale != 1.0:
            self._speculation.undo_all()
        for record in self.gradients.records():
            self._queue_update(record, scale)
        had_gradients = bool(self._norm_terms)
        if had_gradients:
            self._speculation.end_of_step(clipped=scale != 1.0)
        self._clear_step()
        if self._publisher is not None:
            self._publisher.end_of_step()
        replanned = self._pilot.end_of_step()
        self._step += 1
        self._take_stats(norm if had_gradients else None, replanned)

    def drain(self) -> None:
        """Wait until every state is as the last `step()` left it, in its home."""
        self.brackets.drop_interrupted()
        self._speculation.undo_all()
        self._updater.drain()
        if self._publisher is not None:
            self._publisher.publish_idle()

    def settle(self) -> None:
        """Drain, and let a checkpoint that is being written finish: before states change other than by updates."""
        self.drain()
        self.saver.settle()

    def prepare_capture(self) -> None:
        """Let states be as the last `step()` leaves them, but for updates that it has queued.

        Asynchronous updates are drained: only then is it known which of them belong to that state, and where it lies.
        """
        self._speculation.undo_all()
        if not isinstance(self._updater, Updater):
            self.drain()

    def capture(self, pieces: Callable[[int], Iterable[Piece]], extents: Mapping[int, list[Run]]) -> Capture:
        """Start capturing every state as the last `step()` leaves it: `pieces` gives what of a unit is written."""
        pending = self._updater.pending() if isinstance(self._updater, Updater) else {}
        expected = sorted(self.units, key=self._pilot.urgency, reverse=self.plan.options.update_under_backward)
        of_all = (piece for unit in expected for piece in pieces(unit.index))
        capture = self._stream.capture = Capture(self.store, of_all, pending, extents)
        return capture

    def end_capture(self, capture: Capture) -> None:
        """No more of it is needed: updates need not wait."""
        self._stream.capture = None
        capture.end()

    def close(self) -> None:
        """Drain, finish a checkpoint, join every thread, give memory and SSD space back. The model keeps placeholders.

        Raises the first error of an update or a checkpoint that nobody has seen, with everything closed.
        """
        if self._closed:
            return
        self._closed = True
        _OPEN.discard(self)
        with ExitStack() as stack:
            stack.callback(self.store.close)
            stack.callback(self.leases.close)
            for name in ("ssd_write", "update", "d2h", "h2d", "ssd_read"):  # from the last: each feeds those before it
                stack.callback(self._lanes[name].close)
            stack.callback(self._updater.close)
            stack.callback(self.saver.close)
            self.drain()

    # --- a recording ----------------------------------------------------------------------------------------

    def trace_next_step(self) -> None:
        """Record from now until the end of the next `step()`."""
        self._record_to(Tape())

    def _record_to(self, tape: Tape | None) -> None:
        self._meter.tape = tape
        for lane in self._lanes.values():
            lane.tape = tape

    def _note_access(self, tape: Tape, unit: LiveUnit, phase: Phase) -> None:
        tape.access(f"{phase.name.lower()} {unit.spec.name}")
        if self.leases.region is not None:
            tape.leased(self.leases.region.pool.in_use * self.leases.region.page_bytes)

    def _end_recording(self, tape: Tape) -> None:
        self._record_to(None)
        plan, tier = self.plan, self.plan.lease_tier
        leases = plan.bytes[tier].get(LEASES, 0) if tier is not None else 0
        self.timeline = tape.timeline(self._meter.stall_s, plan.peak_bytes, tier, leases)

    # --- parts ----------------------------------------------------------------------------------------------

    def _square_sums(self, record: UnitGradient) -> list[float]:
        """Square sums of the parameters whose gradient this step uses, in slot order."""
        used = record.used
        if used is None:
            params = record.unit.params
            used = [slot for slot in range(record.unit.trainable) if params[slot].grad is not None]
        return [record.square_sums[slot] for slot in used]

    def _clear_step(self) -> None:
        self._due.clear()
        self._norm_terms.clear()
        self._used_groups.clear()
        self._manual_scale = None
        for unit in self.units:
            unit.used = False
            unit.updated = False

    def _abandon(self) -> None:
        """Leave a step whose gradients are not finite: nothing of it may be applied or wait to be."""
        self._speculation.undo_all()
        self.gradients.clear()
        for unit in self.units:
            for param in unit.params:
                param.grad = None
            if unit.updated and unit.update is not None:
                with suppress(NonFiniteGradientError):
                    unit.update.wait()
                unit.update = None
        with suppress(NonFiniteGradientError):
            self._updater.drain()
        self._clear_step()

    def _queue_update(self, record: UnitGradient, scale: float) -> None:
        """Queue one unit's update with the hyperparameters as they are now, or keep the one that was speculated on."""
        unit = record.unit
        hypers = next_hypers(unit, self.group_of, scale)
        segments = segments_of(unit, hypers, self._rule)
        self._norm_terms[unit.index] = record
        kept = self._speculation.confirm(record, segments)
        if kept is None:
            self.gradients.take(record)
        record.used = list(hypers)
        for slot, hyper in hypers.items():
            unit.params[slot].grad = None
            unit.steps[slot] = hyper.step
            self._used_groups[id(unit.params[slot])] = hyper
        if not segments:
            self.gradients.release(record)
            return
        if isinstance(self._updater, Updater):
            unit.version += 1
            unit.update = kept or self._updater.submit(record, segments, self._pilot.urgency(unit))
        else:
            self._updater.submit(record, segments, self._pilot.urgency(unit))
        self.leases.drop(unit)

    def _speculate(self, record: UnitGradient) -> None:
        """Update a unit as `step()` will if it clips nothing."""
        unit = record.unit
        if self._speculation.may_begin(unit):
            segments = segments_of(unit, next_hypers(unit, self.group_of, 1.0), self._rule)
            self._speculation.begin(record, segments, self._pilot.urgency(unit))

    def _update_due(self) -> None:
        """Queue updates under backward, except where a graph may still read the weights."""
        if not self._due:
            return
        waiting = []
        for unit in self._due:
            lease = self.leases.get(unit)
            if unit.packed or unit.active or (lease is not None and lease.held):
                waiting.append(unit)
                continue
            record = self.gradients.get(unit)
            assert record is not None
            if self.plan.options.update_under_backward:
                unit.updated = True
                self._queue_update(record, 1.0)
            else:
                self._speculate(record)
        self._due = waiting

    def _wait(self, handle: Handle) -> None:
        if handle.done:
            handle.wait()
            return
        start = time.perf_counter()
        with record_function(f"pagoda::wait_{handle.lane}"):
            handle.wait()
        self._meter.stalled(handle.lane, time.perf_counter() - start)

    def _take_stats(self, norm: float | None, replanned: bool) -> None:
        counters = {name: lane.take_counters() for name, lane in self._lanes.items()}
        meter = self._meter
        kept, undone = self._speculation.take_counts()
        self.stats = StepStats(
            step=self._step,
            grad_norm=norm,
            step_s=time.perf_counter() - meter.started,
            stall_s=dict(meter.stall_s),
            busy_s={name: busy for name, (busy, _) in counters.items()},
            bytes_moved={name: nbytes for name, (_, nbytes) in counters.items()},
            peak_bytes=self.peak_bytes(),
            prefetch_hit_rate=meter.hit_rate,
            faults=meter.faults,
            replanned=replanned,
            staleness=self._publisher.staleness() if self._publisher is not None else {},
            updates_kept=kept,
            updates_undone=undone,
        )
        if meter.tape is not None:
            self._end_recording(meter.tape)
        meter.reset()

    def peak_bytes(self) -> dict[str, int]:
        """tier -> most bytes of pages in use at once: what to hold against the plan's ledger."""
        peaks = {HOST: self.store.host_bytes + self.gradients.staging_peak_bytes}
        if self.leases.region is not None:
            tier = self.plan.lease_tier or HOST
            peaks[tier] = peaks.get(tier, 0) + self.leases.region.peak_bytes
        if self.store.ssd is not None:
            peaks[SSD] = self.store.ssd.peak_bytes
        return peaks

    def weights_changed(self, unit: LiveUnit) -> None:
        """A unit's weights were overwritten at home: leases and graphs that hold the old ones are out of date."""
        if self._publisher is None or not self._publisher.publish(unit):
            unit.version += 1
            self.leases.drop(unit)

    def _show_published(self, unit: LiveUnit) -> None:
        """Other weights of a unit are the front: what is leased and packed from now on is they."""
        unit.version += 1
        lease = self.leases.get(unit)
        if lease is not None and lease.run is None:
            self.leases.move_home(unit, self.store.in_place(unit.index, WEIGHT, unit.spec.numel))
        self.leases.drop(unit)

    def _fill(self, unit: LiveUnit, into: torch.Tensor, free: Event) -> Handle:
        """Start filling a lease."""
        if self._publisher is not None:
            self._publisher.before_fetch(unit)
        return self._fetcher.fill(unit, into, free)

    def _may_fetch(self, unit: LiveUnit) -> bool:
        return self._publisher is None or self._publisher.may_fetch(unit)

    def _before_evaluation(self) -> None:
        """Between steps, whoever evaluates asynchronous training sees all of it."""
        if self._publisher is not None and not self._publisher.in_step:
            self.drain()
