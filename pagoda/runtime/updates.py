"""Updates: the optimizer's math, unit by unit, block by block."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pagoda.errors import NonFiniteGradientError, UsageError
from pagoda.plan.layout import WEIGHT
from pagoda.plan.units import UnitSpec
from pagoda.runtime.gradients import UnitGradient, non_finite_message
from pagoda.runtime.lanes import THREAD_NAMES, Handle, all_of, wait_all
from pagoda.runtime.segments import Segment
from pagoda.runtime.store import Store
from pagoda.runtime.undo import Undo
from pagoda.runtime.unit import LiveUnit


@dataclass(frozen=True, slots=True)
class Part:
    """One step's gradient of a unit, and what of the unit it updates."""

    record: UnitGradient
    segments: Sequence[Segment]


class WeightExtents(NamedTuple):
    """The extents that an update reads a unit's weights from and writes them to."""

    read: str
    write: str


IN_PLACE = WeightExtents(WEIGHT, WEIGHT)


class Update(NamedTuple):
    """One unit's update, as a feeder is given it."""

    unit: LiveUnit
    parts: Sequence[Part]
    """One for each step."""
    weights: WeightExtents
    undo: Undo | None
    """Keeps what an update that may have to be undone changes."""
    kept: Handle | None
    """Ends when a checkpoint that has yet to read the old states has a copy of them."""
    updated: Handle
    """Ends when the new weights are in their home."""
    written: Handle
    """Ends when every state is."""
    used: Callable[[], None]
    """Told when the gradients have been read for the last time."""


class Block(NamedTuple):
    """A part of a unit's update."""

    update: Update
    start: int
    """First element, of those that this rank updates of the unit."""
    stop: int
    pieces: Sequence[tuple[UnitGradient, Segment]]
    """What is applied to it, one after another; [] where weights that do not change are copied."""


class UpdatePath:
    """How a block gets to its states, or they to it: what brings them, where they are computed, and what takes them
    home."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._states = store.plan.layout.states
        self._block = store.plan.layout.block_elements
        self.lock = threading.Condition()
        """Told when a feeder has something to do, or room to read ahead."""

    def cuts(self, unit: UnitSpec) -> list[tuple[int, int]]:
        """First and last element of every block of a unit's update."""
        total = len(self._store.shards.updated(unit))
        return [(start, min(start + self._block, total)) for start in range(0, total, self._block)]

    def is_small(self, unit: UnitSpec) -> bool:
        """Whether the update of a unit is done before another thread would have begun it."""
        return False

    def begin(self, unit: int) -> None:
        """Blocks of a unit are about to be submitted."""

    def submit(self, block: Block, computed: list[Handle], written: list[Handle]) -> None:
        """Give a block to the lanes. Adds to the lists what ends when it has been computed, and when its states on SSD
        have been written. If it raises, the lists have all that was submitted."""
        raise NotImplementedError

    def end(self, unit: int) -> None:
        """Every block of a unit has been submitted."""

    def read_ahead(self, unit: int) -> bool:
        """Read one more block of a unit that is likely to be updated next; False when there is no room or no block."""
        return False

    def drop_ahead(self) -> list[Handle]:
        """Forget what was read ahead; returns the reads that are under way."""
        return []


class Feeder:
    """The thread that feeds a path with updates, in the order in which the scheduler issues them. Small ones are fed by
    whoever submits them, and may overtake others.

    While it has none, it reads ahead the unit that the scheduler has named, as far as there is room. `_lock` guards the
    queue; it is the path's.
    """

    def __init__(self, store: Store, path: UpdatePath) -> None:
        self.path = path
        self.refused: BaseException | None = None
        """What every update that has not begun fails with, if anything."""
        self._store = store
        self._lock = path.lock
        self._queue: deque[Update | int] = deque()
        """Updates, and units to read ahead once what comes before has been fed."""
        self._ahead: int | None = None
        """The unit to read ahead."""
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"{THREAD_NAMES}updater", daemon=True)
        self._thread.start()

    def submit(self, update: Update) -> None:
        """Feed an update to the path, after those before it. Its handles end when it has, however it did.

        A small one in RAM is fed at once: this thread would do no less to hand it to another.
        """
        if update.kept is None and self.path.is_small(update.unit.spec):
            self._feed(update)
            return
        with self._lock:
            closed = self._closed
            if not closed:
                self._queue.append(update)
                self._lock.notify_all()
        if closed:  # one that came of what was under way then
            error = self.refused or UsageError("The optimizer is closed.")
            update.written.finish(error)
            update.updated.finish(error)

    def read_ahead(self, unit: int) -> None:
        """After what has been submitted, a unit is likely to be updated next."""
        with self._lock:
            self._queue.append(unit)
            self._lock.notify_all()

    def drop_ahead(self) -> None:
        """Wait until nothing is read ahead any more."""
        with self._lock:
            self._queue = deque(each for each in self._queue if not isinstance(each, int))
            self._ahead = None
            reads = self.path.drop_ahead()
        wait_all(reads)

    def close(self) -> None:
        """Finish what is queued and join the thread."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while (update := self._next()) is not None:
            self._feed(update)
            del update  # it refers to the model

    def _feed(self, update: Update) -> None:
        try:
            for part in update.parts:
                if (bad := part.record.non_finite()) is not None:
                    raise NonFiniteGradientError(non_finite_message(bad[1]))
            self.feed(update)
        except BaseException as error:
            update.written.finish(error)
            update.updated.finish(error)

    def _next(self) -> Update | None:
        """The next update; reads ahead until there is one. None once closed and nothing is left."""
        with self._lock:
            while True:
                if self._queue:
                    following = self._queue.popleft()
                    if isinstance(following, Update):
                        self._ahead = None
                        return following
                    self._ahead = following
                elif self._closed:
                    self.path.drop_ahead()
                    return None
                elif self._ahead is None or not self.path.read_ahead(self._ahead):
                    self._lock.wait()

    def feed(self, update: Update) -> None:
        """Submit every block of one unit's update to the lanes.

        The gradients of its parts are applied one after another. Raises only before the first block. A later error ends
        its handles, once the blocks under way have ended.
        """
        if self.refused is not None:
            raise self.refused
        unit, undo = update.unit, update.undo
        if update.kept is not None:
            update.kept.wait()
        if undo is not None:
            undo.begin()
        self.path.begin(unit.index)
        origin = self._store.shards.updated(unit.spec).start
        computed: list[Handle] = []
        written: list[Handle] = []
        for start, stop in self.path.cuts(unit.spec):
            pieces = _within(update.parts, origin + start, origin + stop)
            if not pieces and update.weights == IN_PLACE:
                continue
            try:
                self.path.submit(Block(update, start, stop, pieces), computed, written)
            except BaseException as error:
                computed.append(Handle("update"))
                computed[-1].finish(error)
                break
        self.path.end(unit.index)
        all_computed, all_written = all_of("update", computed), all_of("ssd_write", [*computed, *written])
        all_computed.then(lambda _: update.used())
        weights_on_ssd = self._store.run(unit.index, WEIGHT) is not None
        (all_written if weights_on_ssd else all_computed).then(update.updated.finish)
        if undo is not None:
            all_written.then(undo.ended)
        all_written.then(update.written.finish)


def _within(parts: Sequence[Part], first: int, last: int) -> list[tuple[UnitGradient, Segment]]:
    """What of the parts of an update lies in elements [first, last) of its unit."""
    return [
        (part.record, segment.within(first, last))
        for part in parts
        for segment in part.segments
        if segment.start < last and segment.stop > first
    ]
