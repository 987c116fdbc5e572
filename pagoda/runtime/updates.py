"""Updates: the optimizer's math, unit by unit, block by block."""

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from pagoda.errors import NonFiniteGradientError, UsageError
from pagoda.memory.page import pages_for
from pagoda.optim.kernels import UpdateKernel
from pagoda.plan.layout import GRAD, WEIGHT
from pagoda.plan.units import UnitSpec
from pagoda.runtime.capture import Capture
from pagoda.runtime.gradients import UnitGradient, non_finite_message
from pagoda.runtime.lanes import THREAD_NAMES, Handle, Lane, Latch, wait_all
from pagoda.runtime.ring import Ring
from pagoda.runtime.segments import BlockSegment, Segment
from pagoda.runtime.store import Store
from pagoda.runtime.undo import Undo
from pagoda.runtime.unit import LiveUnit


@dataclass(frozen=True, slots=True)
class Part:
    """One step's gradient of a unit, and what of the unit it updates."""

    record: UnitGradient
    segments: Sequence[Segment]


class WeightPath(NamedTuple):
    """The extents that an update reads a unit's weights from and writes them to."""

    read: str
    write: str


IN_PLACE = WeightPath(WEIGHT, WEIGHT)


class Update(NamedTuple):
    """One unit's update, as a stream is given it."""

    unit: LiveUnit
    parts: Sequence[Part]
    """One for each step."""
    weights: WeightPath
    undo: Undo | None
    """Keeps what an update that may have to be undone changes."""
    updated: Handle
    """Ends when the new weights are in their home."""
    written: Handle
    """Ends when every state is."""
    used: Callable[[], None]
    """Told when the gradients have been read for the last time."""


@dataclass
class _ReadAhead:
    """Blocks of a unit that is likely to be updated next, in the ring before its update comes."""

    unit: int
    blocks: dict[int, tuple[int, list[Handle]]] = field(default_factory=dict)
    """first element -> ring slot, reads."""
    begun: int = 0
    """Blocks whose reads have been submitted."""


class Feeder:
    """The thread that feeds a stream with updates, in the order in which the scheduler issues them.

    While it has none, it reads ahead the unit that the scheduler has named, as far as the stream's ring has room.
    `_lock` guards the queue; it is the stream's.
    """

    def __init__(self, stream: "BlockStream") -> None:
        self._stream = stream
        self._lock = stream.lock
        self._queue: deque[Update | int] = deque()
        """Updates, and units to read ahead once what comes before has been fed."""
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"{THREAD_NAMES}updater", daemon=True)
        self._thread.start()

    def submit(self, update: Update) -> None:
        """Feed an update to the stream, after those before it. Its handles end when it has, however it did.

        A small one in RAM is fed at once: this thread would do no less to hand it to another.
        """
        if self._stream.is_small(update):
            self._feed(update)
            return
        with self._lock:
            closed = self._closed
            if not closed:
                self._queue.append(update)
                self._lock.notify_all()
        if closed:  # one that came of what was under way then
            error = self._stream.refused or UsageError("The optimizer is closed.")
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
            self._stream.ahead_wanted = -1
            reads = self._stream.drop_ahead()
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
            self._stream.feed(update)
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
                        return following
                    self._stream.ahead_wanted = following
                elif self._closed:
                    self._stream.drop_ahead()
                    return None
                elif not self._stream.read_ahead():
                    self._lock.wait()


class BlockStream:
    """Runs the updates of units, one after another, block by block.

    A unit whose states are in RAM is cut into blocks for the update lane's threads. States on SSD stream through
    the ring: a block is read, updated and written back while others are read and written; the ring's size bounds
    what is in flight. While there is nothing to feed, free slots can read ahead the unit that most likely comes next.

    `lock` guards the free slots and what was read ahead.
    """

    def __init__(self, store: Store, kernel: UpdateKernel, lanes: dict[str, Lane]) -> None:
        self._store = store
        self._kernel = kernel
        self._lanes = lanes
        self._block = store.plan.layout.block_elements
        self._states = store.plan.layout.states
        self._streamed_of = [
            [s.name for s in self._states if store.run(unit.index, s.name) is not None] for unit in store.plan.units
        ]
        self._touched = [
            int(store.plan.layout.updated_elements(unit) * store.plan.layout.bytes_per_update)
            for unit in store.plan.units
        ]
        """Bytes that each unit's update reads and writes."""
        self.lock = threading.Condition()
        self.capture: Capture | None = None
        """The checkpoint that is being written, if any."""
        self.refused: BaseException | None = None
        """What every update that has not begun fails with, if anything."""
        self._ring = Ring(range(len(store.ring)), self.lock)
        self._ahead = _ReadAhead(-1)
        self.ahead_wanted = -1
        """The unit to read ahead, if any."""
        self._ring_offsets: dict[str, int] = {}
        offset = 0
        for state in (*store.plan.layout.moments, store.plan.layout.weight):
            self._ring_offsets[state.name] = offset
            offset += store.plan.layout.block_pages(state.name) * store.plan.page_bytes

    def is_small(self, update: Update) -> bool:
        """Whether an update is done before another thread would have begun it."""
        index = update.unit.index
        small = self._touched[index] <= self._lanes["update"].inline_bytes
        return small and self.capture is None and not self._streamed_of[index]

    def read_ahead(self) -> bool:
        """Read one more block of the unit that is likely to be next; False when there is no slot or no block."""
        index = self.ahead_wanted
        if index < 0 or not self._ring.has_room:
            return False
        if self._ahead.unit != index:
            self.drop_ahead()
            self._ahead = _ReadAhead(index)
        cuts = self._readable_ahead(self._store.plan.units[index])
        if self._ahead.begun == len(cuts) or not self._streamed(index):
            return False
        start, stop = cuts[self._ahead.begun]
        slot = self._ring.take()
        self._ahead.blocks[start] = (slot, [*self._transfers("ssd_read", index, slot, start, stop, WEIGHT)])
        self._ahead.begun += 1
        return True

    def drop_ahead(self) -> list[Handle]:
        """Give the slots of what was read ahead back, each once its reads have ended; returns the reads."""
        dropped, self._ahead = self._ahead.blocks, _ReadAhead(-1)
        for slot, reads in dropped.values():
            Latch("ssd_read", reads).then(lambda _, slot=slot: self._ring.give_back(slot))  # type: ignore[misc]
        return [read for _, reads in dropped.values() for read in reads]

    def _take_slot(self, start: int) -> tuple[int, list[Handle]]:
        """A ring slot for a block of the unit that is fed, and the reads that bring it, if it was read ahead."""
        with self.lock:
            if start in self._ahead.blocks:
                return self._ahead.blocks.pop(start)
            if not self._ring.has_room:
                self.drop_ahead()  # what is left of it lies behind this block: parameters without a gradient
            return self._ring.take(), []

    def feed(self, update: Update) -> None:
        """Submit every block of one unit's update to the lanes.

        The gradients of its parts are applied one after another. Raises only before the first block. A later error ends
        its handles, once the blocks under way have ended.
        """
        if self.refused is not None:
            raise self.refused
        unit, parts, weights, undo = update.unit, update.parts, update.weights, update.undo
        index = unit.index
        if undo is not None:
            undo.begin()
        streamed = self._streamed(index)
        if streamed:
            with self.lock:
                self.ahead_wanted = -1
                if self._ahead.unit != index:
                    self.drop_ahead()
        updated = self._store.shards.updated(unit.spec)
        computed: list[Handle] = []
        writes: list[Handle] = []
        for start, stop in self._cuts(unit.spec):
            first, last = updated.start + start, updated.start + stop
            pieces = [
                (part.record, s.within(first, last))
                for part in parts
                for s in part.segments
                if s.start < last and s.stop > first
            ]
            if not pieces and weights == IN_PLACE:
                continue
            try:
                if (capture := self.capture) is not None:
                    capture.before_update(index, update.written, first, last)
                self._feed_block(unit, start, stop, pieces, streamed, weights, undo, computed, writes)
            except BaseException as error:
                computed.append(Handle("update"))
                computed[-1].finish(error)
                break
        if streamed:
            with self.lock:
                self.drop_ahead()  # blocks without a gradient
        all_computed, all_written = Latch("update", computed), Latch("ssd_write", [*computed, *writes])
        all_computed.then(lambda _: update.used())
        ready = all_written if WEIGHT in streamed else all_computed
        ready.then(update.updated.finish)
        if undo is not None:
            all_written.then(undo.ended)
        all_written.then(update.written.finish)

    def _feed_block(
        self,
        unit: LiveUnit,
        start: int,
        stop: int,
        pieces: list[tuple[UnitGradient, Segment]],
        streamed: list[str],
        weights: WeightPath,
        undo: Undo | None,
        computed: list[Handle],
        written: list[Handle],
    ) -> None:
        """Submit one block: elements [start, stop) of what this rank updates of the unit."""
        index = unit.index
        store = self._store
        slot, using = self._take_slot(start) if streamed else (-1, [])
        addresses = self._addresses(unit, slot, start, weights.write)
        itemsize = self._states[0].dtype.itemsize
        old = store.tensor(index, weights.read) if weights.read != weights.write else None

        def compute() -> None:
            if old is not None:
                ctypes.memmove(addresses[0], old.data_ptr() + start * itemsize, (stop - start) * itemsize)
            if undo is not None:
                undo.save(self._changed(index, start, stop))
            for record, piece in pieces:
                self._apply(unit, start, addresses, record, piece)

        touched = 2 * self._state_bytes(index, start, stop) + (stop - start) * store.dtype(GRAD).itemsize
        try:
            if streamed and not using:
                using.extend(self._transfers("ssd_read", index, slot, start, stop, weights.read))
            handle = self._lanes["update"].submit(compute, using, touched, f"update {unit.spec.name}")
            computed.append(handle)
            using.append(handle)
            for write in self._transfers("ssd_write", index, slot, start, stop, weights.write, (handle,)):
                written.append(write)
                using.append(write)
        except BaseException:
            written.extend(using)  # the update ends after all that was submitted
            raise
        finally:
            if streamed:
                Latch("ssd_write", using).then(lambda _: self._ring.give_back(slot))

    def _cuts(self, unit: UnitSpec) -> list[tuple[int, int]]:
        """First and last element of every block of a unit's update."""
        total = len(self._store.shards.updated(unit))
        return [(start, min(start + self._block, total)) for start in range(0, total, self._block)]

    def _readable_ahead(self, unit: UnitSpec) -> list[tuple[int, int]]:
        """The blocks of `_cuts` that can be read before those before them are written."""
        return self._cuts(unit)

    def _addresses(self, unit: LiveUnit, slot: int, start: int, weights: str) -> list[int]:
        """Where each state of a block is while it is updated: at home in RAM, else in the ring."""
        addresses: list[int] = []
        for state in self._states:
            home = self._store.tensor(unit.index, weights if state.name == WEIGHT else state.name)
            if home is not None:
                origin = self._store.shards.origin(unit.spec, state.name)
                addresses.append(home.data_ptr() + state.nbytes(origin + start))
            else:
                addresses.append(self._store.ring_address(slot) + self._ring_offsets[state.name])
        return addresses

    def _changed(self, unit: int, start: int, stop: int) -> dict[str, range]:
        """State -> the elements of a unit's extent that the update of a block changes."""
        return {s.name: range(s.elements(start), s.elements(stop)) for s in self._states}

    def _state_bytes(self, unit: int, start: int, stop: int) -> int:
        """Bytes of all states of a block."""
        changed = self._changed(unit, start, stop)
        return sum(len(elements) * self._store.dtype(name).itemsize for name, elements in changed.items())

    def _apply(self, unit: LiveUnit, start: int, addresses: list[int], record: UnitGradient, piece: Segment) -> None:
        """Update a piece of the block from `start` on."""
        assert isinstance(piece, BlockSegment)
        assert record.buffer is not None
        within, origin = self._store.shards.updated(unit.spec).start, self._store.shards.origin(unit.spec, GRAD)
        ahead = piece.start - within - start
        states = [a + state.nbytes(ahead) for a, state in zip(addresses, self._states, strict=True)]
        at = record.buffer.data_ptr() + (origin + piece.start - within) * record.buffer.element_size()
        self._kernel(*states, at, piece.stop - piece.start, *piece.arguments)

    def _streamed(self, unit: int) -> list[str]:
        """States of a unit whose home is SSD."""
        return self._streamed_of[unit]

    def _transfers(
        self, lane: str, unit: int, slot: int, start: int, stop: int, weights: str, after: tuple[Handle, ...] = ()
    ) -> Iterator[Handle]:
        """Move a block of every streamed state between its SSD extent and the ring; `weights` names the weights'."""
        store, ssd, page = self._store, self._store.ssd, self._store.plan.page_bytes
        for name in self._streamed(unit):
            run, itemsize = store.run(unit, weights if name == WEIGHT else name), store.dtype(name).itemsize
            assert run is not None
            assert ssd is not None
            move, verb = (ssd.load, "read") if lane == "ssd_read" else (ssd.store, "write")
            nbytes = pages_for((stop - start) * itemsize, page) * page
            view = store.ring_view(slot, self._ring_offsets[name], nbytes)
            work = partial(move, run, start * itemsize, view)
            yield self._lanes[lane].submit(work, after, nbytes, f"{verb} {store.plan.units[unit].name}")
