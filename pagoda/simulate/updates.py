"""Simulated updates: the states of units stream through slots of a ring, chunk by chunk."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import ceil

from pagoda.plan.device_updates import DEVICE_SLOTS
from pagoda.plan.layout import WEIGHT
from pagoda.plan.planner import Plan
from pagoda.plan.tiers import COLLECTIVE, DEVICE, SSD
from pagoda.plan.traffic import Traffic
from pagoda.schedule.operations import Operation
from pagoda.simulate.lanes import SimulatedLanes, Task, Work
from pagoda.simulate.rates import Rates

_MOST_CHUNKS = 400
"""Most chunks of all updates of a step, in addition to at most one per unit, so that a large model takes no longer to
simulate."""

Report = Callable[[Operation], None]


@dataclass(eq=False, slots=True)
class _Chunk:
    """The work of lanes for some elements of a unit, one after another: states come, are updated, and go back."""

    come: Sequence[Work]
    update: Work
    back: Sequence[Work]
    """Empty if nothing is written to another tier."""


@dataclass(slots=True)
class _Feeding:
    """An UPDATE that is not completely submitted yet."""

    operation: Operation
    chunks: Sequence[_Chunk]
    steps: int
    """Number of steps whose gradients it applies."""
    ahead: list[Task]
    """Reads of its first chunks that began before the update."""
    fed: int = 0
    """Number of submitted chunks."""


@dataclass(eq=False, repr=False)
class SimulatedUpdates:
    """Carries out UPDATE and READ_AHEAD chunk by chunk, as one of the runtime's updaters does. A chunk of
    streamed states is read, updated and written, and holds a slot of the ring meanwhile. Updates take slots in the
    order in which they come."""

    _plan: Plan
    _traffic: Sequence[Traffic]
    _lanes: SimulatedLanes
    _rates: Rates
    _on_device: bool
    _gradient_used: Report
    """Called when an UPDATE has used its gradients."""
    _weights_written: Report
    """Called when an UPDATE has written the new weights."""
    _ended: Report
    """Called when an UPDATE has ended."""

    def __post_init__(self) -> None:
        plan, on_device = self._plan, self._on_device
        self._lane = "device_update" if on_device else "update"
        layout = plan.layout
        self._elements = [layout.updated_elements(unit) for unit in plan.units]
        """Parameters of each unit that this rank updates."""
        self._blocks = [plan.update_block(unit, self._rates.update_threads) for unit in plan.units]
        """Elements of a block of each unit."""
        block = layout.block_elements
        self._chunk = block * max(1, ceil(sum(self._elements) / block / _MOST_CHUNKS))
        self._chunks = cache(self._cut)
        slots = DEVICE_SLOTS if on_device else plan.placement.ring_slots
        self._slots = max(3, slots * block // self._chunk) if slots else 0
        self._queue: deque[_Feeding] = deque()
        self._ahead_unit = -1
        """The unit that is read ahead."""
        self._ahead: list[Task] = []
        self._sharing: list[Task] = []
        """Tasks that must end before the next unit is shared through RAM."""

    def update(self, operation: Operation) -> None:
        """Carry out an UPDATE."""
        if operation.unit != self._ahead_unit:
            self._drop_ahead()
        steps = len(operation.steps)
        chunks = self._chunks(operation.unit, steps)
        self._queue.append(_Feeding(operation, chunks, steps, self._ahead))
        self._ahead, self._ahead_unit = [], -1
        self._feed()

    def read_ahead(self, operation: Operation) -> None:
        """Use free slots to read what comes next, while no update needs them."""
        self._drop_ahead()
        self._ahead_unit = operation.unit
        self._feed()

    def _feed(self) -> None:
        """Submit everything that can be submitted now. Called whenever something has ended that this may have waited
        for."""
        while self._queue:
            feeding = self._queue[0]
            if not self._feed_chunk(feeding):
                return
            if feeding.fed == len(feeding.chunks):
                self._queue.popleft()
        chunks = self._chunks(self._ahead_unit, 1) if self._ahead_unit >= 0 else ()
        for chunk in chunks[len(self._ahead) :]:
            read = self._read(chunk)
            if read is None:
                return
            self._ahead.append(read)

    def _feed_chunk(self, feeding: _Feeding) -> bool:
        """Submit the next chunk of an update. Returns False if there is no slot for it."""
        at, chunk = feeding.fed, feeding.chunks[feeding.fed]
        after: list[Task] = []
        if chunk.come:
            read = feeding.ahead[at] if at < len(feeding.ahead) else self._read(chunk)
            if read is None:
                return False
            after = [read, *self._lanes.in_turn(chunk.come[1:], [read])][-1:]
        computed = self._lanes.submit(chunk.update, after, feeding.steps)
        back = [computed, *self._lanes.in_turn(chunk.back, [computed])]
        feeding.fed += 1
        if feeding.fed == len(feeding.chunks):
            self._last_is_fed(feeding.operation, back)
        if chunk.come:
            back[-1].then.append(self._slot_is_free)
        return True

    def _last_is_fed(self, operation: Operation, tasks: Sequence[Task]) -> None:
        """Report how an update proceeds. Its last chunk is the last one in every lane: the first of `tasks` computes
        it, and the others take its states home."""
        computed, last = tasks[0], tasks[-1]
        computed.then.append(partial(self._gradient_used, operation))
        home = self._plan.placement.home(operation.unit, WEIGHT)
        passes = self._on_device and home != DEVICE
        published = last if home == SSD else tasks[1] if passes else computed
        published.then.append(partial(self._weights_written, operation))
        self._lanes.when_ended(last, partial(self._lanes.when_ended, published, partial(self._ended, operation)))

    def share(self, unit: int) -> Task:
        """Simulate the exchange of updated slices between ranks. On the way from SSD and back, units take turns in a
        buffer for one."""
        spec, traffic, lanes = self._plan.units[unit], self._traffic[unit], self._lanes
        sent, read, write = traffic.published, traffic.sent_from_ssd, traffic.kept_on_ssd
        name, seconds = f"share {spec.name}", self._rates.ring_seconds(sent, self._plan.layout.group(spec))
        after: list[Task] = []
        if read or write:
            after = [lanes.submit(lanes.move("ssd_read", name, read), self._sharing)]
        task = lanes.submit(Work(COLLECTIVE, name, sent, seconds), after)
        if write:
            task = lanes.submit(lanes.move("ssd_write", name, write), [task])
            self._sharing = [task]
        return task

    def _read(self, chunk: _Chunk) -> Task | None:
        """Start to bring the states of a chunk, if they move and there is a slot."""
        if not chunk.come or not self._slots:
            return None
        self._slots -= 1
        return self._lanes.submit(chunk.come[0])

    def _drop_ahead(self) -> None:
        ahead, self._ahead, self._ahead_unit = self._ahead, [], -1
        for task in ahead:
            self._lanes.when_ended(task, self._slot_is_free)

    def _slot_is_free(self) -> None:
        self._slots += 1
        self._feed()

    def _cut(self, unit: int, steps: int) -> Sequence[_Chunk]:
        """The chunks of a unit's update by the gradients of `steps` steps. The compute time is that of one step."""
        traffic, name = self._traffic[unit], self._plan.units[unit].name
        layout, placement, total = self._plan.layout, self._plan.placement, self._elements[unit]
        moving = placement.streamed(unit, layout.states)
        on_ssd = sum(placement.home(unit, state.name) == SSD for state in moving)
        streamed, passed = traffic.streamed, traffic.passed
        coming = [("ssd_read", streamed, on_ssd), ("h2d", passed + steps * traffic.brought, len(moving))]
        going = [("d2h", passed, len(moving)), ("ssd_write", streamed, on_ssd)]
        chunks = []
        rates, block = self._rates, self._blocks[unit]
        for start in range(0, max(1, total), self._chunk):
            stop = min(start + self._chunk, total)
            count, blocks = stop - start, ceil(stop / block) - ceil(start / block)
            seconds = rates.device_update_seconds(count, blocks) if self._on_device else rates.update_seconds(count)
            come, back = (
                [
                    self._lanes.move(lane, f"{verb} {name}", _part(nbytes, start, stop, total), states * blocks)
                    for lane, nbytes, states in moves
                    if nbytes
                ]
                for verb, moves in (("read", coming), ("write", going))
            )
            wakes = 2 * blocks if come else blocks  # the updater too wakes for each block's slot
            touched = _part(traffic.touched, start, stop, total)
            chunks.append(_Chunk(come, Work(self._lane, f"update {name}", touched, seconds, wakes), back))
        return chunks


def _part(nbytes: int, start: int, stop: int, total: int) -> int:
    """How many of the bytes of `total` elements belong to the elements [start, stop)."""
    return nbytes * stop // total - nbytes * start // total if total else 0
