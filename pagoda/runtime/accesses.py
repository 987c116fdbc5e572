"""Accesses: compute's way to a unit's weights, and what it has to wait for."""

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pagoda.errors import BudgetError, UsageError
from pagoda.plan.trace import Access, Phase
from pagoda.process import check_not_forked, forks
from pagoda.runtime.device import Device
from pagoda.runtime.executor import Executor
from pagoda.runtime.lanes import labelled
from pagoda.runtime.leases import Lease, Leases
from pagoda.runtime.stats import Found, Meter, Staleness
from pagoda.runtime.store import Store
from pagoda.runtime.timeline_recorder import TimelineRecorder
from pagoda.runtime.unit import LiveUnit
from pagoda.schedule.scheduler import Scheduler


class Accesses:
    """Tells the scheduler of compute's events, and waits where compute must. Only compute's thread calls it.

    The scheduler learns of the first and the last of overlapping uses of a unit in one phase. Backward reads a unit
    once for each of its operations: these reads count as one, which ends when compute does anything else.
    """

    def __init__(
        self,
        store: Store,
        units: Sequence[LiveUnit],
        executor: Executor,
        leases: Leases,
        device: Device,
        meter: Meter,
    ) -> None:
        self._plan = store.plan
        self._store = store
        self._units = units
        self._executor = executor
        self._driver = executor.driver
        self._scheduler: Scheduler = executor.driver.scheduler
        self._leases = leases
        self._device = device
        self._meter = meter
        self._uses = {phase: [0] * len(units) for phase in (Phase.FORWARD, Phase.BACKWARD)}
        """Uses of each unit now, the unfinished read included."""
        self._reading: LiveUnit | None = None
        """The unit that backward has read last, while that read counts as a use."""
        self._last: Access | None = None
        self._forks = forks()
        self.closed = False
        self.before: Callable[[bool], None] = lambda _: None
        """Called before each access, with whether that is part of a step."""
        self.agree: Callable[[str], None] = lambda _: None
        """Returns when all ranks do what it is told; raises UsageError where they do something else."""
        self.owner: object = None
        """Lives as long as anything, such as a graph, can access weights."""
        self.staleness: dict[str, Staleness] = {}
        """unit -> how far its weights lagged at its first use in each step, where updates are asynchronous."""
        self._used: set[int] = set()
        """Units used in this step, where updates are asynchronous."""

    def check_open(self) -> None:
        """Raises UsageError once closed, and in a forked process."""
        check_not_forked(self._forks)
        if self.closed:
            raise UsageError(
                "The optimizer is closed, and the states of its model are gone with it. Evaluate the model, and take "
                "state_dict() or save_checkpoint(), before optimizer.close()."
            )

    def check_usable(self) -> None:
        """Raises UsageError once closed, StorageError if states are damaged."""
        self.check_open()
        self._executor.damage.check()

    def begin(self, unit: LiveUnit, phase: Phase) -> Lease:
        """Compute uses a unit until `end`: its weights, where compute can read them, after every update that is due."""
        if phase is Phase.BACKWARD and self._scheduler.updates.began_early(unit.index):
            raise UsageError(
                f"Unit {unit.spec.name!r} is needed in backward after its update during backward. Leave out "
                "wrap(accumulation_steps=...), so that updates wait for optimizer.step()."
            )
        self.check_usable()
        unit.used = True
        lease = self._leases.get(unit) if self._uses[phase][unit.index] else self._access(unit, phase)
        self._uses[phase][unit.index] += 1
        return lease

    def end(self, unit: LiveUnit, phase: Phase) -> None:
        """One use of a unit has ended."""
        self._uses[phase][unit.index] -= 1
        if not self._uses[phase][unit.index]:
            self._driver.tell(self._scheduler.release, unit.index)

    def read(self, unit: LiveUnit) -> torch.Tensor:
        """A unit's weights for an operation of backward: as long as the tensor is kept, they stay in place."""
        lease = self.begin(unit, Phase.BACKWARD)
        if self._reading is unit:
            self._uses[Phase.BACKWARD][unit.index] -= 1
        else:
            self.end_read()
            self._reading = unit
        return lease.base

    def tell(self, event: Callable[..., None], *arguments: Any) -> None:
        """An event of compute, which reads nothing meanwhile."""
        self.end_read()
        self._driver.tell(event, *arguments)

    def end_read(self) -> None:
        """Backward has gone on from what it read last, or is over."""
        unit, self._reading = self._reading, None
        if unit is not None:
            self.end(unit, Phase.BACKWARD)

    def _access(self, unit: LiveUnit, phase: Phase) -> Lease:
        """Tell of the first of some uses of a unit, and wait until compute can read it."""
        self._device.computing()
        self._executor.poll()
        self._executor.failures.pop(unit.index, None)
        access = Access(unit.index, phase)
        recorded = phase is Phase.BACKWARD or torch.is_grad_enabled()
        self.end_read()
        self.before(recorded)
        self.tell(self._scheduler.access, access, recorded)
        if access != self._last:
            self._last = access
            self._meter.accesses[self._found(unit)] += 1
        try:
            if not self._scheduler.ready(unit.index):
                self._wait(unit)
            lease = self._leases.get(unit)
            if lease.ready is not None and not lease.ready.succeeded:
                self._device.wait_for(lease.ready.wait_until_issued())
        except BaseException:
            self.tell(self._scheduler.release, unit.index)
            raise
        if self._plan.options.max_staleness is not None:
            self._note_staleness(unit, phase)
        if self._meter.recorder is not None:
            self._note(self._meter.recorder, unit, phase)
        return lease

    def expect(self, units: Sequence[LiveUnit]) -> None:
        """Units of experts that a router has just chosen, in the order in which they will run."""
        self.tell(self._scheduler.expect, [unit.index for unit in units])

    def overwritten(self, unit: LiveUnit) -> None:
        """A unit's weights were written at home, or in reach of compute, by other means than an update."""
        unit.version += 1
        self.tell(self._scheduler.overwritten, unit.index)

    def before_evaluation(self) -> None:
        """A forward without gradients begins. Between steps, it sees all of asynchronous training."""
        if self._plan.options.max_staleness is not None and not self._used:
            self.check_usable()
            self.drain()

    def end_step(self) -> None:
        """`step()` was called."""
        self._used.clear()
        self._last = None

    def wait(self, until: Callable[[], bool], lane: str, refuse: Callable[[], None] = lambda: None) -> None:
        """Wait until something is true of the scheduler, or an update has failed, and account for the time as spent on
        a lane. `refuse` is called where nothing can make it true, and raises."""
        if self._driver.ask(until):
            return

        def ended() -> bool:
            return until() or self._scheduler.versions.failed

        start = time.perf_counter()
        with labelled(f"pagoda::wait_{lane}"):
            self._driver.wait(ended, lambda: self._find_way_out(ended, refuse))
        self._meter.stalled(lane, time.perf_counter() - start)
        if not until():
            self._executor.damage.raise_cause()

    def drain(self) -> None:
        """Wait until every update that was asked for has ended, and every other has been undone."""
        scheduler = self._scheduler
        if not self.closed and any(weights.lag for weights in scheduler.versions.of):
            self.agree("applying all asynchronous updates, which an evaluation between steps does too")
        self._executor.poll()
        self.tell(scheduler.drain, True)
        try:
            self.wait(lambda: scheduler.updates.drained, "update")
        finally:
            self.tell(scheduler.drain, False)
        self._drop_ahead()

    def wait_until_idle(self) -> None:
        """Wait until no operation is under way, whatever has failed."""
        self._executor.poll()
        self._driver.wait(lambda: self._scheduler.idle, lambda: None)
        self._drop_ahead()

    def _drop_ahead(self) -> None:
        """Wait until no state is being read ahead: the program may write it, and borrow the ring to do so."""
        for feeder in self._executor.feeders:
            feeder.drop_ahead()

    def _wait(self, unit: LiveUnit) -> None:
        index, scheduler, failures = unit.index, self._scheduler, self._executor.failures
        updates = self._store.update_lane(index)
        self.wait(lambda: not scheduler.awaits_update(index) or index in failures, updates)
        lane = updates if self._leases.in_place(unit) else self._lane_of_fetch(unit)
        self.wait(lambda: scheduler.ready(index) or index in failures, lane, lambda: self._refuse(unit))
        if not scheduler.ready(index) and (error := failures.pop(index, None)) is not None:
            raise error

    def _lane_of_fetch(self, unit: LiveUnit) -> str:
        lease = self._leases.latest(unit)
        if lease is not None and lease.ready is not None:
            return lease.ready.lane
        return "h2d" if self._plan.budgets.device is not None else "ssd_read"

    def _found(self, unit: LiveUnit) -> Found:
        """What the access to a unit that the scheduler was told of last has come upon."""
        if self._leases.in_place(unit):
            return Found.IN_PLACE
        if self._scheduler.found is None:
            return Found.FAULT
        lease = self._leases.latest(unit)
        arrived = self._scheduler.found and lease is not None and lease.ready is not None and lease.ready.done
        return Found.ARRIVED if arrived else Found.LATE

    def _note(self, recorder: TimelineRecorder, unit: LiveUnit, phase: Phase) -> None:
        recorder.access(f"{phase.name.lower()} {unit.spec.name}")
        if self._leases.region is not None:
            recorder.leased(self._scheduler.leases.frames.in_use * self._leases.region.page_bytes)

    def _note_staleness(self, unit: LiveUnit, phase: Phase) -> None:
        if unit.index not in self._used and phase is Phase.FORWARD and unit.trainable:
            before = self.staleness.get(unit.spec.name, Staleness())
            self.staleness[unit.spec.name] = before.and_one(self._scheduler.versions.of[unit.index].lag)
        self._used.add(unit.index)

    def _find_way_out(self, until: Callable[[], bool], refuse: Callable[[], None]) -> None:
        """Nothing is under way that could end a wait: find references that have gone, or `refuse`, which raises."""

        def stuck() -> bool:
            return self._driver.ask(lambda: self._scheduler.idle and not until())

        self._executor.poll()
        if stuck():
            gc.collect()  # reference cycles may keep views of leases alive
            self._executor.poll()
        if stuck():
            refuse()
            raise AssertionError("compute waits, and nothing is under way")

    def _refuse(self, unit: LiveUnit) -> None:
        """There is no room for a unit."""
        tier = self._plan.lease_tier
        names = ", ".join(repr(self._units[holder].spec.name) for holder in self._scheduler.leases.holders())
        raise BudgetError(
            f"No room on {tier} for the weights of unit {unit.spec.name!r}: in use at once are {names}. Raise "
            f"memory.{tier}, or lower memory.unit_limit.",
            tier=tier,
        )
