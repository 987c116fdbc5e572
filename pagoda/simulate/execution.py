"""Executes what the scheduler asks for, on simulated lanes."""

from collections import deque
from collections.abc import Callable
from itertools import pairwise

from pagoda.plan.layout import WEIGHT
from pagoda.plan.ops import COLLECTIVE, DEVICE, SSD
from pagoda.plan.planner import Plan
from pagoda.plan.traffic import traffic_of
from pagoda.schedule.operations import Kind, Operation
from pagoda.schedule.scheduler import Scheduler
from pagoda.simulate.lanes import SimulatedLanes, Task
from pagoda.simulate.rates import Rates
from pagoda.simulate.updates import SimulatedUpdates

_FETCH_CHUNKS = 4
"""Pieces of a fetch from SSD to a device of its own: one is read while the one before is copied."""


class Execution:
    """Gives every operation a duration, and tells the scheduler when it has ended."""

    def __init__(self, plan: Plan, scheduler: Scheduler, lanes: SimulatedLanes, rates: Rates) -> None:
        self._plan = plan
        self._scheduler = scheduler
        self._lanes = lanes
        self._rates = rates
        self._traffic = traffic = traffic_of(plan)
        on_device = plan.placement.updated_on_device | plan.placement.resident
        updates = [
            SimulatedUpdates(plan, traffic, lanes, rates, self, on_device=where)
            for where in ([False, True] if on_device else [False])
        ]
        self._updates = [updates[unit.index in on_device] for unit in plan.units]
        self._fetches: dict[int, Task] = {}
        """unit -> the end of its latest FETCH."""
        self._versions = [0] * len(plan.units)
        """Of the weights in each unit's home."""
        self._early: dict[int, list[Operation]] = {}
        """unit -> FETCH operations that wait for the update that makes their version: where ranks agree on them."""
        self._spills = 0
        """SPILL operations under way."""
        self._reading: dict[int, None] = {}
        """Units whose UPDATE reads its gradient, the one that began first at the front."""
        self.offloads: deque[tuple[Task, int]] = deque()
        """(end of an OFFLOAD, bytes of the gradient as autograd has made it), in the order in which they began."""
        self.in_use: list[tuple[float, int, int]] = [(0.0, 0, 0)]
        """(seconds, frames of leases, pages of gradient buffers) whenever that has changed."""
        self._start: dict[Kind, Callable[[Operation], None]] = {
            Kind.FETCH: self._fetch,
            Kind.RECLAIM: lambda operation: scheduler.reclaimed(operation, freed=True),
            Kind.OFFLOAD: self._offload,
            Kind.SPILL: self._spill,
            Kind.RELOAD: self._reload,
            Kind.UPDATE: self._update,
            Kind.READ_AHEAD: lambda operation: self._updates[operation.unit].read_ahead(operation),
            Kind.PUBLISH: scheduler.ended,
        }

    def pump(self) -> None:
        """Begin everything that the scheduler asks for now."""
        while operations := self._scheduler.take():
            for operation in operations:
                self._start[operation.kind](operation)
        in_use = self._scheduler.frames_in_use, self._scheduler.buffer_pages_in_use
        if in_use != self.in_use[-1][1:]:
            self.in_use.append((self._lanes.now, *in_use))

    def lane_waited_for(self, unit: int) -> str:
        """The lane that compute waits for, when it waits for the weights of a unit."""
        if self._scheduler.awaits_update(unit):
            return self._updates[unit].lane_waited_for(unit)
        if unit in self._fetches:
            return self._fetches[unit].lane
        return "h2d" if self._plan.lease_tier == DEVICE else "ssd_read"

    def lane_of_buffers(self) -> str:
        """The lane that compute waits for, when it waits for a gradient buffer."""
        if self._spills or not self._reading:
            return "ssd_write" if self._spills else "d2h"
        unit = next(iter(self._reading))
        return self._updates[unit].lane_waited_for(unit)

    def gradient_used(self, update: Operation) -> None:
        """An UPDATE has read its gradients."""
        del self._reading[update.unit]
        self._scheduler.gradient_used(update)
        self.pump()

    def weights_written(self, update: Operation) -> None:
        """An UPDATE has written the new weights."""
        self._versions[update.unit] = update.version
        for fetch in self._early.pop(update.unit, ()):
            self._fetch(fetch)
        self._scheduler.weights_written(update)
        self.pump()

    def ended(self, operation: Operation) -> None:
        """An operation has ended."""
        self._scheduler.ended(operation)
        self.pump()

    def _ends(self, task: Task, operation: Operation) -> None:
        task.then.append(lambda: self.ended(operation))

    def _fetch(self, operation: Operation) -> None:
        unit = self._plan.units[operation.unit]
        if operation.version > self._versions[unit.index]:
            self._early.setdefault(unit.index, []).append(operation)
            return
        traffic, task = self._traffic[unit.index], None
        if traffic.fetched:
            task = self._load(unit.index, f"fetch {unit.name}", traffic.fetched)
        if sent := traffic.gathered:
            seconds = self._rates.gather_seconds(sent, self._plan.layout.group(unit))
            task = self._lanes.submit(COLLECTIVE, f"gather {unit.name}", sent, seconds, [task] if task else [])
        assert task is not None, "a lease moves something"
        self._fetches[unit.index] = task
        self._ends(task, operation)

    def _load(self, unit: int, name: str, nbytes: int) -> Task:
        """From a unit's home to its lease."""
        separate, home = self._plan.lease_tier == DEVICE, self._plan.placement.home(unit, WEIGHT)
        if not separate:
            return self._move("ssd_read", name, nbytes)
        if home != SSD:
            return self._move("h2d", name, nbytes)
        cuts = [nbytes * index // _FETCH_CHUNKS for index in range(_FETCH_CHUNKS + 1)]
        for begin, end in pairwise(cuts):
            copied = self._move("h2d", name, end - begin, [self._move("ssd_read", name, end - begin)])
        return copied

    def _offload(self, operation: Operation) -> None:
        unit = self._plan.units[operation.unit]
        traffic, after = self._traffic[unit.index], []
        if not traffic.offloaded:
            self._scheduler.ended(operation)
            return
        if sent := traffic.reduced:
            seconds = self._rates.ring_seconds(sent, self._plan.layout.group(unit))
            after.append(self._lanes.submit(COLLECTIVE, f"reduce {unit.name}", sent, seconds))
        # Handing gradients over is part of what a parameter costs.
        task = self._move("d2h", f"offload {unit.name}", traffic.offloaded, after, pieces=0)
        self.offloads.append((task, unit.trainable_numel * self._plan.layout.offloaded_itemsize))
        self._ends(task, operation)

    def _spill(self, operation: Operation) -> None:
        self._spills += 1
        unit = self._plan.units[operation.unit]
        task = self._move("ssd_write", f"spill {unit.name}", self._traffic[unit.index].buffer)
        task.then.append(self._spilled)
        self._ends(task, operation)

    def _spilled(self) -> None:
        self._spills -= 1

    def _reload(self, operation: Operation) -> None:
        unit = self._plan.units[operation.unit]
        self._ends(self._move("ssd_read", f"gradient {unit.name}", self._traffic[unit.index].buffer), operation)

    def _update(self, operation: Operation) -> None:
        self._reading[operation.unit] = None
        self._updates[operation.unit].update(operation)

    def _move(self, lane: str, name: str, nbytes: int, after: list[Task] | None = None, pieces: int = 1) -> Task:
        return self._lanes.submit(lane, name, nbytes, self._rates.seconds(lane, nbytes), after or (), pieces)
