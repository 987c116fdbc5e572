"""The simulated updater and gradient buffers, which follow the rules of the runtime's."""

import heapq
from dataclasses import dataclass, field
from math import ceil

from pagoda.plan.ops import HOST, SSD
from pagoda.plan.placement import GRAD, STAGING, WEIGHT
from pagoda.plan.planner import Plan
from pagoda.plan.rates import Rates
from pagoda.plan.schedule import NextUse
from pagoda.plan.simulated_lanes import SimulatedLanes, Task

_MOST_CHUNKS = 400
"""Pieces that all streamed updates of a step are cut into at most, so that a large model takes no longer."""


@dataclass(slots=True, order=True)
class _Update:
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


class SimulatedUpdater:
    """Feeds queued updates to the lanes as the runtime's does: the most urgent first, streamed ones through the ring.

    While none is queued, free slots of the ring read ahead the unit that comes first in every step.
    """

    def __init__(self, plan: Plan, lanes: SimulatedLanes, rates: Rates) -> None:
        self._plan = plan
        self._lanes = lanes
        self._rates = rates
        layout, placement = plan.layout, plan.placement
        streamed = sum(u.trainable_numel for u in plan.units if self._streamed_bytes(u.index))
        self._chunk = layout.block_elements * max(1, ceil(streamed / layout.block_elements / _MOST_CHUNKS))
        ring = placement.ring_slots * layout.block_elements
        self._slots = max(3, ring // self._chunk) if placement.ring_slots else 0
        uses = NextUse(plan.trace)
        self._urgency = [uses.after(u.index, len(plan.trace.accesses) - 1) for u in plan.units]
        self._queue: list[_Update] = []
        self._sequence = 0
        self._latest: dict[int, _Update] = {}
        self._current: _Update | None = None
        self._next_chunk = 0
        self._computed: list[Task] = []
        self._writes: list[Task] = []
        self._first: int | None = None
        """The unit that was updated first after the queue was last empty."""
        self._was_idle = True
        self._ahead: dict[int, Task] = {}
        """first element -> read of a chunk of that unit."""
        self._pumping = False

    def published(self, unit: int) -> Task | None:
        """Ends when the unit's latest update has published its weights; None if there is nothing to wait for."""
        update = self._latest.get(unit)
        return None if update is None or update.published.done else update.published

    def queue(self, unit: int, gradient: list[Task], reload: bool) -> Task:
        """The unit's gradient is complete once `gradient` has ended; returns what ends when it has been used."""
        weight_streams = self._plan.placement.home(unit, WEIGHT) == SSD
        lane = "ssd_write" if weight_streams else "ssd_read" if self._streamed_bytes(unit) else "update"
        milestones = self._lanes.milestone(lane), self._lanes.milestone("ssd_write")
        before = self._latest.get(unit)
        ready = [*gradient, before.written] if before else gradient
        update = _Update(self._urgency[unit], self._sequence, unit, ready, reload, *milestones)
        self._sequence += 1
        self._latest[unit] = update
        heapq.heappush(self._queue, update)
        return update.published

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
        update = self._current = heapq.heappop(self._queue)
        if self._was_idle:
            if self._first != update.unit:
                self._drop_ahead()
            self._first, self._was_idle = update.unit, False
        if update.reload:
            nbytes = self._plan.units[update.unit].trainable_numel * self._plan.layout.itemsize(GRAD)
            seconds = self._rates.seconds("ssd_read", nbytes)
            read = self._lanes.submit("ssd_read", f"gradient {self._name(update.unit)}", nbytes, seconds)
            update.gradient.append(read)
        self._next_chunk = 0
        self._computed, self._writes = [], []
        self._lanes.when_all(update.gradient, self.pump)
        return True

    def _feed_one(self) -> bool:
        """Submit one chunk of the current update; False when it must wait for its gradient or for a slot."""
        update = self._current
        if update is None or not all(task.done for task in update.gradient):
            return False
        unit, start = update.unit, self._next_chunk
        total = self._plan.units[unit].trainable_numel
        stop = min(start + self._chunk, total)
        share = (stop - start) / total
        streamed = self._streamed_bytes(unit)
        reads: list[Task] = []
        if streamed:
            ahead = self._ahead.pop(start, None) if unit == self._first else None
            if ahead is None and not self._slots:
                return False
            reads = [ahead or self._read(unit, round(streamed * share))]
        name = f"update {self._name(unit)}"
        touched = round(share * self._touched_bytes(unit))
        task = self._lanes.submit("update", name, touched, self._rates.update_seconds(stop - start), reads)
        self._computed.append(task)
        if streamed:
            nbytes = round(streamed * share)
            seconds = self._rates.seconds("ssd_write", nbytes)
            write = self._lanes.submit("ssd_write", f"write {self._name(unit)}", nbytes, seconds, [task])
            self._writes.append(write)
            write.then.append(self._slot_is_free)
        self._next_chunk = stop
        if stop == total:
            self._finish(update, streams_weight=self._plan.placement.home(unit, WEIGHT) == SSD)
            self._current = None
        return True

    def _finish(self, update: _Update, streams_weight: bool) -> None:
        published = self._writes if streams_weight else self._computed
        self._lanes.when_all(published, lambda: self._lanes.end(update.published))
        self._lanes.when_all([*self._computed, *self._writes], lambda: self._lanes.end(update.written))
        update.written.then.append(self.pump)

    def _read_ahead(self) -> bool:
        """While nothing is queued: read one more chunk of the unit that comes first."""
        if self._current is not None or self._queue or self._first is None or not self._slots:
            return False
        self._was_idle = True
        if not self._latest[self._first].written.done:
            return False
        total = self._plan.units[self._first].trainable_numel
        start = len(self._ahead) * self._chunk
        streamed = self._streamed_bytes(self._first)
        if not streamed or start >= total:
            return False
        share = (min(start + self._chunk, total) - start) / total
        self._ahead[start] = self._read(self._first, round(streamed * share))
        return True

    def _drop_ahead(self) -> None:
        for task in self._ahead.values():
            self._lanes.when_all([task], self._slot_is_free)
        self._ahead = {}

    def _read(self, unit: int, nbytes: int) -> Task:
        self._slots -= 1
        seconds = self._rates.seconds("ssd_read", nbytes)
        return self._lanes.submit("ssd_read", f"read {self._name(unit)}", nbytes, seconds)

    def _slot_is_free(self) -> None:
        self._slots += 1
        self.pump()

    def _streamed_bytes(self, unit: int) -> int:
        """Bytes of the states of a unit that an update brings from SSD, and takes back."""
        numel = self._plan.units[unit].trainable_numel
        homes = self._plan.placement
        return sum(numel * s.dtype.itemsize for s in self._plan.layout.states if homes.home(unit, s.name) == SSD)

    def _touched_bytes(self, unit: int) -> int:
        layout = self._plan.layout
        per_element = 2 * sum(s.dtype.itemsize for s in layout.states) + layout.itemsize(GRAD)
        return self._plan.units[unit].trainable_numel * per_element

    def _name(self, unit: int) -> str:
        return self._plan.units[unit].name


class SimulatedGradients:
    """Which gradients are in RAM: at home there, or in the staging region, which holds the latest ones."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._room = plan.placement.pages(HOST, STAGING) * plan.page_bytes
        self._staged: dict[int, Task | None] = {}
        """unit -> its write to SSD, in the order in which the gradients came."""

    def make_room(self, unit: int) -> list[Task]:
        """Take a buffer for a unit's gradient; returns what must end first."""
        if not self._needs_buffer(unit) or unit in self._staged:
            return []
        blockers = []
        while self._staged and self._bytes(unit) + sum(map(self._bytes, self._staged)) > self._room:
            oldest = next(iter(self._staged))
            task = self._staged.pop(oldest)
            if task is not None:
                blockers.append(task)
        self._staged[unit] = None
        return blockers

    def spilled(self, unit: int, write: Task) -> None:
        """A unit's gradient is on its way to SSD; its buffer can be taken afterwards."""
        if unit in self._staged:
            self._staged[unit] = write

    def updated(self, unit: int, task: Task) -> None:
        """A unit's gradient is used up once `task` has ended."""
        if unit in self._staged:
            self._staged[unit] = task

    def holds(self, unit: int) -> bool:
        """Whether a unit's gradient is in RAM."""
        return not self._needs_buffer(unit) or unit in self._staged

    def _needs_buffer(self, unit: int) -> bool:
        plan = self._plan
        return plan.placement.home(unit, GRAD) == SSD or GRAD not in plan.placement.lines[HOST]

    def _bytes(self, unit: int) -> int:
        return self._plan.layout.pages(self._plan.units[unit], GRAD) * self._plan.page_bytes
