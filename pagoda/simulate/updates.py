"""The simulated updater and gradient buffers, which follow the rules of the runtime's."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil

from pagoda.plan.device_updates import DEVICE_SLOTS, state_bytes
from pagoda.plan.layout import GRAD, WEIGHT
from pagoda.plan.ops import COLLECTIVE, HOST, SSD
from pagoda.plan.placement import STAGING
from pagoda.plan.planner import Plan
from pagoda.plan.ranks import ring_bytes
from pagoda.plan.schedule import NextUse
from pagoda.plan.units import UnitSpec
from pagoda.simulate.lanes import SimulatedLanes, Task
from pagoda.simulate.rates import Rates

_MOST_CHUNKS = 400
"""Pieces that the updates of a step are cut into beside one a unit at most, so that a large model takes no longer."""


@dataclass(slots=True, order=True)
class Update:
    """One unit's pending update."""

    urgency: float
    sequence: int
    unit: int = field(compare=False)
    gradient: list[Task] = field(compare=False)
    """What brings the gradient to RAM."""
    reload: bool = field(compare=False)
    """Whether the gradient must be read back from SSD."""
    published: Task = field(compare=False)
    written: Task = field(compare=False)
    steps: int = field(default=1, compare=False)
    """Gradients that are applied one after another."""


@dataclass(frozen=True, slots=True)
class _Path:
    """The lanes that an update passes."""

    read: str
    update: str
    write: str


_ON_CPU, _ON_DEVICE = _Path("ssd_read", "update", "ssd_write"), _Path("h2d", "device_update", "d2h")


class SimulatedUpdater:
    """Feeds queued updates to the lanes as the runtime's does: the most urgent first, streamed ones through the ring.

    While none is queued, free slots of the ring read ahead the unit that came next the last time. What is updated
    `on_device` has an updater and a ring of its own, and is not read ahead.
    """

    def __init__(self, plan: Plan, lanes: SimulatedLanes, rates: Rates, on_device: bool = False) -> None:
        self._plan = plan
        self._on_device = on_device
        self._path = _ON_DEVICE if on_device else _ON_CPU
        self._lanes = lanes
        self._rates = rates
        layout, placement = plan.layout, plan.placement
        self._touched_per_element = layout.bytes_per_update
        self._streamed = [self._streamed_bytes(unit) for unit in plan.units]
        """Bytes of each unit that its update brings from elsewhere, and takes back."""
        homes = [[placement.home(unit.index, state.name) for state in layout.states] for unit in plan.units]
        self._streams = [len(layout.states) if on_device else of_unit.count(SSD) for of_unit in homes]
        """States of each unit that its update moves, each by itself."""
        self._elements = [layout.updated_elements(unit) for unit in plan.units]
        """Parameters of each unit that this rank updates."""
        self._slower = [self._copying(unit) for unit in plan.units]
        """By what factor each unit's update takes longer because its old states are copied."""
        elements = sum(self._elements)
        self._chunk = layout.block_elements * ceil(elements / layout.block_elements / _MOST_CHUNKS)
        slots = DEVICE_SLOTS if on_device else placement.ring_slots
        self._slots = max(3, slots * layout.block_elements // self._chunk) if slots else 0
        uses = NextUse(plan.trace)
        self._urgency = [uses.after(u.index, len(plan.trace.accesses) - 1) for u in plan.units]
        self._queue: list[Update] = []
        self._sequence = 0
        self._latest: dict[int, Update] = {}
        self._current: Update | None = None
        self._next_chunk = 0
        self._computed: list[Task] = []
        self._writes: list[Task] = []
        self._fed = -1
        """The unit that was taken up last."""
        self._successor: dict[int, int] = {}
        """unit -> the one that was taken up after it the last time."""
        self._ahead_unit = -1
        self._ahead: dict[int, Task] = {}
        """first element -> read of a chunk of that unit."""
        self._pumping = False

    def published(self, unit: int) -> Task | None:
        """Ends when the unit's latest update has published its weights; None if there is nothing to wait for."""
        update = self._latest.get(unit)
        return None if update is None or update.published.done else update.published

    def queue(self, unit: int, gradient: list[Task], reload: bool) -> Task:
        """The unit's gradient is complete once `gradient` has ended; returns what ends when it has been used."""
        before = self._latest.get(unit)
        update = self._new_update(unit, [*gradient, before.written] if before else gradient, reload)
        self._latest[unit] = update
        heapq.heappush(self._queue, update)
        return update.published

    def end_of_step(self) -> None:
        """Compute is through with a step, all of whose updates have been queued."""

    def pump(self) -> None:
        """Feed all that can be fed now; called whenever something it may have waited for has ended."""
        if self._pumping:
            return
        self._pumping = True
        while self._feed_one() or self._begin() or self._read_ahead():
            pass
        self._pumping = False

    def _begin(self) -> bool:
        """Take up the most urgent update."""
        if self._current is not None or not self._queue:
            return False
        update = heapq.heappop(self._queue)
        self._successor[self._fed] = update.unit
        self._fed = update.unit
        if self._ahead_unit != update.unit:
            self._drop_ahead()
        self._take_up(update)
        return True

    def _new_update(self, unit: int, gradient: list[Task], reload: bool, steps: int = 1) -> Update:
        milestones = self._lanes.milestone(self._lane_waited_for(unit)), self._lanes.milestone(self._path.write)
        self._sequence += 1
        return Update(self._urgency[unit], self._sequence, unit, gradient, reload, *milestones, steps)

    def _lane_waited_for(self, unit: int) -> str:
        """The lane whose work ends last before a unit's new weights can be used, most likely."""
        path, streamed = self._path, self._streamed[unit] and not self._on_device
        return path.write if streamed and self._weight_streams(unit) else path.read if streamed else path.update

    def _take_up(self, update: Update) -> None:
        """Feed an update once its gradient is there."""
        self._current = update
        if update.reload:
            nbytes = self._plan.layout.pages(self._plan.units[update.unit], GRAD) * self._plan.page_bytes
            seconds = self._rates.seconds("ssd_read", nbytes)
            read = self._lanes.submit("ssd_read", f"gradient {self._name(update.unit)}", nbytes, seconds)
            update.gradient.append(read)
        self._next_chunk = 0
        self._computed, self._writes = [], []
        self._lanes.when_all(update.gradient, self.pump)

    def _feed_one(self) -> bool:
        """Submit one chunk of the current update; False when it must wait for its gradient or for a slot."""
        update = self._current
        if update is None or not all(task.done for task in update.gradient):
            return False
        unit, start = update.unit, self._next_chunk
        total = self._elements[unit]
        stop = min(start + self._chunk, total)
        streamed = self._streamed[unit]
        nbytes = streamed * (stop - start) // total
        reads: list[Task] = []
        if streamed:
            ahead = self._ahead.pop(start, None)
            if ahead is None and not self._slots:
                return False
            gradient = (stop - start) * self._plan.layout.itemsize(GRAD) if self._on_device else 0
            reads = [ahead or self._read(unit, nbytes + gradient, stop - start)]
        name = f"update {self._name(unit)}"
        touched = int((stop - start) * self._touched_per_element)
        rate = self._rates.device_update_seconds if self._on_device else self._rates.update_seconds
        seconds = update.steps * rate(stop - start) * self._slower[unit]
        blocks = ceil((stop - start) / self._plan.layout.block_elements)
        pieces = 2 * blocks if streamed else blocks  # the updater too wakes for each block's slot
        task = self._lanes.submit(self._path.update, name, touched, seconds, reads, pieces)
        self._computed.append(task)
        if streamed:
            seconds = self._rates.seconds(self._path.write, nbytes)
            pieces = blocks * self._streams[unit]
            write = self._lanes.submit(self._path.write, f"write {self._name(unit)}", nbytes, seconds, [task], pieces)
            self._writes.append(write)
            write.then.append(self._slot_is_free)
        self._next_chunk = stop
        if stop == total:
            self._finish(update, streams_weight=self._weight_streams(unit))
            self._current, self._ahead_unit = None, -1
        return True

    def _finish(self, update: Update, streams_weight: bool) -> None:
        published = self._writes if streams_weight else self._computed
        unit, layout = self._plan.units[update.unit], self._plan.layout
        if layout.gathers_after_update(unit):
            group = layout.group(unit)
            sent = ring_bytes(unit.trainable_numel * layout.weight.dtype.itemsize, group)
            seconds = self._rates.gather_seconds(sent, group)
            published = [self._lanes.submit(COLLECTIVE, f"gather {unit.name}", sent, seconds, published)]
        self._lanes.when_all(published, lambda: self._lanes.end(update.published))
        self._lanes.when_all([*self._computed, *self._writes], lambda: self._lanes.end(update.written))
        update.written.then.append(self.pump)

    def _read_ahead(self) -> bool:
        """While nothing is queued: read one more chunk of the unit that most likely comes next."""
        unit = self._successor.get(self._fed, -1)
        if self._current is not None or self._queue or unit < 0 or not self._slots or not self._streamed[unit]:
            return False
        if self._on_device:
            return False
        if self._ahead_unit != unit:
            if not self._latest[unit].written.done:
                return False
            self._drop_ahead()
            self._ahead_unit = unit
        total = self._elements[unit]
        start = len(self._ahead) * self._chunk
        if start >= total:
            return False
        elements = min(start + self._chunk, total) - start
        self._ahead[start] = self._read(unit, elements * self._streamed[unit] // total, elements)
        return True

    def _drop_ahead(self) -> None:
        for task in self._ahead.values():
            self._lanes.when_all([task], self._slot_is_free)
        self._ahead, self._ahead_unit = {}, -1

    def _read(self, unit: int, nbytes: int, elements: int) -> Task:
        self._slots -= 1
        seconds = self._rates.seconds(self._path.read, nbytes)
        pieces = self._streams[unit] * ceil(elements / self._plan.layout.block_elements)
        return self._lanes.submit(self._path.read, f"read {self._name(unit)}", nbytes, seconds, pieces=pieces)

    def _slot_is_free(self) -> None:
        self._slots += 1
        self.pump()

    def _streamed_bytes(self, unit: UnitSpec) -> int:
        """Bytes of the states of a unit that an update brings, and takes back."""
        homes, states = self._plan.placement, self._plan.layout.states
        if self._on_device:
            numel = self._plan.layout.updated_elements(unit)
            return 0 if unit.index in homes.resident else state_bytes(states, numel)
        updated_bytes = self._plan.layout.updated_bytes
        return sum(updated_bytes(unit, s) for s in states if homes.home(unit.index, s.name) == SSD)

    def _copying(self, unit: UnitSpec) -> float:
        """The update of a speculated unit reads and writes its states in RAM once more."""
        placement, layout = self._plan.placement, self._plan.layout
        if unit.index not in placement.speculated:
            return 1.0
        homes = {state: placement.home(unit.index, state.name) for state in layout.states}
        copied = sum(layout.updated_bytes(unit, state) for state, tier in homes.items() if tier == HOST)
        return 1.0 + 2 * copied / (self._touched_per_element * layout.updated_elements(unit))

    def _weight_streams(self, unit: int) -> bool:
        return self._streamed[unit] > 0 and (self._on_device or self._plan.placement.home(unit, WEIGHT) == SSD)

    def _name(self, unit: int) -> str:
        return self._plan.units[unit].name


class SimulatedGradients:
    """Which gradients are in RAM: at home there, or in the staging region, which holds the latest ones."""

    def __init__(self, plan: Plan, note: Callable[[int], None]) -> None:
        self._plan = plan
        self._note = note
        """Told of pages taken, or given back if below zero."""
        self._room = plan.placement.pages(HOST, STAGING)
        self._pages = [plan.layout.pages(unit, GRAD) for unit in plan.units]
        self._taken = 0
        self._staged: dict[int, Task | None] = {}
        """unit -> its write to SSD, in the order in which the gradients came."""

    def make_room(self, unit: int) -> list[Task]:
        """Take a buffer for a unit's gradient; returns what must end first."""
        if not self._needs_buffer(unit) or unit in self._staged:
            return []
        blockers = []
        while self._staged and self._pages[unit] + self._taken > self._room:
            oldest = next(iter(self._staged))
            task = self._drop(oldest)
            if task is not None:
                blockers.append(task)
        self._staged[unit] = None
        self._taken += self._pages[unit]
        self._note(self._pages[unit])
        return blockers

    def spilled(self, unit: int, write: Task) -> None:
        """A unit's gradient is on its way to SSD; its buffer can be taken afterwards."""
        if unit in self._staged:
            self._staged[unit] = write

    def updated(self, unit: int, task: Task) -> None:
        """A unit's gradient is used up once `task` has ended."""
        if task.done and unit in self._staged:
            self._drop(unit)
        elif unit in self._staged:
            self._staged[unit] = task

            def used() -> None:
                if self._staged.get(unit) is task:
                    self._drop(unit)

            task.then.append(used)

    def _drop(self, unit: int) -> Task | None:
        """Give a buffer back; returns what the unit's gradient waits for."""
        self._taken -= self._pages[unit]
        self._note(-self._pages[unit])
        return self._staged.pop(unit)

    def holds(self, unit: int) -> bool:
        """Whether a unit's gradient is in RAM."""
        return not self._needs_buffer(unit) or unit in self._staged

    def _needs_buffer(self, unit: int) -> bool:
        plan, home = self._plan, self._plan.placement.home(unit, GRAD)
        return home == SSD or (home == HOST and GRAD not in plan.placement.lines[HOST])
