"""The engine: owns all parts of a run on a live model, and connects them."""

import atexit
import gc
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch

from pagoda.autograd.accesses import LET_UPDATES_WAIT, Accesses
from pagoda.autograd.activations.graph_memory import GraphMemory
from pagoda.autograd.active_forwards import ActiveForwards
from pagoda.autograd.clipping import Norms
from pagoda.autograd.loss_scale import LossScaler
from pagoda.autograd.stepper import Stepper
from pagoda.autograd.uses import Uses
from pagoda.errors import BudgetError, PagodaError, StorageError, UsageError
from pagoda.interrupts import holding_signals, look, without_signals
from pagoda.memory.page import PageRun
from pagoda.mesh.mesh import Mesh
from pagoda.mesh.shards import Shards
from pagoda.optim.rule import PRECISIONS, Rule
from pagoda.optim.warm import warm_up
from pagoda.parameters.hidden import as_plain
from pagoda.parameters.unit import LiveUnit
from pagoda.plan.lanes import LANES, LaneName, update_threads
from pagoda.plan.placement import LEASES, VERSIONS
from pagoda.plan.planner import Plan
from pagoda.plan.second_placement import Needs, SecondPlacement
from pagoda.plan.tiers import HOST
from pagoda.process import forks
from pagoda.ranks.collective import Collectives
from pagoda.ranks.gathering import Gathering
from pagoda.ranks.one_rank import OneRank
from pagoda.ranks.rank_group import RankGroup
from pagoda.ranks.stages import Links
from pagoda.ranks.transport import Transport
from pagoda.runtime.capture import Capture, CapturedPiece, Saver
from pagoda.runtime.device import Device
from pagoda.runtime.executor import Executor
from pagoda.runtime.gradients import GradientBuffers
from pagoda.runtime.lanes import open_lanes
from pagoda.runtime.leases import Fetcher
from pagoda.runtime.meter import StepMeter
from pagoda.runtime.moving import lose_states, may_move, move_states
from pagoda.runtime.needs import NeedsMeter
from pagoda.runtime.next_update import Groups
from pagoda.runtime.stats import StepStats
from pagoda.runtime.store import Store
from pagoda.runtime.timeline_recorder import TimelineRecorder
from pagoda.runtime.updaters import open_update_stream
from pagoda.schedule.event_log import open_scheduler
from pagoda.schedule.operations import schedule_plan
from pagoda.simulate.timeline import Timeline
from pagoda.threads import Threads, end_dropped, give_back

_OPEN: "weakref.WeakSet[Engine]" = weakref.WeakSet()


T = TypeVar("T")
_TRIES = 8
_log = logging.getLogger("pagoda")


@atexit.register
def _close_all() -> None:
    """Close engines that the user did not close. At exit, the interpreter would abort if it ended lanes inside native
    code."""
    with ExitStack() as stack:
        for engine in _OPEN:
            stack.callback(engine.close)


class Engine:
    """Executes a plan on a live model.

    The compute thread runs forward, backward and `step()`. It calls `accesses.begin` and `accesses.end` around every
    use of a unit, and `stepper.on_gradient` for every gradient. Lanes do the rest. If the model departs
    from the plan, accesses are served on demand, correctly, and counted as faults.
    """

    def __init__(
        self,
        plan: Plan,
        units: list[LiveUnit],
        rule: Rule,
        directories: Mapping[Path, int | None],
        max_grad_norm: float | None,
        poison: bool,
        device: Device,
        scaler: LossScaler,
        links: Links,
        second: SecondPlacement | None = None,
    ) -> None:
        """`links`: this process's place among the ranks, and the means to communicate with them. `second`: when homes
        are chosen again."""
        self._second = second
        self._needs = None if second is None else NeedsMeter(device, second)
        self.units = units
        self.groups = Groups(units)
        self.stats = StepStats()
        self.timeline: Timeline | None = None
        """The last recorded step."""
        self.links = links
        mesh = links.mesh
        self._meter = StepMeter(LANES if links.ranks is None else (*LANES, str(LaneName.COLLECTIVE)))
        self._step = 0
        self._speculations = 0, 0
        """Number of updates before `step()` that were kept and that were called off, up to the last step."""
        self.device = device
        self.ssd_directories = tuple(directories)
        shards = Shards(plan.layout, mesh)
        self.scheduler = open_scheduler(plan, mesh.everyone.rank if mesh.everyone.size > 1 else None)
        store = self.store = Store(plan, directories, poison, device, shards, self.scheduler)
        side_by_side = not plan.layout.weight.copied  # else updates share a work area
        on_cpu = device.torch_device.type == "cpu"
        threads = update_threads(torch.get_num_threads()) if side_by_side else 1
        lanes = open_lanes(len(directories), threads, on_cpu, on_cpu and side_by_side, self._meter.worked)
        self._lanes = lanes
        self.rule = rule
        for weight, kept in plan.layout.forms:
            warm_up(rule, PRECISIONS[weight], kept, elsewhere=bool(plan.placement.pages(HOST, VERSIONS)))
            device.warm_up(rule, PRECISIONS[weight], kept)
        gradients = GradientBuffers(store, self.scheduler, units, lanes, device, self._meter)
        self.gradients = gradients
        one = OneRank(mesh, units, gradients)
        collectives = self.collectives = one if links.ranks is None else self._join(mesh, links.ranks)
        gathering = one if isinstance(collectives, OneRank) else Gathering(collectives, store, lanes)
        leases = self.leases = Fetcher(store, units, device, lanes, self.scheduler, gathering.gather)
        updates = open_update_stream(store, lanes, rule, device)
        self.plan = plan
        """The current plan."""
        self._follow_trace()
        executor = self._executor = Executor(
            self.scheduler, store, units, leases, gradients, updates, lanes[LaneName.UPDATE], device, gathering.share
        )
        self.damage = executor.damage
        accesses = self.accesses = Accesses(self, plan, executor, leases, device, self._meter, collectives)
        group: RankGroup | OneRank = one
        if not isinstance(gathering, OneRank):
            group = RankGroup(gathering, store, units, gradients, device, lanes[LaneName.D2H], executor, accesses.tell)
        self.rank_group = group
        self.graphs = GraphMemory(leases, accesses, store, lanes, device)
        self.graphs.packing.register(units)
        self.active_forwards = ActiveForwards(self.graphs.packing, accesses)
        self.uses = Uses(self.active_forwards, accesses, self.graphs.packing)
        self.saver = Saver()
        self.stepper = Stepper(
            units, self.groups, max_grad_norm, rule, gradients, executor, accesses, scaler, group, links.stages
        )
        self._forks = forks()
        self._threads = Threads(lanes, updates, self.saver, group)
        self._dropped = weakref.finalize(self, end_dropped, self._threads, executor, store, self._forks)
        self._dropped.atexit = False  # `_close_all` is for that
        _OPEN.add(self)

    @property
    def whole_plan(self) -> Plan:
        """The current plan with the activations that steps have shown."""
        return replace(self.plan, activations=self.graphs.plan)

    # --- steps ----------------------------------------------------------------------------------------------

    def step(self, ended: Callable[[], None] = lambda: None, late: bool = True) -> None:
        """Queue every update whose gradients have arrived. Updates run ahead of the next forward. `ended` is called as
        a part of the step. `late`: whether that forward may begin before asynchronous updates have ended."""
        if self._meter.recorder is not None:
            self._meter.recorder.access("step")
        self.active_forwards.check_not_resident("optimizer.step()")  # before it waits for the end of that block
        with self.active_forwards.alone(), as_plain():  # it asks each parameter for its gradient
            self.accesses.check_usable()
            self.check_not_gathered("optimizer.step()")
            self.graphs.offloader.settle()  # its errors leave the whole step to be taken
            self.accesses.compute_lock.run(self._take_step, ended, late)

    @torch.no_grad()
    def _take_step(self, ended: Callable[[], None], late: bool) -> None:
        scale = self.stepper.scaler.scale
        norms = self.stepper.step(late)
        replanned = self._follow_trace()
        self.accesses.end_step()
        self._step += 1
        self._take_stats(norms, scale, replanned)
        ended()
        if self._second is not None and self._needs is not None:
            self._place_again(self._second, self._needs)

    def begin_measuring(self) -> None:
        """Steps begin. What they need beside pages counts from now on."""
        if self._needs is not None:
            self._needs.begin()

    def _place_again(self, second: SecondPlacement, meter: NeedsMeter) -> None:
        """A step has ended. Measure. If it was the last before the second placement, move states. While someone holds
        weights, try again after each of `_TRIES` more steps."""
        meter.end_step(self.store, self.stats.activation_bytes.kept)
        if self._step < second.after:
            return
        needs = reduce(Needs.or_more, self.of_all_ranks("what steps have needed", meter.needs))
        plan = second.plan(self.plan, needs)
        if not all(self.of_all_ranks("the second placement", plan is not None and may_move(self.store))):
            self._second = None
        elif self._step > second.after + _TRIES:
            _log.warning("States stay where they were: weights are held from step to step.")
            self._second = None
        elif plan is not None and self._can_move():
            self._second = None
            if self._move(plan):
                self.stats = replace(self.stats, moved=plan.notes[-1])
            self.restart_clock()

    def _can_move(self) -> bool:
        """Whether states can move now: no rank holds weights, and no update will be tried again. Waits for lanes."""
        self.check_between_steps()
        with suppress(PagodaError):  # an update may be tried again
            self.drain(show=False)
        self.damage.check()
        if not all(self.of_all_ranks("whether updates have ended", self.scheduler.drained)):
            return False
        self.collectives.agree_to_change("moving states to other homes")
        self.accesses.wait_until_idle()
        self.saver.settle()
        gc.collect()  # reference cycles may keep views of leases alive
        return not any(self.of_all_ranks("whether weights are held", self.leases.held))

    def _move(self, plan: Plan) -> bool:
        """Move states to their homes in another plan of the same units, on all ranks. Returns False, with states as
        before, if a tier has no room because something else has taken it. If a drive fails, states are damaged."""
        try:
            self._executor.let_go()
            moved = True
            try:
                self._move_states(plan)
            except BudgetError as error:
                _log.warning("States stay where they were: %s", error)
                moved = False
            if not all(self.of_all_ranks("whether states could move", moved)):
                plan, moved = self.plan, False
                self._move_states(plan)
        except BaseException as error:
            self.damage.note(error)
            lose_states(self.store, plan)
            self.accesses.tell(self.scheduler.moved, schedule_plan(plan))
            raise
        finally:
            self.plan = self.accesses.plan = plan
            self._speculations = 0, 0
            for part in (self.gradients, self.leases, self._threads.updates, self.rank_group, self.graphs):
                part.take_memory()
        # No rank goes on before all have moved, because it may ask others for weights.
        self.of_all_ranks("the end of moving states", None)
        return moved

    def _move_states(self, plan: Plan) -> None:
        move_states(self.store, plan, self.device)
        self.accesses.tell(self.scheduler.moved, schedule_plan(plan))

    def of_all_ranks(self, what: str, mine: T) -> list[T]:
        """Every rank's value. All ranks call this at the same point of their programs, which `what` describes: if some
        are elsewhere, every rank raises UsageError."""
        return self.collectives.announce(what, mine)

    def restart_clock(self) -> None:
        """Count waits from now. Bytes that lanes have moved since the last step still count."""
        self._meter.reset()

    def drain(self, show: bool = True) -> None:
        """Wait until every state is in its home, as the last `step()` left it. `show`: later steps see all updates,
        also asynchronous ones."""
        self.accesses.check_open()
        with self.active_forwards.alone():  # an update may wait for a forward that reads its weights
            self.accesses.drain(show)
        self.damage.check()

    def check_between_steps(self) -> None:
        """Raises UsageError if updates during backward have already changed states since the last `step()`, and
        StorageError if states are damaged."""
        self.accesses.check_usable()
        if self.stepper.updates_have_begun():
            raise UsageError(
                "The state was asked for between backward and step(): with gradient_accumulation_steps announced, some "
                "units have had this step's update already and others have not. Call optimizer.step() first, or "
                f"{LET_UPDATES_WAIT}."
            )

    def check_not_gathered(self, what: str) -> None:
        """Raises UsageError inside a block of `gathered`, because `what` would not change its copies of weights."""
        for unit in self.units:
            for slot in unit.gathered:
                raise UsageError(
                    f"{what} was called inside `with pagoda.gathered(...)` of {unit.name(slot)!r}. The copy there "
                    "would be outdated, and replace the new weights if the block modifies: end the block first."
                )

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, no other thread computes: neither a forward nor another event of training."""
        with self.active_forwards.alone(), self.accesses.compute_lock.lock:
            yield

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Inside, states can be read: updates have ended, as after `drain`, and no other thread begins one. What later
        steps read stays the same. Raises UsageError if states belong to two steps."""
        with self.alone():
            self.check_between_steps()
            self.drain(show=False)
            yield

    def prepare_replacing(self) -> None:
        """Make states ready to be replaced. Raises UsageError if they cannot be replaced here."""
        self.accesses.check_open()
        self.check_not_gathered("optimizer.load_checkpoint()")
        self.active_forwards.check_not_resident("optimizer.load_checkpoint()")

    @contextmanager
    def replacing(self, lags: Sequence[int]) -> Iterator[None]:
        """Inside, all states are replaced, even if they are damaged, after `prepare_replacing`. If that fails halfway,
        they are damaged afterwards. `lags`: by unit, how far the new weights lag, if any do."""
        if self.damage.cause is None:
            try:
                self.accesses.drain()
            except Exception as error:  # damage stays until the end; `step()` finds what is not finite once more
                if self.damage.cause is None and not isinstance(error, PagodaError):
                    raise  # it is a signal's
        self.accesses.compute_lock.run(self._executor.updates.give_up)
        try:
            self.accesses.compute_lock.run(self.stepper.drop_step)
            self.collectives.agree_to_change("loading a checkpoint")
            self.accesses.wait_until_idle()  # what that has called off must have ended before states change
            self.saver.settle()
        finally:
            self._executor.updates.gives_up = False
        try:
            self.accesses.tell(self.scheduler.replaced, lags)
            self.device.settle()  # nothing reads or poisons what is written now
            with self.store.replacing():
                yield
            self.accesses.wait_until_idle()
        except BaseException as error:
            self.damage.note(error)
            raise
        self.accesses.tell(self._executor.restored, lags)

    @contextmanager
    def overwriting(self) -> Iterator[None]:
        """Inside, some states are overwritten by something other than updates. Updates and checkpoints have ended, and
        signals are held back. States are damaged if a disk fails meanwhile, or if any error occurs after the first
        write. Raises StorageError if states are already damaged, because this cannot mend them. Raises UsageError like
        `settled`."""
        self.active_forwards.check_not_resident("A change of weights or other states")
        with self.alone():
            self.check_between_steps()
            self.drain()
            self.collectives.agree_to_change("changing weights or other states")
            self.accesses.wait_until_idle()
            self.saver.settle()
            with holding_signals():
                writes = self.store.writes
                try:
                    yield
                except BaseException as error:
                    if isinstance(error, StorageError) or self.store.writes != writes:
                        self.damage.note(error)
                    raise

    def prepare_capture(self) -> None:
        """Bring states to where the last `step()` leaves them, except for queued updates.

        Asynchronous updates settle. Only then is it known which of them belong to the last step, and where their states
        are.
        """
        self.accesses.tell(self.scheduler.prepare_checkpoint)
        self.accesses.wait(lambda: self.scheduler.checkpoint_prepared, LaneName.UPDATE)
        if self.plan.options.asynchronous:
            self.drain(show=False)

    def capture(
        self, pieces: Callable[[int], Iterator[CapturedPiece]], extents: Mapping[int, Mapping[str, PageRun]]
    ) -> Capture:
        """Start to capture every state as the last `step()` leaves it, after `prepare_capture`. The arguments are those
        of `Capture`."""
        capture = Capture(self.store, pieces, extents)
        self.accesses.tell(self._executor.begin_checkpoint, capture)
        return capture

    def end_capture(self, capture: Capture) -> None:
        """The capture is complete or was given up, so updates need not wait for it."""
        capture.end()
        self._executor.driver.tell(self._executor.end_checkpoint)  # not an event of compute

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(
            "A wrapped model holds no weights to copy or pickle, and neither does its optimizer. Save with "
            "model.state_dict() or optimizer.save_checkpoint(); for a copy, build another model and load the state "
            "dict into it."
        )

    def close(self) -> None:
        """Drain, finish a checkpoint, join every thread, and release memory and SSD space. The model keeps
        placeholders.

        Closes everything, then raises the first error of an update or a checkpoint that was not raised before. Does
        nothing in a forked process, because everything belongs to its parent.
        """
        if not self.accesses.closed and self._forks == forks():
            look()
            without_signals(self._close)

    def _close(self) -> None:
        """Close everything. A signal can end the wait for updates."""
        self.accesses.closed = True
        _OPEN.discard(self)
        self._dropped.detach()
        if self.accesses.stopped:
            self._executor.abandon(UsageError("The optimizer is closed."))
        with ExitStack() as stack:
            stack.callback(give_back, self._executor, self.store)
            stack.callback(self.graphs.offloader.close)
            self._threads.end(stack)
            with suppress(Exception) if self.damage.seen else nullcontext():
                self.accesses.drain()

    # --- a recording ----------------------------------------------------------------------------------------

    def trace_next_step(self) -> None:
        """Record from now until the end of the next `step()`."""
        self._meter.recorder = TimelineRecorder()

    def _end_recording(self, recorder: TimelineRecorder) -> None:
        self._meter.recorder = None
        plan, tier = self.plan, self.plan.lease_tier
        leases = plan.bytes[tier].get(LEASES, 0) if tier is not None else 0
        self.timeline = recorder.timeline(self._meter.stall_s, plan.peak_bytes, tier, leases)

    def _follow_trace(self) -> bool:
        """Update the plan to the steps that the scheduler expects. Returns whether it changed."""
        changed = self.scheduler.trace is not self.plan.trace
        if changed:
            self.plan = self.plan.retraced(self.scheduler.trace)
        return changed

    # --- parts ----------------------------------------------------------------------------------------------

    def _join(self, mesh: Mesh, transport: Transport) -> Collectives:
        """Connect to the other ranks of this stage."""
        transport.connect(self.device.torch_device)
        shards, report = self.store.shards, self._meter.worked
        collectives = Collectives(mesh, transport, shards, self.device, self.units, self.scheduler, report)
        self._lanes[collectives.lane.name] = collectives.lane
        return collectives

    def _take_stats(self, norms: Norms | None, loss_scale: float, replanned: bool) -> None:
        """`norms` are None if the step was skipped."""
        counters = {name: lane.take_counters() for name, lane in self._lanes.items()}
        meter = self._meter
        usage = self.scheduler.usage
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
            peak_bytes=self._peak_bytes(),
            tier_use=meter.tier_use(self.plan),
            accesses=meter.accesses,
            replanned=replanned,
            staleness=dict(self.accesses.staleness),
            updates_kept=usage.kept - self._speculations[0],
            updates_called_off=usage.called_off - self._speculations[1],
            activation_bytes=self.graphs.end_step(),
        )
        self._speculations = usage.kept, usage.called_off
        if meter.recorder is not None:
            self._end_recording(meter.recorder)
        meter.reset()

    def _peak_bytes(self) -> dict[str, int]:
        """tier -> most bytes of pages in use at once, to compare with `Plan.peak_bytes`."""
        usage = self.scheduler.usage
        peaks = self.plan.bytes_in_use(usage.most_frames, usage.most_pages)
        for tier, nbytes in self.graphs.peak_bytes.items():
            peaks[tier] = peaks.get(tier, 0) + nbytes
        return peaks
