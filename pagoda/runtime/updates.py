"""Updates as sequences of blocks, whose states on SSD stream through the ring in RAM."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from pagoda.errors import UsageError
from pagoda.memory.page import pages_for
from pagoda.memory.region import Region
from pagoda.plan.layout import WEIGHT
from pagoda.plan.units import UnitSpec
from pagoda.runtime.gradients import UnitGradient, non_finite_error
from pagoda.runtime.lanes import Handle, Lane, all_of
from pagoda.runtime.next_update import Segment
from pagoda.runtime.speculation import Guess
from pagoda.runtime.store import Store
from pagoda.runtime.unit import LiveUnit

Pieces = Sequence[tuple[UnitGradient, Sequence[Segment]]]
"""The gradients of one or several steps, applied one after another, each with the segments that it changes."""
Tensors = Mapping[str, torch.Tensor]
"""By state, its part of a block."""


class Extents(NamedTuple):
    """The extents from which an update reads a unit's states, and to which it writes them, by state."""

    read: Mapping[str, str]
    write: Mapping[str, str]

    @property
    def moved(self) -> list[str]:
        """The states that are not updated in place."""
        return [state for state, extent in self.read.items() if self.write[state] != extent]


class Update(NamedTuple):
    """One unit's update."""

    pieces: Pieces
    extents: Extents
    guess: Guess | None
    """Keeps the old states if the update may have to be undone."""
    kept: Handle | None
    """Ends when a checkpoint that still needs the old states has a copy of them."""
    updated: Handle
    """Ends when the new weights are in their home."""
    written: Handle
    """Ends when every state is in its home."""
    used: Callable[[], None]
    """Called when the gradients have been read."""

    @property
    def unit(self) -> LiveUnit:
        return self.pieces[-1][0].unit

    def finish(self, error: BaseException | None) -> None:
        """Mark the update as ended before any of it was done."""
        self.written.finish(error)
        self.updated.finish(error)


class Block(NamedTuple):
    """A part of a unit's update."""

    update: Update
    start: int
    """First element, counted from the first element that this rank updates of the unit."""
    stop: int
    pieces: Pieces
    """What of the update lies in it. Empty if unchanged states are only copied."""


class Part(NamedTuple):
    """A block's part of a state."""

    elements: range
    """Elements of the state's extent."""
    page_at: int
    """Byte of the extent at which the part's first page begins."""


class Updater:
    """Updates units in the order in which the scheduler issues their updates. A subclass updates blocks by `_compute`
    and `_apply`.

    A thread of its own submits the blocks to lanes. A block is read, updated and written back while others are read and
    written. The ring's size bounds the blocks in flight. Free slots read ahead the unit that most likely comes next.
    What is read ahead belongs to this thread. The submitting thread feeds small updates itself, so they may overtake
    others.
    """

    def __init__(self, store: Store, lanes: dict[str, Lane]) -> None:
        layout, units = store.plan.layout, store.plan.units
        self._store = store
        self._lanes = lanes
        self._states = layout.states
        self._blocks = [store.plan.update_block(unit, lanes["update"].threads) for unit in units]
        """Elements of a block of each unit."""
        self._streamed = [[s.name for s in self._states if store.run(unit.index, s.name) is not None] for unit in units]
        """The states on SSD of each unit."""
        self._ring = store.ring
        on_device = store.plan.placement.on_device
        self._kept_free = layout.least_ring_slots if any(self._streamed[unit] for unit in on_device) else 0
        """Number of slots that reading ahead leaves free. Two updaters may share the ring. Then each needs slots that
        the other does not hold for an update that has not been asked for yet."""
        self._ahead_unit = -1
        """The unit that is read ahead."""
        self._ahead: dict[int, tuple[Region, list[Handle]]] = {}
        """Its blocks in the ring: first element -> slot, reads."""
        self._unread: list[tuple[int, int]] = []
        """Its blocks that have had no slot yet, the last one first."""
        self._tails: dict[tuple[int, str], tuple[int, Handle]] = {}
        """(unit, state on SSD) -> the end of the pages written last, and the handle of that write."""
        self._ring_offsets: dict[str, int] = {}
        """State -> its first byte in a slot of the ring."""
        offset = 0
        for state in (*layout.moments, layout.weight):
            self._ring_offsets[state.name] = offset
            offset += layout.block_pages(state.name) * store.plan.page_bytes
        self.refused: BaseException | None = None
        """The error with which every update that has not begun fails, if any."""
        self._lock = threading.Lock()
        self._closed = False
        self._thread = Lane("feeder")

    # --- for any thread ---

    def submit(self, update: Update) -> None:
        """Carry out an update after the ones before it. Its handles end when it has ended, with or without an error.

        A small update in RAM is fed at once, because handing it to another thread would take as long.
        """
        if update.kept is None and self._is_small(update.unit.spec):
            self._feed(update)
            return
        if self._later(partial(self._feed, update)) is None:  # one that came of what was under way then
            update.finish(self.refused or UsageError("The optimizer is closed."))

    def read_ahead(self, unit: int) -> None:
        """After the submitted updates, this unit will probably be updated next. Read its states as far as there is
        room."""
        self._later(partial(self._read_ahead, unit))

    def drop_ahead(self) -> None:
        """Wait until nothing is being read ahead, whether the reads succeed or fail."""
        reads: list[Handle] = []
        dropped = self._later(lambda: reads.extend(self._drop_ahead()))
        if dropped is not None:
            dropped.wait()
            for read in reads:
                read.wait_until_done()

    def close(self) -> None:
        """Finish the queued updates and join the thread."""
        with self._lock:
            self._closed = True
        self._thread.close()

    def _later(self, work: Callable[[], None]) -> Handle | None:
        """Do work on the updater's thread after everything submitted before. Returns None if it is closed."""
        with self._lock:
            return None if self._closed else self._thread.submit(work)

    # --- on the updater's thread ---

    def _feed(self, update: Update) -> None:
        try:
            for record, _ in update.pieces:
                if (bad := record.non_finite()) is not None:
                    raise non_finite_error(record.unit.name(bad[1]))
            self.feed(update)
        except BaseException as error:
            update.finish(error)

    def feed(self, update: Update) -> None:
        """Submit every block of one unit's update to the lanes.

        Raises only before the first block. A later error ends the update's handles once the submitted blocks have
        ended.
        """
        if self.refused is not None:
            raise self.refused
        unit = update.unit
        if update.kept is not None:
            update.kept.wait()
        if update.guess is not None:
            update.guess.begin()
        streams = bool(self._streamed[unit.index])
        if streams:
            self._unread = []
            if unit.index != self._ahead_unit:
                self._drop_ahead()
        origin = self._store.shards.updated(unit.spec).start
        computed: list[Handle] = []
        written: list[Handle] = []
        for start, stop in self._cuts(unit.spec):
            pieces = _within(update.pieces, origin + start, origin + stop)
            if not pieces and not update.extents.moved:
                continue
            try:
                self._submit(Block(update, start, stop, pieces), computed, written)
            except BaseException as error:
                computed.append(Handle())
                computed[-1].finish(error)
                break
        if streams:
            self._drop_ahead()  # blocks without a gradient
        all_computed, all_written = all_of(computed), all_of([*computed, *written])
        all_computed.then(lambda _: update.used())
        weights_on_ssd = self._store.run(unit.index, WEIGHT) is not None
        (all_written if weights_on_ssd else all_computed).then(update.updated.finish)
        all_written.then(update.written.finish)

    def _submit(self, block: Block, computed: list[Handle], written: list[Handle]) -> None:
        """Submit a block to the lanes. Adds to the lists the handles of its computation, and of the writes of its
        states to SSD. If it raises, the lists contain everything that was submitted."""
        unit, extents = block.update.unit.index, block.update.extents
        streamed = self._streamed[unit]
        slot, using = self._take_slot(block.start) if streamed else (None, [])
        parts = self._parts(unit, block.start, block.stop)
        try:
            if slot is not None and not using:
                using.extend(self._transfers("ssd_read", unit, slot, parts, extents.read, streamed))
            handle = self._compute(block, parts, slot, tuple(using))
            computed.append(handle)
            using.append(handle)
            if slot is not None:
                into = extents.write
                for write in self._transfers("ssd_write", unit, slot, parts, into, streamed, (handle,)):
                    written.append(write)
                    using.append(write)
        except BaseException:
            written.extend(using)  # the update ends after all that was submitted
            raise
        finally:
            if slot is not None:
                all_of(using).then(partial(self._give_back, slot))

    def _take_slot(self, start: int) -> tuple[Region, list[Handle]]:
        """A slot for a block, and the handles of its reads if the block was read ahead."""
        if start in self._ahead:
            return self._ahead.pop(start)
        slot = self._ring.take_if_free()
        if slot is None:
            self._drop_ahead()  # what is left of it lies behind this block: parameters without a gradient
            slot = self._ring.take()
        return slot, []

    def _give_back(self, slot: Region, _error: BaseException | None = None) -> None:
        """A slot is free. Called on any thread."""
        self._ring.give_back(slot)
        if self._unread:
            self._later(self._read_more)

    def _read_ahead(self, unit: int) -> None:
        self._drop_ahead()
        self._ahead_unit, self._unread = unit, self._readable_ahead(self._store.plan.units[unit])[::-1]
        self._read_more()

    def _read_more(self) -> None:
        """Continue to read ahead."""
        while self._unread and (slot := self._ring.take_if_free(self._kept_free)) is not None:
            start, stop = self._unread.pop()
            unit, parts = self._ahead_unit, self._parts(self._ahead_unit, start, stop)
            extents = self._store.newest_extents(unit)
            self._ahead[start] = slot, [*self._transfers("ssd_read", unit, slot, parts, extents, self._streamed[unit])]

    def _drop_ahead(self) -> list[Handle]:
        """Forget what was read ahead. Returns the handles of the reads."""
        dropped = self._ahead
        self._ahead_unit, self._ahead, self._unread = -1, {}, []
        for slot, reads in dropped.values():
            all_of(reads).then(partial(self._give_back, slot))
        return [read for _, reads in dropped.values() for read in reads]

    def _transfers(
        self,
        lane: str,
        unit: int,
        slot: Region,
        parts: Mapping[str, Part],
        extents: Mapping[str, str],
        names: Sequence[str],
        after: tuple[Handle, ...] = (),
    ) -> Iterator[Handle]:
        """Move a block's parts of some states between SSD and the ring, in whole pages. `extents` names the extent of
        each state. A read waits for earlier writes to its first page."""
        store, page = self._store, self._store.plan.page_bytes
        reading = lane == "ssd_read"
        move, verb = (store.load, "read") if reading else (store.save, "write")
        for name in names:
            part = parts.get(name)
            if part is None:
                continue
            nbytes = pages_for(part.elements.stop * store.dtype(name).itemsize - part.page_at, page) * page
            view = slot.view(self._ring_offsets[name], nbytes)
            end, before = self._tails.get((unit, name), (0, None))
            behind = (before,) if reading and before is not None and end > part.page_at and not before.done else ()
            work = partial(move, unit, extents[name], part.page_at, view)
            handle = self._lanes[lane].submit(work, (*after, *behind), nbytes, f"{verb} {store.plan.units[unit].name}")
            if not reading:
                self._tails[unit, name] = part.page_at + nbytes, handle
            yield handle

    # --- blocks ---

    def _is_small(self, unit: UnitSpec) -> bool:
        """Whether the update of a unit takes less time than handing it to another thread."""
        return False

    def _cuts(self, unit: UnitSpec) -> list[tuple[int, int]]:
        """First and last element of every block of a unit's update."""
        total = len(self._store.shards.updated(unit))
        block = self._blocks[unit.index]
        return [(start, min(start + block, total)) for start in range(0, total, block)]

    def _readable_ahead(self, unit: UnitSpec) -> list[tuple[int, int]]:
        """The blocks of `_cuts` that can be read before earlier blocks are written."""
        return self._cuts(unit)

    def _parts(self, unit: int, start: int, stop: int) -> dict[str, Part]:
        """A block's part of each state. States that its parameter does not have are left out."""
        spec, parts = self._store.plan.units[unit], {}
        for state in self._states:
            origin = self._store.shards.origin(spec, state.name)
            elements = range(state.elements(origin + start), state.elements(origin + stop))
            parts[state.name] = Part(elements, elements.start * state.dtype.itemsize)
        return parts

    def _tensors(
        self, block: Block, extents: Mapping[str, str], parts: Mapping[str, Part], slot: Region | None
    ) -> dict[str, torch.Tensor]:
        """A block's part of each state, at home or in the ring. `extents` names the extent of each state."""
        unit, found = block.update.unit.index, {}
        for state in self._states:
            if (part := parts.get(state.name)) is None:
                continue
            home = self._store.tensor(unit, extents[state.name])
            if home is not None:
                found[state.name] = home[part.elements.start : part.elements.stop]
            else:
                assert slot is not None
                at = self._ring_offsets[state.name] + part.elements.start * state.dtype.itemsize - part.page_at
                found[state.name] = slot.tensor(state.dtype, len(part.elements), at)
        return found

    def _compute(self, block: Block, parts: Mapping[str, Part], slot: Region | None, after: Sequence[Handle]) -> Handle:
        """Submit the computation of a block, to start once `after` have ended. `parts` has the block's part of each
        state. States on SSD are in `slot`. When the returned handle ends, their new values must be there."""
        raise NotImplementedError

    def _apply_all(
        self,
        block: Block,
        gradient_of: Callable[[UnitGradient], torch.Tensor],
        old: Tensors,
        new: Tensors,
        work: torch.Tensor | None,
    ) -> None:
        """Apply all gradients of a block to its `old` states. Afterwards, `new` has what they change; both may be the
        same. `gradient_of` returns the block's part of a gradient, which is valid until the next call."""
        for record, segments in block.pieces:
            gradient = gradient_of(record)
            for segment in segments:
                self._apply(block, segment, gradient, old, new, work)
            old = new

    def _apply(
        self,
        block: Block,
        piece: Segment,
        gradient: torch.Tensor,
        old: Tensors,
        new: Tensors,
        work: torch.Tensor | None,
    ) -> None:
        """Update a piece of a block, with the block's gradient and states, which are flat. `work` is for fp32 copies,
        if the rule computes on them."""
        raise NotImplementedError


def _within(pieces: Pieces, first: int, last: int) -> Pieces:
    """What of the pieces of an update lies in elements [first, last) of its unit."""
    cut = [
        (record, [each.within(first, last) for each in segments if each.start < last and each.stop > first])
        for record, segments in pieces
    ]
    return [(record, segments) for record, segments in cut if segments]
