"""The engine: follows the live step along the plan, and is the only one who knows all the parts."""

import atexit
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from pagoda.errors import StorageError, UsageError
from pagoda.memory.page import Run
from pagoda.models.hidden import as_plain
from pagoda.optim.formats import arriving_dtype, gradient_kernels, warm_up
from pagoda.optim.rule import ElementwiseRule, Precision, Rule
from pagoda.parallel.mesh import Mesh
from pagoda.parallel.shards import Shards
from pagoda.parallel.wire import Wire
from pagoda.plan.layout import WEIGHT
from pagoda.plan.ops import COLLECTIVE, DEVICE, HOST, LANES, SSD
from pagoda.plan.placement import LEASES
from pagoda.plan.planner import Plan
from pagoda.plan.trace import Phase
from pagoda.process import check_not_forked, forks
from pagoda.runtime.async_updates import AsyncUpdater
from pagoda.runtime.brackets import Brackets
from pagoda.runtime.capture import Capture, Piece
from pagoda.runtime.device import Device, Event
from pagoda.runtime.fetch import Fetcher
from pagoda.runtime.gradients import Gradients
from pagoda.runtime.graph_memory import GraphMemory
from pagoda.runtime.lanes import Handle, labelled, open_lanes
from pagoda.runtime.leases import Lease
from pagoda.runtime.loss_scale import LossScaler
from pagoda.runtime.partition import Partitioner
from pagoda.runtime.pilot import Pilot
from pagoda.runtime.publisher import Publisher
from pagoda.runtime.regions import open_buffers, open_leases, open_staging
from pagoda.runtime.saver import Saver
from pagoda.runtime.shutdown import Threads, end_dropped
from pagoda.runtime.speculation import Speculation
from pagoda.runtime.stats import Meter, StepStats
from pagoda.runtime.stepper import Norms, Stepper
from pagoda.runtime.store import Store
from pagoda.runtime.tape import Tape
from pagoda.runtime.together import Together
from pagoda.runtime.unit import LiveUnit
from pagoda.runtime.updaters import Updaters, open_updater
from pagoda.simulate.timeline import Timeline

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
    `stepper.on_gradient` at every gradient; lanes and the updater do the rest. Where the model departs from the plan,
    accesses are served on demand, correctly and counted as faults.
    """

    def __init__(
        self,
        plan: Plan,
        units: list[LiveUnit],
        precision: Precision,
        rule: Rule,
        directories: Mapping[Path, int | None],
        clip_grad_norm: float | None,
        poison: bool,
        device: Device,
        scaler: LossScaler,
        ranks: tuple[Mesh, Wire] | None = None,
    ) -> None:
        """`ranks` are this process's place among several, and how it talks to the others."""
        self.units = units
        self.stats = StepStats()
        self.timeline: Timeline | None = None
        """The last step that was recorded."""
        self._meter = Meter(LANES if ranks is None else (*LANES, COLLECTIVE))
        self._step = 0
        self.device = device
        self.ssd_directories = tuple(directories)
        shards = Shards(plan.layout, ranks[0] if ranks is not None else None)
        self.store = Store(plan, directories, poison, device, shards)
        update_threads = torch.get_num_threads() if isinstance(rule, ElementwiseRule) else 1
        self._lanes = open_lanes(len(directories), update_threads)
        self.rule = rule
        kept = plan.layout.gradient_dtype
        warm_up(rule, precision, kept)
        if plan.layout.has_device_kernels:
            assert isinstance(rule, ElementwiseRule)
            device.warm_up(rule, precision)
        self.gradients = Gradients(
            self.store,
            open_staging(self.store),
            gradient_kernels(kept, arriving_dtype(kept, plan.layout.weight.dtype)),
            self._lanes,
            device,
            write_behind=not plan.options.update_under_backward,
            stalled=self._meter.stalled,
        )
        self._fetcher = Fetcher(self.store, self._lanes, device)
        self.leases = open_leases(self.store, device, units, self._fill)
        self.together: Together | None = None
        """The dealings with other ranks, where there are any."""
        if ranks is not None:
            reduces = plan.layout.collective_pages > 0
            buffers = open_buffers(self.store, self.gradients.arriving) if reduces else None
            self.together = Together(
                *ranks, self.store, units, self.gradients, buffers, device, self._lanes["d2h"], self._meter.stalled
            )
            self._lanes[COLLECTIVE] = self.together.collectives.lane
        partitioner = None
        if ranks is not None and plan.options.partition_activations:
            partitioner = Partitioner(ranks[0].tensor.get_group())
        self.graphs = GraphMemory(
            self, self.store, directories, self._lanes, device, self._meter.stalled, poison, partitioner
        )
        self.graphs.packing.register(units)
        self.brackets = Brackets(self.graphs.packing, self.acquire, self.leases.drop, self._before_evaluation)
        self._updater, self._streams = open_updater(
            self.store, self.gradients, self._lanes, rule, precision, device, units
        )
        self._publisher: Publisher | None = None
        if isinstance(self._updater, AsyncUpdater):
            assert plan.options.max_staleness is not None
            self._publisher = Publisher(
                self._updater, units, plan.options.max_staleness, self._show_published, self._meter.stalled
            )
        self.damage = self._streams[0].damage
        self.saver = Saver()
        speculated_on = self._updater.cpu if isinstance(self._updater, Updaters) else None
        self._speculation = Speculation(
            plan.placement.speculated, self.gradients, speculated_on, self.saver, self.leases.drop
        )
        self._pilot = Pilot(plan, units, self.leases, self._meter, self._wait, self._may_fetch)
        self.stepper = Stepper(
            units,
            plan.options,
            clip_grad_norm,
            rule,
            self.gradients,
            self._updater,
            self._speculation,
            self.leases,
            self._pilot.urgency,
            self._wait,
            self._meter.stalled,
            scaler,
            self.together,
        )
        self._closed = False
        self._forks = forks()
        self._threads = Threads(self._lanes, self._updater, self._streams, self.saver, self.together)
        self._dropped = weakref.finalize(self, end_dropped, self._threads, self.store, self._forks)
        self._dropped.atexit = False  # `_close_all` is for that
        _OPEN.add(self)

    @property
    def plan(self) -> Plan:
        """The plan followed now."""
        return self._pilot.plan

    @property
    def whole_plan(self) -> Plan:
        """The plan followed now, with what steps have shown of activations."""
        return replace(self.plan, activations=self.graphs.plan)

    # --- accesses -------------------------------------------------------------------------------------------

    def acquire(self, unit: LiveUnit, phase: Phase) -> Lease:
        """The unit's weights, where compute can read them, after every update that is due."""
        if phase is Phase.BACKWARD and unit.updated:
            raise UsageError(
                f"Unit {unit.spec.name!r} is needed in backward after its update under backward. Leave out "
                "wrap(accumulation_steps=...), so that updates wait for optimizer.step()."
            )
        self.check_usable()
        self._speculation.undo(unit)
        unit.used = True
        if self._publisher is not None:
            self._publisher.before_use(unit, phase)
        lease = self._pilot.lease(unit, phase, recorded=phase is Phase.BACKWARD or torch.is_grad_enabled())
        unit.wait_for_update(self._wait)
        if lease.ready is not None:
            self._receive(lease.ready)
        if self._meter.tape is not None:
            self._note_access(self._meter.tape, unit, phase)
        return lease

    def expect(self, units: Sequence[LiveUnit]) -> None:
        """Units of experts that a router has just chosen, in the order in which they will run."""
        self._pilot.expect(units)

    # --- steps ----------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Queue every update whose gradients have arrived; they run ahead of the next forward."""
        self.brackets.drop_interrupted()
        if self._meter.tape is not None:
            self._meter.tape.access("step")
        self.check_usable()
        scale = self.stepper.scaler.scale
        with as_plain():  # it asks each parameter for its gradient
            norms = self.stepper.step()
        if self._publisher is not None:
            self._publisher.end_of_step()
        replanned = self._pilot.end_of_step()
        self._step += 1
        self._take_stats(norms, scale, replanned)

    def drain(self) -> None:
        """Wait until every state is as the last `step()` left it, in its home."""
        self.check_open()
        self._end_updates()
        self.damage.check()

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """All states are to be replaced, whatever has become of them. If that fails half-way, they are damaged."""
        self.check_open()
        self._stop_whatever_failed()
        self.stepper.zero_grad()
        try:
            with self.store.replacing():
                yield
        except BaseException as error:
            self.damage.note(error)
            raise
        self._mend()

    @contextmanager
    def overwriting(self) -> Iterator[None]:
        """Some states are to be overwritten, other than by updates, which have ended then, as has a checkpoint that
        was being written. Damaged states can be overwritten too; `weights_replaced` and `optimizer_replaced` say what
        has been, and mend them when that was all. A disk that fails meanwhile damages them, and so does any error after
        the first of them was written.
        """
        self.check_open()
        self._stop_whatever_failed()
        writes = self.store.writes
        try:
            with self.store.replacing() if self.damage.found else nullcontext():
                yield
        except BaseException as error:
            if isinstance(error, StorageError) or self.store.writes != writes:
                self.damage.note(error)
            raise

    def weights_replaced(self, unit: LiveUnit, slot: int) -> None:
        """The weights of a parameter have been overwritten as a whole."""
        self.weights_changed(unit)
        if self.damage.found:
            self.damage.weights_replaced(unit.index, slot)
            self._mend_if_replaced()

    def optimizer_replaced(self) -> None:
        """Every state that the optimizer keeps beside weights has been overwritten."""
        if self.damage.found:
            self.damage.optimizer_replaced()
            self._mend_if_replaced()

    def prepare_capture(self) -> None:
        """Let states be as the last `step()` leaves them, but for updates that it has queued.

        Asynchronous updates are drained: only then is it known which of them belong to that state, and where it lies.
        """
        self._speculation.undo_all()
        if isinstance(self._updater, AsyncUpdater):
            self.drain()

    def capture(self, pieces: Callable[[int], Iterable[Piece]], extents: Mapping[int, list[Run]]) -> Capture:
        """Start capturing every state as the last `step()` leaves it: `pieces` gives what of a unit is written."""
        pending = self._updater.pending() if isinstance(self._updater, Updaters) else {}
        expected = sorted(self.units, key=self._pilot.urgency, reverse=self.plan.options.update_under_backward)
        of_all = (piece for unit in expected for piece in pieces(unit.index))
        capture = Capture(self.store, of_all, pending, extents)
        for stream in self._streams:
            stream.capture = capture
        return capture

    def end_capture(self, capture: Capture) -> None:
        """No more of it is needed: updates need not wait."""
        for stream in self._streams:
            stream.capture = None
        capture.end()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(
            "A wrapped model holds no weights to copy or pickle, and neither does its optimizer. Save with "
            "model.state_dict() or optimizer.save_checkpoint(); for a copy, build another model and load the state "
            "dict into it."
        )

    def check_open(self) -> None:
        """Raises UsageError once closed, and in a forked process."""
        check_not_forked(self._forks)
        if self._closed:
            raise UsageError(
                "The optimizer is closed, and the states of its model are gone with it. Evaluate the model, and take "
                "state_dict() or save_checkpoint(), before optimizer.close()."
            )

    def check_usable(self) -> None:
        """Raises UsageError once closed, StorageError where states are those of no step."""
        self.check_open()
        self.damage.check()

    def close(self) -> None:
        """Drain, finish a checkpoint, join every thread, give memory and SSD space back. The model keeps placeholders.

        Raises the first error of an update or a checkpoint that nobody has seen, with everything closed. In a forked
        process it does nothing: everything is still the other's.
        """
        if self._closed or self._forks != forks():
            return
        self._closed = True
        _OPEN.discard(self)
        self._dropped.detach()
        with ExitStack() as stack:
            stack.callback(self._give_back)
            stack.callback(self.graphs.close)
            self._threads.end(stack)
            self._end_updates()

    def _give_back(self) -> None:
        """Memory and SSD space. Weights that someone still holds keep the device's memory: tensors there do not."""
        self.gradients.close()
        held = self.leases.close()
        self.store.close(device=not held)

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

    def _end_updates(self) -> None:
        """Wait until every update has ended; raises the first error that nobody has seen."""
        self.brackets.drop_interrupted()
        self._speculation.undo_all()
        self._updater.drain()
        if self.together is not None:
            self.together.drain()
        if self._publisher is not None:
            self._publisher.publish_idle()

    def _stop_whatever_failed(self) -> None:
        """End updates, and a checkpoint that is being written, before states change otherwise.

        An error of an update is not raised: damage stays until it is mended, and `step()` finds a gradient that is not
        finite once more.
        """
        try:
            self._end_updates()
        except Exception as error:
            self.damage.note(error)  # who noticed it first may not have said so yet
            self._end_updates()  # raises an error once; now all have ended
        self.saver.settle()
        if self.damage.found:
            self.stepper.drop_step()

    def _mend_if_replaced(self) -> None:
        if self.damage.all_replaced(sum(len(unit.params) for unit in self.units)):
            self._mend()

    def _mend(self) -> None:
        """Every state has been replaced: what became of the old ones no longer matters."""
        for stream in self._streams:
            stream.forget_errors()
        for unit in self.units:
            unit.update = None
        self.damage.mend()

    def _wait(self, handle: Handle) -> None:
        if handle.done:
            handle.wait()
            return
        start = time.perf_counter()
        with labelled(f"pagoda::wait_{handle.lane}"):
            handle.wait()
        self._meter.stalled(handle.lane, time.perf_counter() - start)

    def _receive(self, fetch: Handle) -> None:
        """Let compute read what a fetch brings: on a device with queues of its own, it need only have been queued."""
        if fetch.done:
            fetch.wait()
            return
        start = time.perf_counter()
        with labelled(f"pagoda::wait_{fetch.lane}"):
            event = fetch.wait_until_issued()
        self.device.wait_for(event)
        self._meter.stalled(fetch.lane, time.perf_counter() - start)

    def _take_stats(self, norms: Norms | None, loss_scale: float, replanned: bool) -> None:
        """`norms` are None where the step was skipped."""
        counters = {name: lane.take_counters() for name, lane in self._lanes.items()}
        meter = self._meter
        kept, undone = self._speculation.take_counts()
        activations = self.graphs.end_of_step()
        self.stats = StepStats(
            step=self._step,
            grad_norm=norms.total if norms is not None else None,
            group_norms=norms.by_group if norms is not None else (),
            loss_scale=loss_scale,
            skipped=norms is None,
            step_s=time.perf_counter() - meter.started,
            stall_s=dict(meter.stall_s),
            busy_s={name: busy for name, (busy, _) in counters.items()},
            bytes_moved={name: nbytes for name, (_, nbytes) in counters.items()},
            peak_bytes=self.peak_bytes(),
            accesses={found.value: count for found, count in meter.accesses.items()},
            replanned=replanned,
            staleness=self._publisher.staleness() if self._publisher is not None else {},
            updates_kept=kept,
            updates_undone=undone,
            activation_bytes=activations,
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
        if self.store.device is not None:
            peaks[DEVICE] += sum(n for line, n in self.plan.bytes[DEVICE].items() if line != LEASES)
        if self.store.ssd is not None:
            peaks[SSD] = self.store.ssd.peak_bytes
        for tier, nbytes in self.graphs.peak_bytes.items():
            peaks[tier] = peaks.get(tier, 0) + nbytes
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
        filled = self._fetcher.fill(unit, into, free)
        if self.together is None:
            return filled
        weights = into.view(self.store.dtype(WEIGHT))[: unit.spec.numel]
        return self.together.gather(unit, weights, filled, free)

    def _may_fetch(self, unit: LiveUnit) -> bool:
        return self._publisher is None or self._publisher.may_fetch(unit)

    def _before_evaluation(self) -> None:
        """Between steps, whoever evaluates asynchronous training sees all of it."""
        if self._publisher is not None and not self._publisher.in_step:
            self.drain()
