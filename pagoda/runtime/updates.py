"""Updates: the optimizer's math, unit by unit: in which order, and block by block."""

import ctypes
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from pagoda.errors import NonFiniteGradientError
from pagoda.memory.page import pages_for
from pagoda.optim.kernels import UpdateKernel
from pagoda.plan.layout import GRAD, WEIGHT
from pagoda.plan.ops import SSD
from pagoda.plan.units import UnitSpec
from pagoda.runtime.capture import Capture
from pagoda.runtime.damage import Damage
from pagoda.runtime.gradients import Gradients, UnitGradient, non_finite_message
from pagoda.runtime.lanes import Handle, Lane, Latch, wait_all
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


@dataclass(order=True)
class Update:
    """One unit's update. `urgency` is when the next forward needs its weights."""

    urgency: float
    sequence: int
    record: UnitGradient = field(compare=False)
    segments: tuple[Segment, ...] = field(compare=False)
    published: Handle = field(compare=False)
    """Ends when the new weights are in their home."""
    written: Handle = field(compare=False)
    """Ends when every state is."""
    undo: Undo | None = field(default=None, compare=False)
    """Keeps what an update that may have to be undone changes."""


@dataclass
class _ReadAhead:
    """Blocks of a unit that is likely to be updated next, in the ring before its gradient is complete."""

    unit: int
    blocks: dict[int, tuple[int, list[Handle]]] = field(default_factory=dict)
    """first element -> ring slot, reads."""
    begun: int = 0
    """Blocks whose reads have been submitted."""


class Updater:
    """Feeds queued updates to the lanes, most urgent first.

    Under backward that order is last in, first out, because backward ends with the units that forward starts
    with: what is due first is updated first, and what was left behind has the whole forward to catch up.

    The next unit's gradient is read while this one is being fed. When nothing is queued, the stream reads ahead, so
    that the first update of a step, which the next forward waits for, finds its state in RAM.

    `_lock` guards the queue; it is the stream's.
    """

    def __init__(self, store: Store, gradients: Gradients, stream: "BlockStream") -> None:
        self._store = store
        self._gradients = gradients
        self._stream = stream
        self._lock = self._stream.lock
        self._queue: list[Update] = []
        self._sequence = itertools.count()
        self._closed = False
        self._latest: dict[int, Handle] = {}
        """unit -> `written` of its latest update."""
        self._thread = threading.Thread(target=self._run, name="pagoda-updater", daemon=True)
        self._thread.start()

    def submit(self, record: UnitGradient, segments: Sequence[Segment], urgency: float) -> Handle:
        """Queue a unit's update; the handle ends when its new weights can be used."""
        update = self._update(record, segments, urgency)
        self.stands(update)
        self._push(update)
        return update.published

    def speculate(self, record: UnitGradient, segments: Sequence[Segment], urgency: float) -> Update:
        """Queue an update that may have to be undone: `stands` or `withdraw` ends that."""
        update = self._update(record, segments, urgency)
        update.undo = Undo(self._store, record.unit.index)
        self._push(update)
        return update

    def stands(self, update: Update) -> None:
        """An update belongs to the state that `drain` waits for."""
        update.written.then(self._stream.damage.note)
        with self._lock:
            self._latest[update.record.unit.index] = update.written

    def withdraw(self, update: Update) -> None:
        """An update that may have to be undone shall not be begun, if it has not been: then it ends at once."""
        with self._lock:
            if update not in self._queue:
                return
            self._queue.remove(update)
        self._gradients.release(update.record)
        update.written.finish()
        update.published.finish()

    def undo(self, update: Update) -> None:
        """Have the states back that a unit had before an update that has ended, however it did."""
        assert update.undo is not None
        with self._lock:
            self._stream.forget(update.record.unit.index, update.written)
            update.undo.revert()

    def _update(self, record: UnitGradient, segments: Sequence[Segment], urgency: float) -> Update:
        unit = record.unit
        published, written = Handle(update_lane(self._store, unit.index)), Handle("ssd_write")
        return Update(urgency, next(self._sequence), record, tuple(segments), published, written)

    def _push(self, update: Update) -> None:
        with self._lock:
            self._stream.may_read_ahead = True
            self._queue.append(update)
            self._lock.notify_all()

    def pending(self) -> dict[int, Handle]:
        """unit -> what ends when its latest update has been written home, for updates that have not been."""
        with self._lock:
            return {unit: written for unit, written in self._latest.items() if not written.succeeded}

    def drain(self) -> None:
        """Wait until every queued update has been written home and the ring is idle; raises the first error, once."""
        with self._lock:
            latest, self._latest = self._latest, {}
            self._stream.may_read_ahead = False  # it would be dropped unused, and delay what is waited for
        wait_all(latest.values())
        with self._lock:
            reads = self._stream.drop_ahead()
        wait_all(reads)

    def close(self) -> None:
        """Finish what is queued and join the thread."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        self._thread.join()

    def _run(self) -> None:
        loaded: Update | None = None
        while True:
            current = loaded or self._next_or_read_ahead()
            if current is None:
                return
            try:
                if loaded is None:
                    current = self._loaded(current)
                with self._lock:
                    loaded = self._pop(self._queue) if self._queue else None
                if loaded is not None and not self._gradients.load(loaded.record, block=False):
                    with self._lock:
                        self._queue.append(loaded)
                    loaded = None
                current.record.settle()
                if (bad := current.record.non_finite()) is not None:
                    raise NonFiniteGradientError(non_finite_message(bad[1]))
                part = Part(current.record, current.segments)
                self._stream.feed(current.record.unit, [part], current.published, current.written, undo=current.undo)
            except BaseException as error:
                self._gradients.release(current.record)
                current.written.finish(error)
                current.published.finish(error)

    def _pop(self, among: list[Update]) -> Update:
        """Take the most urgent of queued updates whose gradient is there, else the first that was queued.

        Of several ranks, whatever brings a later gradient may wait for the result of an earlier update.
        """
        there = [update for update in among if update.record.settled]
        update = min(there) if there else min(among, key=lambda update: update.sequence)
        self._queue.remove(update)
        return update

    def _next_or_read_ahead(self) -> Update | None:
        """The most urgent update; reads ahead until there is one. None once closed and nothing is left."""
        with self._lock:
            while not self._queue:
                if self._closed:
                    self._stream.drop_ahead()
                    return None
                if not self._stream.read_ahead():
                    self._lock.wait()
            return self._pop(self._queue)

    def _loaded(self, update: Update) -> Update:
        """`update` with its gradient in RAM; or, while other gradients leave no room for it, one of theirs."""
        if self._gradients.load(update.record, block=False):
            return update
        with self._lock:
            if resident := [other for other in self._queue if other.record.buffer is not None]:
                self._queue.append(update)
                update = self._pop(resident)
        self._gradients.load(update.record, block=True)
        return update


class BlockStream:
    """Runs the updates of units, one after another, block by block.

    A unit whose states are in RAM is cut into blocks for the update lane's threads. States on SSD stream through
    the ring: a block is read, updated and written back while others are read and written; the ring's size bounds
    what is in flight. While there is nothing to feed, free slots can read ahead the unit that followed this one last
    time.

    `lock` guards the free slots and what was read ahead.
    """

    def __init__(
        self, store: Store, kernel: UpdateKernel, lanes: dict[str, Lane], finished: Callable[[UnitGradient], None]
    ) -> None:
        self._store = store
        self._kernel = kernel
        self._lanes = lanes
        self.finished = finished
        """Told of every gradient that has been applied, or cannot be."""
        self._block = store.plan.layout.block_elements
        self._states = store.plan.layout.states
        self.lock = threading.Condition()
        self.capture: Capture | None = None
        """The checkpoint that is being written, if any."""
        self.damage = Damage()
        """Told of updates that failed."""
        self.refused: BaseException | None = None
        """What every update that has not begun fails with, if anything."""
        self._written: dict[int, Handle] = {}
        """unit -> `written` of the latest update that was fed."""
        self._successor: dict[int, int] = {}
        """unit -> the unit that was fed after it last time."""
        self._fed = -1
        """The unit fed last."""
        self._free_slots = list(range(len(store.ring)))
        self._ahead = _ReadAhead(-1)
        self.may_read_ahead = False
        """False from a drain until something is queued: then nobody meets a busy ring."""
        self._ring_offsets: dict[str, int] = {}
        offset = 0
        for state in (*store.plan.layout.moments, store.plan.layout.weight):
            self._ring_offsets[state.name] = offset
            offset += store.plan.layout.block_pages(state.name) * store.plan.page_bytes

    def read_ahead(self) -> bool:
        """Read one more block of the unit that is likely to be next; False when there is no slot or no block."""
        index = self._successor.get(self._fed, -1)
        if not self.may_read_ahead or index < 0 or not self._free_slots:
            return False
        if self._ahead.unit != index:
            if not self._written[index].succeeded:
                return False
            self.drop_ahead()
            self._ahead = _ReadAhead(index)
        cuts = self._readable_ahead(self._store.plan.units[index])
        if self._ahead.begun == len(cuts) or not self._streamed(index):
            return False
        start, stop = cuts[self._ahead.begun]
        slot = self._free_slots.pop()
        self._ahead.blocks[start] = (slot, [*self._transfers("ssd_read", index, slot, start, stop, WEIGHT)])
        self._ahead.begun += 1
        return True

    def drop_ahead(self) -> list[Handle]:
        """Give the slots of what was read ahead back, each once its reads have ended; returns the reads."""
        dropped, self._ahead = self._ahead.blocks, _ReadAhead(-1)
        for slot, reads in dropped.values():
            Latch("ssd_read", reads).then(lambda _, slot=slot: self._release_slot(slot))  # type: ignore[misc]
        return [read for _, reads in dropped.values() for read in reads]

    def forget_errors(self) -> None:
        """Every state has been replaced: that some could not be written before no longer matters."""
        self._written = {u: h if h.succeeded else Latch("ssd_write", []) for u, h in self._written.items()}

    def forget(self, unit: int, written: Handle) -> None:
        """The states of a unit are about to be what they were before the update that `written` is of, however it ended.
        An error of the one before stays.
        """
        if self._written.get(unit) is written:
            self._written[unit] = Latch("ssd_write", [])
        if self._ahead.unit == unit:
            self.drop_ahead()

    def _take_slot(self, start: int) -> tuple[int, list[Handle]]:
        """A ring slot for a block of the unit that is fed, and the reads that bring it, if it was read ahead."""
        with self.lock:
            if start in self._ahead.blocks:
                return self._ahead.blocks.pop(start)
            while not self._free_slots:
                self.drop_ahead()  # what is left of it lies behind this block: parameters without a gradient
                if not self._free_slots:
                    self.lock.wait()
            return self._free_slots.pop(), []

    def _release_slot(self, slot: int) -> None:
        with self.lock:
            self._free_slots.append(slot)
            self.lock.notify_all()

    def feed(
        self,
        unit: LiveUnit,
        parts: Sequence[Part],
        published: Handle,
        written: Handle,
        weights: WeightPath = IN_PLACE,
        undo: Undo | None = None,
    ) -> None:
        """Submit every block of one unit's update to the lanes, once its previous one is written.

        The gradients of `parts` are applied one after another. `published` ends when the new weights are in their
        home, `written` when every state is. `undo` keeps what is changed.

        Raises only before the first block. A later error ends both handles, once the blocks under way have ended.
        """
        if self.refused is not None:
            raise self.refused
        index = unit.index
        if index in self._written:
            self._written[index].wait()
        if undo is not None:
            undo.begin()
        self._written[index] = written
        with self.lock:
            self._successor[self._fed] = index
            self._fed = index
            if self._ahead.unit != index:
                self.drop_ahead()
        streamed = self._streamed(index)
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
                    capture.before_update(index, written, first, last)
                self._feed_block(unit, start, stop, pieces, streamed, weights, undo, computed, writes)
            except BaseException as error:
                computed.append(Handle("update"))
                computed[-1].finish(error)
                break
        with self.lock:
            self.drop_ahead()  # blocks without a gradient
        all_computed, all_written = Latch("update", computed), Latch("ssd_write", [*computed, *writes])
        for part in parts:
            all_computed.then(lambda _, record=part.record: self.finished(record))  # type: ignore[misc]
        ready = all_written if WEIGHT in streamed else all_computed
        ready.then(published.finish)
        if undo is not None:
            all_written.then(undo.ended)
        all_written.then(written.finish)

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
                Latch("ssd_write", using).then(lambda _: self._release_slot(slot))

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
        return [s.name for s in self._states if self._store.run(unit, s.name) is not None]

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


def update_lane(store: Store, unit: int) -> str:
    """The lane whose work ends last before a unit's new weights can be used, most likely."""
    placement = store.plan.placement
    if unit in placement.updated_on_device | placement.resident:
        return "device_update"
    homes = {state.name: store.plan.placement.home(unit, state.name) for state in store.plan.layout.states}
    if homes[WEIGHT] == SSD:
        return "ssd_write"
    return "ssd_read" if SSD in homes.values() else "update"
