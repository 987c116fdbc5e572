"""Carries out the scheduler's operations on simulated lanes."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise

from pagoda.plan.lanes import LaneName
from pagoda.plan.layout import GRAD, WEIGHT
from pagoda.plan.planner import Plan
from pagoda.plan.tiers import DEVICE, SSD
from pagoda.plan.traffic import traffic_of
from pagoda.schedule.operations import Fetch, Offload, Operation, Question, ReadAhead, Reload, Share, Spill, Update
from pagoda.schedule.scheduler import Scheduler
from pagoda.schedule.waits import InFlight
from pagoda.simulate.clock import SimulatedLanes, Task, Work
from pagoda.simulate.rates import Rates
from pagoda.simulate.updates import SimulatedUpdates

_FETCH_CHUNKS = 4
"""Number of pieces of a fetch from SSD to a separate device. One is read while the previous one is copied."""

Chain = Sequence[Work]
"""Pieces of work, one after another."""


class Execution:
    """Gives what moves or computes a duration, and tells the scheduler when it has ended. All else takes none."""

    def __init__(self, plan: Plan, scheduler: Scheduler, lanes: SimulatedLanes, rates: Rates) -> None:
        self._plan = plan
        self._scheduler = scheduler
        self._lanes = lanes
        self._rates = rates
        self._traffic = traffic = traffic_of(plan)
        self._chains: dict[type[Operation], Callable[[int, bool], Sequence[Chain]]] = {
            Fetch: cache(self._fetch),
            Offload: cache(self._offload),
            Spill: cache(partial(self._transfer, LaneName.SSD_WRITE, "spill")),
            Reload: cache(partial(self._transfer, LaneName.SSD_READ, "gradient")),
        }
        """The work of an operation, by its unit, and whether it adds a gradient to an earlier one. There is none for a
        gradient that stays where it is made, and for weights that are already in RAM."""
        reports = self._gradient_used, self._weights_written, self._ended
        self._updates = SimulatedUpdates(plan, traffic, lanes, rates, *reports)
        self._waiting: dict[int, list[Operation]] = {}
        """unit -> operations that wait until their version is there: SHARE, and FETCH if ranks must fetch alike."""
        self.offloads = InFlight[Task]()
        """Gradients on their way from autograd."""
        self.in_use: list[tuple[float, tuple[int, int]]] = [(0.0, (0, 0))]
        """(seconds, (frames of leases, pages of gradient buffers)) at each change."""

    def pump(self) -> None:
        """Begin all operations that the scheduler asks for now."""
        while operations := self._scheduler.take():
            for operation in operations:
                self._begin(operation)
        usage = self._scheduler.usage
        in_use = usage.frames, usage.pages
        if in_use != self.in_use[-1][1]:
            self.in_use.append((self._lanes.now, in_use))

    def _begin(self, operation: Operation) -> None:
        unit = operation.unit
        if isinstance(operation, Question):
            self._scheduler.reclaimed(operation, freed=True)
        elif isinstance(operation, Update):
            self._updates.update(operation)
        elif isinstance(operation, ReadAhead):
            self._updates.read_ahead(operation)
        elif self._must_wait(operation):
            self._waiting.setdefault(unit, []).append(operation)
        elif isinstance(operation, Share):
            self._updates.share(unit).then.append(partial(self._ended, operation))
        elif (of := self._chains.get(type(operation))) and (chains := of(unit, self._adds(operation))):
            self._give(operation, chains)
        elif operation.reported:
            self._scheduler.ended(operation)

    def _must_wait(self, operation: Operation) -> bool:
        """Whether an operation waits for an update, or for other ranks' parts of it."""
        weights = self._scheduler.weights(operation.unit)
        if isinstance(operation, Share):
            return operation.version > weights.newest
        if not isinstance(operation, Fetch):
            return False
        shared = any(update.gradient is operation.awaited for update in weights.sharing)
        return shared or operation.lease.version > weights.newest

    def _give(self, operation: Operation, chains: Sequence[Chain]) -> None:
        """Submit an operation to the lanes. It ends with its last chain."""
        for chain in chains:
            task = self._lanes.in_turn(chain)
        task.then.append(partial(self._ended, operation))
        if isinstance(operation, Offload):
            unit = self._plan.units[operation.unit]
            made = unit.trainable_numel * self._plan.layout.offloaded_itemsize(unit)
            self.offloads.add(task, made)

    def _adds(self, operation: Operation) -> bool:
        """Whether an operation adds a gradient to an earlier one of its step."""
        if not isinstance(operation, Offload):
            return False
        adds, operation.gradient.payload = operation.gradient.payload is not None, "there"
        return adds

    def _gradient_used(self, update: Update) -> None:
        self._scheduler.gradient_used(update)
        self.pump()

    def _weights_written(self, update: Update) -> None:
        self._scheduler.weights_written(update)
        self._begin_waiting(update.unit)
        self.pump()

    def _begin_waiting(self, unit: int) -> None:
        """Begin the operations whose version is there now."""
        for operation in self._waiting.pop(unit, ()):
            self._begin(operation)

    def _ended(self, operation: Operation) -> None:
        self._scheduler.ended(operation)
        if isinstance(operation, Share):
            self._begin_waiting(operation.unit)
        self.pump()

    def _transfer(self, lane: str, verb: str, index: int, adds: bool) -> Sequence[Chain]:
        """A gradient to SSD or back."""
        return [[self._lanes.move(lane, f"{verb} {self._plan.units[index].name}", self._traffic[index].buffer)]]

    def _offload(self, index: int, adds: bool) -> Sequence[Chain]:
        """A gradient through ranks to its buffer."""
        unit, traffic, layout = self._plan.units[index], self._traffic[index], self._plan.layout
        chain = []
        if sent := traffic.reduced:
            seconds = self._rates.ring_seconds(sent, layout.group(unit))
            chain.append(Work(LaneName.COLLECTIVE, f"reduce {unit.name}", sent, seconds))
        if sent := traffic.merged:
            chain.append(Work(LaneName.COLLECTIVE, f"reduce {unit.name}", sent, self._rates.merge_seconds(sent)))
        if traffic.offloaded:  # handing gradients over is part of what a parameter costs
            move = self._lanes.move(LaneName.D2H, f"offload {unit.name}", traffic.offloaded, pieces=0)
            kept = traffic.offloaded * layout.itemsize(unit, GRAD) // layout.offloaded_itemsize(unit)
            if adds or kept > traffic.offloaded:  # while one piece is added, the next ones come
                move.seconds = max(move.seconds, self._rates.adding_seconds(traffic.offloaded + (1 + adds) * kept))
            chain.append(move)
        elif unit.on_host:  # it is made in RAM, and stored or added there
            touched = (2 + adds) * layout.elements(unit, GRAD) * layout.itemsize(unit, GRAD)
            chain.append(Work(LaneName.D2H, f"offload {unit.name}", 0, self._rates.adding_seconds(touched)))
        return [chain] if chain else []

    def _fetch(self, index: int, adds: bool) -> Sequence[Chain]:
        """From a unit's home to its lease, then from all ranks."""
        unit, traffic = self._plan.units[index], self._traffic[index]
        lanes = [LaneName.H2D] if self._plan.lease_tier == DEVICE else [LaneName.SSD_READ]
        if self._plan.lease_tier == DEVICE and self._plan.placement.home(index, WEIGHT) == SSD:
            lanes = [LaneName.SSD_READ, LaneName.H2D]
        chunks = _FETCH_CHUNKS if len(lanes) > 1 else 1
        cuts = [traffic.fetched * chunk // chunks for chunk in range(chunks + 1)] if traffic.fetched else []
        chains = [
            [self._lanes.move(lane, f"fetch {unit.name}", stop - start) for lane in lanes]
            for start, stop in pairwise(cuts)
        ]
        if sent := traffic.gathered:
            seconds = self._rates.ring_seconds(sent, self._plan.layout.group(unit))
            chains = chains or [[]]
            chains[-1].append(Work(LaneName.COLLECTIVE, f"gather {unit.name}", sent, seconds))
        return chains
