"""Simulated updates: the states of units stream through a ring of slots, chunk by chunk."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Protocol

from pagoda.plan.device_updates import DEVICE_SLOTS
from pagoda.plan.layout import WEIGHT
from pagoda.plan.ops import COLLECTIVE, HOST, SSD
from pagoda.plan.planner import Plan
from pagoda.plan.traffic import Traffic
from pagoda.schedule.operations import Operation
from pagoda.simulate.lanes import SimulatedLanes, Task
from pagoda.simulate.rates import Rates

_MOST_CHUNKS = 400
"""Pieces that the updates of a step are cut into besides one a unit at most, so that a large model takes no longer."""


class Told(Protocol):
    """What is told how an UPDATE gets on, in this order."""

    def gradient_used(self, update: Operation, /) -> None: ...

    def weights_written(self, update: Operation, /) -> None: ...

    def ended(self, update: Operation, /) -> None: ...


@dataclass(frozen=True, slots=True)
class _Path:
    """The lanes that an update passes."""

    read: str
    update: str
    write: str


@dataclass(slots=True)
class _Feeding:
    """An UPDATE that lanes have not been given whole."""

    operation: Operation
    ahead: dict[int, Task]
    """first element -> read of a chunk, begun before the update was."""
    fed: int = 0
    """Elements that lanes have been given."""


_ON_CPU, _ON_DEVICE = _Path("ssd_read", "update", "ssd_write"), _Path("h2d", "device_update", "d2h")


class SimulatedUpdates:
    """Executes UPDATE and READ_AHEAD, as one of the runtime's updaters does: chunk by chunk. A chunk of streamed states
    is read, updated and written, and takes a slot of the ring until then. Updates take slots in the order in which they
    come.
    """

    def __init__(
        self,
        plan: Plan,
        traffic: Sequence[Traffic],
        lanes: SimulatedLanes,
        rates: Rates,
        told: Told,
        on_device: bool,
    ) -> None:
        self._plan = plan
        self._traffic = traffic
        self._lanes = lanes
        self._rates = rates
        self._told = told
        self._on_device = on_device
        self._path = _ON_DEVICE if on_device else _ON_CPU
        layout, placement = plan.layout, plan.placement
        homes = [[placement.home(unit.index, state.name) for state in layout.states] for unit in plan.units]
        self._streams = [len(layout.states) if on_device else of_unit.count(SSD) for of_unit in homes]
        """States of each unit that its update moves, each by itself."""
        self._elements = [layout.updated_elements(unit) for unit in plan.units]
        """Parameters of each unit that this rank updates."""
        self._block = layout.block_elements
        self._chunk = self._block * max(1, ceil(sum(self._elements) / self._block / _MOST_CHUNKS))
        slots = DEVICE_SLOTS if on_device else placement.ring_slots
        self._slots = max(3, slots * self._block // self._chunk) if slots else 0
        self._queue: deque[_Feeding] = deque()
        self._ahead_unit = -1
        """The unit that is read ahead."""
        self._ahead: dict[int, Task] = {}

    def update(self, operation: Operation) -> None:
        """Execute an UPDATE."""
        if operation.unit != self._ahead_unit:
            self._drop_ahead()
        self._queue.append(_Feeding(operation, self._ahead))
        self._ahead, self._ahead_unit = {}, -1
        self._feed()

    def read_ahead(self, operation: Operation) -> None:
        """Use free slots to read what comes next, while there is no update that needs them."""
        self._drop_ahead()
        self._ahead_unit = operation.unit
        self._feed()

    def lane_waited_for(self, unit: int) -> str:
        """The lane whose work ends last before a unit's new weights can be used, most likely."""
        path, streamed = self._path, self._traffic[unit].streamed and not self._on_device
        return path.write if streamed and self._weights_stream(unit) else path.read if streamed else path.update

    def _feed(self) -> None:
        """Give lanes all that can be given now; called whenever something it may have waited for has come about."""
        while self._queue:
            if not self._feed_chunk(self._queue[0]):
                return
            if self._queue[0].fed >= self._elements[self._queue[0].operation.unit]:
                self._queue.popleft()
        unit, start = self._ahead_unit, len(self._ahead) * self._chunk
        while unit >= 0 and start < self._elements[unit] and self._traffic[unit].streamed:
            read = self._read(unit, start, min(start + self._chunk, self._elements[unit]))
            if read is None:
                return
            self._ahead[start] = read
            start += self._chunk

    def _feed_chunk(self, feeding: _Feeding) -> bool:
        """Give lanes the next chunk of an update; False while there is no slot for it."""
        operation, start = feeding.operation, feeding.fed
        unit, path, traffic = operation.unit, self._path, self._traffic[operation.unit]
        name, total = self._plan.units[unit].name, self._elements[unit]
        stop = min(start + self._chunk, total)
        blocks, reads = ceil((stop - start) / self._block), list[Task]()
        if traffic.streamed:
            read = feeding.ahead.get(start) or self._read(unit, start, stop)
            if read is None:
                return False
            reads.append(read)
        rate = self._rates.device_update_seconds if self._on_device else self._rates.update_seconds
        seconds = rate(stop - start) * len(operation.steps) * (self._copying(unit) if operation.keeps_old else 1.0)
        touched = _part(traffic.touched, start, stop, total)
        pieces = 2 * blocks if traffic.streamed else blocks  # the updater too wakes for each block's slot
        last = computed = self._lanes.submit(path.update, f"update {name}", touched, seconds, reads, pieces)
        if traffic.streamed:
            nbytes = _part(traffic.streamed, start, stop, total)
            seconds, pieces = self._rates.seconds(path.write, nbytes), blocks * self._streams[unit]
            last = self._lanes.submit(path.write, f"write {name}", nbytes, seconds, [computed], pieces)
        if stop == total:
            self._reported(operation, computed, last)
        if traffic.streamed:
            last.then.append(self._slot_is_free)
        feeding.fed = stop
        return True

    def _reported(self, operation: Operation, computed: Task, last: Task) -> None:
        """Tell how an update gets on. Its last chunk is the last of all in every lane."""
        spec = self._plan.units[operation.unit]
        computed.then.append(lambda: self._told.gradient_used(operation))
        published = last if self._weights_stream(operation.unit) else computed
        if sent := self._traffic[operation.unit].published:
            seconds = self._rates.gather_seconds(sent, self._plan.layout.group(spec))
            published = self._lanes.submit(COLLECTIVE, f"gather {spec.name}", sent, seconds, [published])
        published.then.append(lambda: self._told.weights_written(operation))
        self._lanes.when_all([published, last], lambda: self._told.ended(operation))

    def _read(self, unit: int, start: int, stop: int) -> Task | None:
        if not self._slots:
            return None
        self._slots -= 1
        nbytes = _part(self._traffic[unit].streamed + self._traffic[unit].brought, start, stop, self._elements[unit])
        pieces = self._streams[unit] * ceil((stop - start) / self._block)
        name, seconds = f"read {self._plan.units[unit].name}", self._rates.seconds(self._path.read, nbytes)
        return self._lanes.submit(self._path.read, name, nbytes, seconds, pieces=pieces)

    def _drop_ahead(self) -> None:
        ahead, self._ahead, self._ahead_unit = self._ahead, {}, -1
        for task in ahead.values():
            self._lanes.when_all([task], self._slot_is_free)

    def _slot_is_free(self) -> None:
        self._slots += 1
        self._feed()

    def _copying(self, unit: int) -> float:
        """By what factor an update takes longer that copies the old states which are in RAM: it reads and writes them
        once more."""
        layout, placement, spec = self._plan.layout, self._plan.placement, self._plan.units[unit]
        in_ram = (state for state in layout.states if placement.home(unit, state.name) == HOST)
        copied = sum(layout.updated_bytes(spec, state) for state in in_ram)
        return 1.0 + 2 * copied / (layout.bytes_per_update * self._elements[unit])

    def _weights_stream(self, unit: int) -> bool:
        streamed = self._traffic[unit].streamed > 0
        return streamed and (self._on_device or self._plan.placement.home(unit, WEIGHT) == SSD)


def _part(nbytes: int, start: int, stop: int, total: int) -> int:
    """The bytes of the elements from `start` to `stop` of `total`."""
    return nbytes * stop // total - nbytes * start // total if total else 0
