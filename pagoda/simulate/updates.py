"""Simulated updates: the stream of blocks on simulated lanes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import ceil
from typing import Any

from pagoda.plan.blocks import stream_plan
from pagoda.plan.lanes import INLINE_BYTES, LaneName
from pagoda.plan.layout import WEIGHT
from pagoda.plan.planner import Plan
from pagoda.plan.tiers import SSD
from pagoda.plan.traffic import Traffic
from pagoda.schedule.operations import ReadAhead, Update
from pagoda.schedule.stream import Action, Block, Do, Stream
from pagoda.simulate.clock import SimulatedLanes, Task, Work
from pagoda.simulate.rates import Rates

_MOST_BLOCKS = 400
"""Most blocks of all updates of a step, in addition to at most one per unit, so that a large model takes no longer to
simulate. Neighbouring blocks of the runtime are one simulated block."""

Report = Callable[[Update], None]


@dataclass(eq=False, repr=False)
class SimulatedUpdates:
    """Carries out UPDATE and READ_AHEAD, as the runtime's `UpdateStream` does."""

    _plan: Plan
    _traffic: Sequence[Traffic]
    _lanes: SimulatedLanes
    _rates: Rates
    _gradient_used: Report
    """Called when an UPDATE has used its gradient."""
    _weights_written: Report
    """Called when an UPDATE has written the new weights."""
    _ended: Report
    """Called when an UPDATE has ended."""

    def __post_init__(self) -> None:
        plan, rates = self._plan, self._rates
        at_once = 0 if rates.python_ahead or plan.layout.weight.copied else INLINE_BYTES
        blocks = stream_plan(plan, rates.update_threads, at_once, plan.layout.updated_elements)
        self._together = max(1, ceil(sum(len(unit.bounds) for unit in blocks.units) / _MOST_BLOCKS))
        self._live = [len(unit.bounds) for unit in blocks.units]
        """By unit, the number of the runtime's blocks."""
        self._blocks = blocks.coarse(self._together)
        self._stream = Stream(self._blocks)
        self._ended_by = {
            Do.READ: self._stream.has_read,
            Do.UPDATE: self._stream.has_updated,
            Do.WRITE: self._stream.has_written,
        }
        self._works = cache(self._works_of)
        self._sharing: list[Task] = []
        """Tasks that must end before the next unit is shared through RAM."""

    def update(self, operation: Update) -> None:
        """Carry out an UPDATE."""
        unit = operation.unit
        self._tell(self._stream.ask, operation, unit, range(len(self._blocks.units[unit].bounds)))

    def read_ahead(self, operation: ReadAhead) -> None:
        """Use free slots to read what comes next, while no update needs them."""
        self._tell(self._stream.read_ahead, operation.unit)

    def _tell(self, event: Callable[..., None], *arguments: Any) -> None:
        event(*arguments)
        for action in self._stream.take():
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        do, about, _ = action
        if do in (Do.USED, Do.END):
            self._report(do, about)
            return
        block: Block = about
        last = self._lanes.in_turn(self._works(do, block.unit, block.index))
        last.then.append(partial(self._tell, self._ended_by[do], block, None))

    def _report(self, do: Do, operation: Update) -> None:
        on_ssd = self._plan.placement.home(operation.unit, WEIGHT) == SSD
        if do is Do.USED:
            self._gradient_used(operation)
        if on_ssd is (do is Do.END):
            self._weights_written(operation)
        if do is Do.END:
            self._ended(operation)

    def share(self, unit: int) -> Task:
        """Simulate the exchange of updated slices between ranks. On the way from SSD and back, units take turns in a
        buffer for one."""
        spec, traffic, lanes = self._plan.units[unit], self._traffic[unit], self._lanes
        sent, read, write = traffic.published, traffic.sent_from_ssd, traffic.kept_on_ssd
        name, seconds = f"share {spec.name}", self._rates.ring_seconds(sent, self._plan.layout.group(spec))
        after: list[Task] = []
        if read or write:
            after = [lanes.submit(lanes.move(LaneName.SSD_READ, name, read), self._sharing)]
        task = lanes.submit(Work(LaneName.COLLECTIVE, name, sent, seconds), after)
        if write:
            task = lanes.submit(lanes.move(LaneName.SSD_WRITE, name, write), [task])
            self._sharing = [task]
        return task

    def _works_of(self, do: Do, unit: int, index: int) -> Sequence[Work]:
        """The work of lanes for a block, one after another."""
        traffic, name, plan, rates = self._traffic[unit], self._plan.units[unit].name, self._plan, self._rates
        bounds = self._blocks.units[unit].bounds
        (start, stop), total = bounds[index], bounds[-1][1]
        blocks = min(self._together, self._live[unit] - index * self._together)
        moving = plan.placement.streamed(unit, plan.layout.states)
        on_ssd = sum(plan.placement.home(unit, state.name) == SSD for state in moving)

        def move(lane: str, verb: str, nbytes: int, states: int) -> Work:
            return self._lanes.move(lane, f"{verb} {name}", _part(nbytes, start, stop, total), states * blocks)

        if do is Do.READ:
            return [move(LaneName.SSD_READ, "read", traffic.streamed, on_ssd)]
        if do is Do.WRITE:
            return [move(LaneName.SSD_WRITE, "write", traffic.streamed, on_ssd)]
        on_device, count = unit in plan.placement.on_device, stop - start
        spec = plan.units[unit]
        seconds = rates.device_update_seconds(spec, count, blocks) if on_device else rates.update_seconds(spec, count)
        touched, lane = (
            _part(traffic.touched, start, stop, total),
            LaneName.DEVICE_UPDATE if on_device else LaneName.UPDATE,
        )
        works = [Work(lane, f"update {name}", touched, seconds, blocks)]
        if coming := traffic.passed + traffic.brought:
            works.insert(0, move(LaneName.H2D, "read", coming, len(moving)))
        if traffic.passed:
            works.append(move(LaneName.D2H, "write", traffic.passed, len(moving)))
        return works


def _part(nbytes: int, start: int, stop: int, total: int) -> int:
    """How many of the bytes of `total` elements belong to the elements [start, stop)."""
    return nbytes * stop // total - nbytes * start // total
