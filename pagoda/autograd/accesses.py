"""Accesses: how compute gets a unit's weights, and what it waits for."""

import gc
import threading
import time
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch

from pagoda.errors import BudgetError, PagodaError, UsageError
from pagoda.interrupts import allowed, without_signals
from pagoda.parameters.unit import LiveUnit
from pagoda.plan.lanes import LaneName
from pagoda.plan.planner import Plan
from pagoda.plan.trace import Access, Phase
from pagoda.process import check_not_forked, forks
from pagoda.ranks.collective import Collectives
from pagoda.ranks.one_rank import OneRank
from pagoda.runtime.device import Device
from pagoda.runtime.driver import Driver
from pagoda.runtime.executor import Executor
from pagoda.runtime.lanes import labelled
from pagoda.runtime.leases import Fetcher, LeasedWeights
from pagoda.runtime.meter import StepMeter
from pagoda.runtime.stats import Staleness
from pagoda.schedule.records import Lease
from pagoda.schedule.scheduler import Scheduler
from pagoda.schedule.served import Served, count_access

LET_UPDATES_WAIT = "leave out wrap(gradient_accumulation_steps=...) (in a Trainer: Paging(backward_passes=None))"
"""How a user keeps units from being updated during backward."""
_Result = TypeVar("_Result")


class ComputeLock:
    """Gives compute and other threads turns. In a turn, an event of compute changes several things.

    Signals are held back meanwhile, except where the event waits. So an event happens as a whole or, if a wait ends
    with an error, not at all. A PagodaError or torch's out-of-memory error leaves nothing half done either. Any other
    error is a fault of Pagoda or of the system: it damages the training state and stops the driver.
    """

    def __init__(self, driver: Driver, look: Callable[[], None]) -> None:
        """`look` is called when an event begins that is no part of another one."""
        self.lock = threading.RLock()
        """Held for a turn."""
        self._driver = driver
        self._look = look
        self._inside = 0
        """How many events, each a part of the one before, are under way."""
        self._wait_failed = False
        """Whether a wait has ended with an error, which may now end the event."""

    def run(self, event: Callable[..., _Result], *arguments: Any, looks: bool = True) -> _Result:
        """Run an event, which may be a part of another one. Not `looks`: it has happened already, so nothing may come
        before it, and `look` is not called."""
        with self.lock:
            result: _Result = without_signals(self._run, looks, event, *arguments)
            return result

    def _run(self, looks: bool, event: Callable[..., _Result], *arguments: Any) -> _Result:
        self._inside += 1
        try:
            if looks and self._inside == 1:
                self._look()
            return event(*arguments)
        except (PagodaError, torch.OutOfMemoryError):
            raise
        except BaseException as error:
            if not self._wait_failed:
                self._driver.stop(error)
            raise
        finally:
            self._inside -= 1
            if not self._inside:
                self._wait_failed = False

    def waiting(self, wait: Callable[..., _Result], *arguments: Any) -> _Result:
        """Wait for something inside an event, at a point where an exception leaves nothing half done."""
        try:
            return allowed(wait, *arguments)
        except BaseException:
            self._wait_failed = True
            raise


def event(method: Callable[..., _Result]) -> Callable[..., _Result]:
    """A method of an object with a `compute_lock`, as an event."""

    @wraps(method)
    def run(self: Any, *arguments: Any) -> _Result:
        result: _Result = self.compute_lock.run(method, self, *arguments)
        return result

    return run


class Accesses:
    """Tells the scheduler about compute's events, and waits where compute must wait.

    One thread at a time computes, and holds `compute_lock` for each event. A thread that saves or loads holds it
    meanwhile. So for compute, both happen between two events.

    The scheduler is told about the first and the last of overlapping uses of a unit in one phase. Backward reads a unit
    once per operation, and so does code outside forwards. Reads in a row count as one use, which ends when compute does
    anything else.
    """

    def __init__(
        self,
        owner: object,
        plan: Plan,
        executor: Executor,
        leases: Fetcher,
        device: Device,
        meter: StepMeter,
        collectives: Collectives | OneRank,
    ) -> None:
        """`owner` lives as long as anything that can access weights, such as a graph."""
        self._owner = owner
        self.plan = plan
        self.compute_lock = ComputeLock(executor.driver, executor.poll)
        self._executor = executor
        self._driver = executor.driver
        self._scheduler: Scheduler = executor.driver.scheduler
        self._leases = leases
        self._device = device
        self.meter = meter
        self.collectives = collectives
        self._uses = {phase: [0] * len(plan.units) for phase in (Phase.FORWARD, Phase.BACKWARD)}
        """Current uses of each unit, including an unfinished read."""
        self._reading: tuple[LiveUnit, Phase] | None = None
        """The unit that one operation read last, and in which phase, while that read counts as a use."""
        self._last: Access | None = None
        self._forks = forks()
        self.closed = False
        self.before_use: list[Callable[[], None]] = []
        """Functions that write to pages, or refuse, what the user has changed outside of them."""
        self.forget_states: Callable[[], None] = lambda: None
        """Called when all states of the optimizer were replaced. The optimizer sets this."""
        self.staleness: dict[str, Staleness] = {}
        """With asynchronous updates: unit -> how many steps its weights lag behind at its first use in each step."""
        self._used: set[int] = set()
        """With asynchronous updates: the units used in this step."""

    def check_open(self) -> None:
        """Raises UsageError once closed, and in a forked process. Raises StorageError if an event was left half
        done."""
        self.check_not_forked()
        if self.closed:
            raise UsageError(
                "The optimizer is closed, and the states of its model are gone with it. Evaluate the model, and take "
                "state_dict() or save_checkpoint(), before optimizer.close()."
            )
        if self.stopped:
            self._executor.damage.check()

    @property
    def stopped(self) -> bool:
        """Whether an event was left half done, so that the scheduler cannot go on."""
        return self._driver.stopped

    def check_not_forked(self) -> None:
        """Raises UsageError in a forked process."""
        check_not_forked(self._forks)

    def check_usable(self) -> None:
        """Raises UsageError once closed, and StorageError if states are damaged."""
        self.check_open()
        self._executor.damage.check()

    def begin(self, unit: LiveUnit, phase: Phase) -> LeasedWeights:
        """Compute uses a unit until `end`. Returns a lease of its weights in compute's memory, after every update that
        is due. This is a part of an event."""
        if unit.updated:
            raise UsageError(
                f"Unit {unit.spec.name!r} is needed before optimizer.step(), but it was updated during backward. Call "
                f"step() first, or {LET_UPDATES_WAIT}, so that updates wait for step()."
            )
        self.check_usable()
        unit.used = True
        self.computing()
        if self._uses[phase][unit.index]:
            self._wait_on_stream(unit)
        else:
            self._access(unit, phase)
        lease = self._leases.of(unit)
        assert lease is not None, "a unit in use keeps its lease"
        self._uses[phase][unit.index] += 1
        return lease

    def computing(self) -> None:
        """Compute uses weights on the current stream. Frames are overwritten only behind what it has queued there."""
        self._device.computing()

    def take_changes(self) -> None:
        """Before a forward, a step or a checkpoint: take what the user has changed outside of pages."""
        for function in self.before_use:
            function()

    def edition(self, unit: LiveUnit) -> int:
        """How often a unit's weights were changed."""
        return self._scheduler.weights(unit.index).edition

    def is_leased(self, unit: LiveUnit) -> bool:
        """Whether a unit's weights have a place in compute's memory."""
        return self._leases.of(unit) is not None

    @event
    def end(self, unit: LiveUnit, phase: Phase) -> None:
        """One use of a unit has ended."""
        self._uses[phase][unit.index] -= 1
        if not self._uses[phase][unit.index]:
            self._driver.tell(self._scheduler.release, unit.index)

    @event
    def read(self, unit: LiveUnit, phase: Phase = Phase.BACKWARD) -> torch.Tensor:
        """A unit's weights for one operation, of backward or outside forwards. They stay in place as long as the tensor
        is kept. It is made before another thread has a turn, so that nothing moves the weights in between."""
        lease = self.begin(unit, phase)
        if self._reading == (unit, phase):
            self._uses[phase][unit.index] -= 1
        else:
            self.end_read()
            self._reading = unit, phase
        return lease.base.detach()

    def tell(self, event: Callable[..., None], *arguments: Any) -> None:
        """Tell the scheduler an event of compute. Compute reads nothing meanwhile."""
        self.compute_lock.run(self._tell, event, *arguments, looks=False)

    def _tell(self, event: Callable[..., None], *arguments: Any) -> None:
        self.end_read()
        self._driver.tell(event, *arguments)

    @event
    def end_read(self) -> None:
        """Compute has finished the last read."""
        reading, self._reading = self._reading, None
        if reading is not None:
            self.end(*reading)

    def _access(self, unit: LiveUnit, phase: Phase) -> None:
        """Tell the scheduler about the first of overlapping uses of a unit, and wait until compute can read it."""
        unit.fetch_error = None
        access = Access(unit.index, phase)
        recorded = phase is Phase.BACKWARD or torch.is_grad_enabled()
        self.end_read()
        self.collectives.begin_access(recorded)
        found, start = self._scheduler.finds(unit.index, _has_arrived), time.perf_counter()
        self.tell(self._scheduler.access, access, recorded)
        try:
            if not self._scheduler.ready(unit.index):
                self._wait(unit)
            self._wait_on_stream(unit)
        except BaseException:
            self.tell(self._scheduler.release, unit.index)
            raise
        if access != self._last:
            self._last = access
            served = Served(self.plan.source(unit.index), found, time.perf_counter() - start)
            count_access(self.meter.accesses, served)
        if recorded and self.plan.options.asynchronous:
            self._note_staleness(unit, phase)
        if (recorder := self.meter.recorder) is not None:
            recorder.access(f"{phase.name.lower()} {unit.spec.name}")
            recorder.leased(self._scheduler.usage.frames * self.plan.page_bytes)

    def _wait_on_stream(self, unit: LiveUnit) -> None:
        """Let the current stream wait for a unit's weights."""
        lease = self._leases.of(unit)
        if lease is not None and lease.ready is not None and not lease.ready.succeeded:
            self._device.wait_for(self.compute_lock.waiting(lease.ready.wait_until_issued))

    def expect(self, units: Sequence[LiveUnit]) -> None:
        """A router has chosen experts. `units` are their units, in the order in which they will run."""
        self.tell(self._scheduler.expect, [unit.index for unit in units])

    def overwritten(self, unit: LiveUnit) -> None:
        """A unit's weights were changed, at home or in compute's memory, by something other than an update. Leases and
        graphs with the old weights are outdated."""
        self.tell(self._scheduler.overwritten, unit.index)

    def end_step(self) -> None:
        """`step()` was called."""
        self._used.clear()
        self._last = None

    def wait(self, until: Callable[[], bool], lane: str, refuse: Callable[[], None] = lambda: None) -> None:
        """Wait until a condition on the scheduler holds or an update has failed. The waiting time is charged to
        `lane`, or to what that waits for. If nothing can make the condition hold, `refuse` is called, which raises."""
        if self._driver.ask(until):
            return
        self._executor.try_again()

        def ended() -> bool:
            return until() or self._scheduler.broken or self._executor.suspended_by is not None

        with self.meter.waiting(lane), labelled(f"pagoda::wait_{lane}"):
            self.compute_lock.waiting(self._driver.wait, ended, lambda: self._find_way_out(ended, refuse))
        # It may hold no longer: ranks may have added up another gradient since.
        if not until():
            self.compute_lock.waiting(self._executor.raise_failure)

    def drain(self, show: bool = True) -> None:
        """Wait until every requested update has ended, and call speculative ones off. `show`: later steps see all
        updates, also asynchronous ones."""
        scheduler = self._scheduler
        weights = [scheduler.weights(unit.index) for unit in self.plan.units]
        if not self.closed and any(of.lag if show else of.unannounced for of in weights):
            self.collectives.agree_to_change("applying all asynchronous updates")
        self.compute_lock.run(self._drain, show)

    def _drain(self, show: bool) -> None:
        scheduler = self._scheduler
        self.tell(scheduler.drain, True, show)
        try:
            self.wait(lambda: scheduler.drained, LaneName.UPDATE)
        finally:
            self.tell(scheduler.drain, False)
        self._drop_ahead()

    @event
    def wait_until_idle(self) -> None:
        """Wait until no operation is under way, whether operations succeed or fail."""
        self.compute_lock.waiting(self._driver.wait, lambda: self._scheduler.idle, lambda: None)
        self._drop_ahead()

    def _drop_ahead(self) -> None:
        self._executor.updates.drop_ahead()
        self.compute_lock.waiting(self._executor.updates.wait_until_idle)

    def _wait(self, unit: LiveUnit) -> None:
        index, scheduler = unit.index, self._scheduler
        weights = scheduler.weights(index)
        updates = self.plan.placement.update_lane(index, self.plan.layout.states)
        self.wait(lambda: not weights.await_update or unit.fetch_error is not None, updates)
        lane = updates if self._leases.in_place(unit) else self._lane_of_fetch(unit)
        self.wait(lambda: scheduler.ready(index) or unit.fetch_error is not None, lane, lambda: self._refuse(unit))
        error, unit.fetch_error = unit.fetch_error, None  # its traceback keeps tensors alive
        if error is not None and not scheduler.ready(index):
            self.compute_lock.waiting(raise_error, error)

    def _lane_of_fetch(self, unit: LiveUnit) -> str:
        lease = self._leases.of(unit)
        if lease is not None and lease.ready is not None:
            return lease.ready.lane
        return LaneName.H2D if self.plan.budgets.device is not None else LaneName.SSD_READ

    def _note_staleness(self, unit: LiveUnit, phase: Phase) -> None:
        if unit.index not in self._used and phase is Phase.FORWARD and unit.trainable:
            before = self.staleness.get(unit.spec.name, Staleness())
            self.staleness[unit.spec.name] = before.and_one(self._scheduler.weights(unit.index).lag)
        self._used.add(unit.index)

    def _find_way_out(self, until: Callable[[], bool], refuse: Callable[[], None]) -> None:
        """No operation under way can end a wait. Look for references that have gone; without any, call `refuse`, which
        raises."""

        def stuck() -> bool:
            return self._driver.ask(lambda: self._scheduler.idle and not until())

        for collects in (False, True):
            if collects:
                gc.collect()  # reference cycles may keep views of leases alive
            self.compute_lock.run(self._executor.poll)
            if not stuck():
                return
        self._executor.raise_spill_failure()
        refuse()
        raise AssertionError("compute waits, and nothing is under way")

    def _refuse(self, unit: LiveUnit) -> None:
        """Raise the error for a unit that has no room."""
        tier = self.plan.lease_tier
        names = ", ".join(repr(self.plan.units[holder].name) for holder in self._scheduler.holders())
        raise BudgetError(
            f"No room on {tier} for the weights of unit {unit.spec.name!r}: in use at once are {names}. Raise "
            f"memory.{tier}, or lower memory.unit_limit.",
            tier=tier,
        )


def raise_error(error: BaseException) -> None:
    """Raise an error of something that was waited for."""
    raise error


def _has_arrived(lease: Lease) -> bool:
    """Whether the weights of a lease are in compute's memory."""
    leased: LeasedWeights | None = lease.payload
    return leased is not None and (leased.ready is None or leased.ready.done)
