"""Updates on the CPU: in place where states are in RAM, through a ring where they are on SSD."""

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from pagoda.memory.page import pages_for
from pagoda.memory.region import Region
from pagoda.optim.kernels import UpdateKernel
from pagoda.plan.layout import GRAD, MASTER, WEIGHT
from pagoda.plan.units import UnitSpec
from pagoda.runtime.gradients import UnitGradient
from pagoda.runtime.lanes import Handle, Lane, all_of
from pagoda.runtime.next_update import Segment
from pagoda.runtime.store import Store
from pagoda.runtime.unit import LiveUnit
from pagoda.runtime.updates import IN_PLACE, Block, UpdatePath
from pagoda.schedule.operations import Writes


class Part(NamedTuple):
    """What a block has of a state."""

    elements: range
    """Of the state's extent."""
    page_at: int
    """Byte of the extent at which the first page that has some of it begins."""


class Moved(NamedTuple):
    """States on SSD that a part of an update reads, and those that it writes."""

    read: Sequence[str]
    written: Sequence[str]


class HostPath(UpdatePath):
    """Updates blocks by an element-wise rule, on the update lane's threads.

    States in RAM are updated at home. Those on SSD stream through the ring: a block is read, updated and written back
    while others are read and written; the ring's size bounds what is in flight. Slots that no update needs now read
    ahead the unit that most likely comes next. What is read ahead is the feeder's thread's alone.
    """

    def __init__(self, store: Store, kernel: UpdateKernel, lanes: dict[str, Lane]) -> None:
        super().__init__(store, lanes)
        self._kernel = kernel
        layout, units = store.plan.layout, store.plan.units
        self._streamed = [[s.name for s in self._states if store.run(unit.index, s.name) is not None] for unit in units]
        """Each unit's states on SSD."""
        self._touched = [int(layout.updated_elements(unit) * layout.bytes_per_update) for unit in units]
        """Bytes that each unit's update reads and writes."""
        self._ring = store.ring
        self._ahead_unit = -1
        """The unit that is read ahead."""
        self._ahead: dict[int, tuple[Region, list[Handle]]] = {}
        """Its blocks in the ring: first element -> slot, reads."""
        self._unread: list[tuple[int, int]] = []
        """Its blocks that have had no slot yet, last one first."""
        self._tails: dict[tuple[int, str], tuple[int, Handle]] = {}
        """(unit, state on SSD) -> where the pages written last end, and what ends when they are there."""
        self._ring_offsets: dict[str, int] = {}
        """State -> where it begins in a slot of the ring."""
        offset = 0
        for state in (*layout.moments, layout.weight):
            self._ring_offsets[state.name] = offset
            offset += layout.block_pages(state.name) * store.plan.page_bytes

    def is_small(self, unit: UnitSpec) -> bool:
        return self._touched[unit.index] <= self._lanes["update"].inline_bytes and not self._streamed[unit.index]

    def cuts(self, unit: UnitSpec) -> list[tuple[int, int]]:
        if self.is_small(unit):  # threads need not share it
            return [(0, len(self._store.shards.updated(unit)))]
        return super().cuts(unit)

    def begin(self, unit: int) -> None:
        if self._streamed[unit]:
            self._unread = []
            if unit != self._ahead_unit:
                self.drop_ahead()

    def end(self, unit: int) -> None:
        if self._streamed[unit]:
            self.drop_ahead()  # blocks without a gradient

    def read_ahead(self, unit: int) -> None:
        self.drop_ahead()
        self._ahead_unit, self._unread = unit, self._readable_ahead(self._store.plan.units[unit])[::-1]
        self.read_more()

    def read_more(self) -> None:
        while self._unread and (slot := self._ring.take_if_free()) is not None:
            start, stop = self._unread.pop()
            unit, parts = self._ahead_unit, self._parts(self._ahead_unit, start, stop)
            self._ahead[start] = slot, [*self._transfers("ssd_read", unit, slot, parts, WEIGHT, self._streamed[unit])]

    def drop_ahead(self) -> list[Handle]:
        dropped = self._ahead
        self._ahead_unit, self._ahead, self._unread = -1, {}, []
        for slot, reads in dropped.values():
            all_of(reads).then(partial(self._give_back, slot))
        return [read for _, reads in dropped.values() for read in reads]

    def _readable_ahead(self, unit: UnitSpec) -> list[tuple[int, int]]:
        """The blocks of `cuts` that can be read before those before them are written."""
        return self.cuts(unit)

    def _take_slot(self, start: int) -> tuple[Region, list[Handle]]:
        """A slot for a block of the unit that is fed, and the reads that bring it, if it was read ahead."""
        if start in self._ahead:
            return self._ahead.pop(start)
        slot = self._ring.take_if_free()
        if slot is None:
            self.drop_ahead()  # what is left of it lies behind this block: parameters without a gradient
            slot = self._ring.take()
        return slot, []

    def _give_back(self, slot: Region, _error: BaseException | None = None) -> None:
        self._ring.give_back(slot)
        if self._unread:
            self.more()

    def submit(self, block: Block, computed: list[Handle], written: list[Handle]) -> None:
        update, start, stop, pieces = block
        unit, undo, index, store = update.unit, update.undo, update.unit.index, self._store
        slot, using = self._take_slot(start) if self._streamed[index] else (None, [])
        parts = self._parts(index, start, stop)
        moved = self._moved(index, update.writes)
        addresses = self._addresses(index, slot, parts, update.weights.write, update.writes)
        old = store.tensor(index, update.weights.read) if update.weights != IN_PLACE else None
        weights, itemsize = parts[WEIGHT].elements, self._states[0].dtype.itemsize

        def compute() -> None:
            if old is not None:
                ctypes.memmove(addresses[0], old.data_ptr() + weights.start * itemsize, len(weights) * itemsize)
            if undo is not None:
                undo.save({name: part.elements for name, part in parts.items()})
            for record, piece in pieces:
                self._apply(unit, start, addresses, record, piece)

        states = sum(len(part.elements) * store.dtype(name).itemsize for name, part in parts.items())
        touched = 2 * states + (stop - start) * store.dtype(GRAD).itemsize
        try:
            if slot is not None and not using:
                using.extend(self._transfers("ssd_read", index, slot, parts, update.weights.read, moved.read))
            handle = self._lanes["update"].submit(compute, using, touched, f"update {unit.spec.name}")
            computed.append(handle)
            using.append(handle)
            if slot is not None:
                into = update.weights.write
                for write in self._transfers("ssd_write", index, slot, parts, into, moved.written, (handle,)):
                    written.append(write)
                    using.append(write)
        except BaseException:
            written.extend(using)  # the update ends after all that was submitted
            raise
        finally:
            if slot is not None:
                all_of(using).then(partial(self._give_back, slot))

    def _moved(self, unit: int, writes: Writes) -> Moved:
        streamed = self._streamed[unit]
        if writes is Writes.ALL:
            return Moved(streamed, streamed)
        master, moments = ([name for name in streamed if (name in MASTER) is of] for of in (True, False))
        return Moved(streamed, master) if writes is Writes.WEIGHTS else Moved(moments, moments)

    def _parts(self, unit: int, start: int, stop: int) -> dict[str, Part]:
        """What a block has of each state; nothing of a state that its parameter has not."""
        spec, parts = self._store.plan.units[unit], {}
        for state in self._states:
            origin = self._store.shards.origin(spec, state.name)
            elements = range(state.elements(origin + start), state.elements(origin + stop))
            parts[state.name] = Part(elements, elements.start * state.dtype.itemsize)
        return parts

    def _addresses(
        self, unit: int, slot: Region | None, parts: Mapping[str, Part], weights: str, writes: Writes
    ) -> list[int]:
        """Where each state of a block is while it is updated: at home in RAM, else in the ring; 0 if it has none. If
        only moments are to change, weights are computed from whatever the ring has, and left there."""
        addresses: list[int] = []
        for state in self._states:
            part = parts.get(state.name)
            home = self._store.tensor(unit, weights if state.name == WEIGHT else state.name)
            if part is None:
                addresses.append(0)
            elif home is not None and not (writes is Writes.MOMENTS and state.name in MASTER):
                addresses.append(home.data_ptr() + part.elements.start * state.dtype.itemsize)
            else:
                assert slot is not None
                at = slot.address + self._ring_offsets[state.name]
                addresses.append(at + part.elements.start * state.dtype.itemsize - part.page_at)
        return addresses

    def _apply(self, unit: LiveUnit, start: int, addresses: list[int], record: UnitGradient, piece: Segment) -> None:
        """Update a piece of the block from `start` on."""
        buffer = record.buffer
        assert buffer is not None
        within, origin = self._store.shards.updated(unit.spec).start, self._store.shards.origin(unit.spec, GRAD)
        ahead = piece.start - within - start
        states = [a + state.nbytes(ahead) for a, state in zip(addresses, self._states, strict=True)]
        at = buffer.data_ptr() + (origin + piece.start - within) * buffer.element_size()
        self._kernel(*states, at, piece.stop - piece.start, *piece.arguments)

    def _transfers(
        self,
        lane: str,
        unit: int,
        slot: Region,
        parts: Mapping[str, Part],
        weights: str,
        names: Sequence[str],
        after: tuple[Handle, ...] = (),
    ) -> Iterator[Handle]:
        """Move a block of some states between their SSD extents and the ring, in whole pages; `weights` names the
        weights' extent. What was written before on the first of these pages is there before it is read."""
        store, ssd, page = self._store, self._store.ssd, self._store.plan.page_bytes
        reading = lane == "ssd_read"
        for name in names:
            run, part = store.run(unit, weights if name == WEIGHT else name), parts.get(name)
            if part is None:
                continue
            assert run is not None
            assert ssd is not None
            move, verb = (ssd.load, "read") if reading else (ssd.store, "write")
            nbytes = pages_for(part.elements.stop * store.dtype(name).itemsize - part.page_at, page) * page
            view = slot.view(self._ring_offsets[name], nbytes)
            end, before = self._tails.get((unit, name), (0, None))
            behind = (before,) if reading and before is not None and end > part.page_at and not before.done else ()
            work = partial(move, run, part.page_at, view)
            handle = self._lanes[lane].submit(work, (*after, *behind), nbytes, f"{verb} {store.plan.units[unit].name}")
            if not reading:
                self._tails[unit, name] = part.page_at + nbytes, handle
            yield handle
