"""Updates as sequences of blocks, whose states on SSD stream through the ring in RAM.

`schedule/stream.py` decides which block comes next, and in which slot. This file carries it out.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from pagoda.errors import NonFiniteGradientError, UsageError
from pagoda.memory.page import pages_for
from pagoda.memory.region import Region
from pagoda.optim.rule import StateSpec
from pagoda.parameters.unit import LiveUnit
from pagoda.plan.blocks import StreamPlan
from pagoda.plan.lanes import LaneName
from pagoda.plan.layout import WEIGHT
from pagoda.runtime.gradients import UnitGradient, non_finite_error
from pagoda.runtime.lanes import Handle, Lane, all_of
from pagoda.runtime.next_update import Segment
from pagoda.runtime.store import Runs, Store
from pagoda.runtime.waiters import Waiters
from pagoda.schedule.stream import Action, Block, Do, Stream

Tensors = Mapping[str, torch.Tensor]
"""By state, its part of a block."""


class Extents(NamedTuple):
    """The runs from which an update reads a unit's states, and to which it writes them."""

    read: Runs
    write: Runs

    @property
    def moved(self) -> list[str]:
        """The states that are not updated in place."""
        return [state for state, run in self.read.items() if self.write[state] != run]


class RunningUpdate(NamedTuple):
    """One unit's update."""

    gradient: UnitGradient
    segments: Sequence[Segment]
    """The elements that it changes."""
    extents: Extents
    updated: Handle
    """Ends when the new weights are in their home."""
    written: Handle
    """Ends when every state is in its home."""
    used: Callable[[], None]
    """Called when the gradient has been read."""
    suspended: Callable[[BaseException], bool]
    """Called when something has failed that can be done again. Returns whether the update waits for
    `UpdateStream.try_again`. If not, it fails."""

    @property
    def unit(self) -> LiveUnit:
        return self.gradient.unit

    def finish(self, error: BaseException | None) -> None:
        """Mark the update as ended before any of it was done."""
        self.written.finish(error)
        self.updated.finish(error)


class StatePart(NamedTuple):
    """A block's part of a state."""

    elements: range
    """Elements of the state's extent."""
    page_at: int
    """Byte of the extent at which the part's first page begins."""


class BlockUpdate(NamedTuple):
    """The update of one block, on real memory."""

    update: RunningUpdate
    start: int
    """First element, counted from the first element that this rank updates of the unit."""
    stop: int
    segments: Sequence[Segment]
    """What the update changes of it. Empty if unchanged states are only copied."""
    parts: Mapping[str, StatePart]
    """The block's part of each state."""
    slot: Region | None
    """Where its states on SSD are, if it has any."""
    place: int | None
    """Its place with its updater, if it takes one. On the device, that is a slot."""


class UpdateStream:
    """Carries out updates block by block, in the order that `Stream` decides.

    Any thread reports the end of its work to the stream, under one lock, and then starts what the stream lets begin.
    So a block is submitted to its lane by the thread that gives back the slot that it needs, and nothing waits.
    """

    def __init__(self, store: Store, parts: Callable[[], tuple[Sequence["Updater"], StreamPlan]]) -> None:
        """`parts` makes the updaters for the store's plan, of the CPU, and of the device if it updates units."""
        self._store = store
        self._parts = parts
        self._lock = threading.Lock()
        """Held while the stream is used."""
        self._changed = Waiters()
        """Threads that wait for the next event."""
        self.take_memory()
        self._do = {Do.READ: self._read, Do.UPDATE: self._update, Do.WRITE: self._write}

    def take_memory(self) -> None:
        """Take the memory that the store's plan has for updates. No update is under way."""
        self._updaters, self._plan = self._parts()
        self._stream = Stream(self._plan)
        self._starting: dict[int, list[Action]] = {}
        """Thread -> the actions that it carries out now. Lanes may do small work at once, whose end adds to them."""
        self._refusal: BaseException | None = None
        """The error with which every further update fails."""
        self.gives_up = False
        """Whether an update fails for good if anything of it fails."""

    def submit(self, update: RunningUpdate) -> None:
        """Carry out an update. Its handles end when it has ended, with or without an error.

        An error before it begins is not raised. A traceback keeps all that this thread's frames refer to, such as
        weights in a lease, and the error lives as long as the gradient.
        """
        error, unit = self._refusal or _non_finite(update.gradient), update.unit.index
        if error is not None:
            update.finish(error)
            return
        self._store.begin_version(unit, *update.extents)
        changing = self._changing(update)
        if not changing and WEIGHT in update.extents.moved:  # this rank updates nothing of it
            read, write = (self._store.frozen(unit, runs[WEIGHT]) for runs in update.extents)
            write.copy_(read)
        self._tell(self._stream.ask, update, unit, changing, self._is_repeatable(update))

    def read_ahead(self, unit: int) -> None:
        """After the submitted updates, this unit will probably be updated next. Read its states as far as there is
        room."""
        if self._refusal is None:
            self._tell(self._stream.read_ahead, unit)

    def try_again(self) -> None:
        """Try again what has failed of updates."""
        self._tell(self._stream.try_again)

    def give_up(self) -> None:
        """Let updates fail that wait to be tried again, and later ones at once."""
        self.gives_up = True
        self._tell(self._stream.give_up)

    def drop_ahead(self) -> None:
        """Drop what was read ahead. No update may be under way."""
        self._tell(self._stream.drop_ahead)

    def wait_until_idle(self) -> None:
        """Wait until nothing is being read, whether the reads succeed or fail."""
        while True:
            with self._lock:
                if self._stream.idle:
                    return
                wait = self._changed.add()
            wait()

    def refuse(self, error: BaseException) -> None:
        """Let every update that has not begun fail with an error."""
        self._refusal = error
        self._tell(self._stream.refuse, error)
        self.give_up()

    def close(self) -> None:
        """Finish the submitted updates. Later ones, which come of what was under way, fail."""
        self._refusal = self._refusal or UsageError("The optimizer is closed.")
        self.give_up()
        self.drop_ahead()
        self.wait_until_idle()

    def _is_repeatable(self, update: RunningUpdate) -> bool:
        """Whether no state is changed where it was: each is on SSD, and its blocks are changed in the ring, or its new
        version is elsewhere."""
        read, write = update.extents
        on_ssd = (name for name in read if self._store.run_on_ssd(update.unit.index, name) is not None)
        return {*read} == {*on_ssd, *update.extents.moved, *(name for name in read if not write[name].count)}

    def _changing(self, update: RunningUpdate) -> Sequence[int]:
        """The blocks of a unit that an update changes."""
        unit = update.unit
        bounds, first = self._plan.units[unit.index].bounds, self._store.shards.updated(unit.spec).start
        spans = {(segment.start - first, segment.stop - first) for segment in update.segments}
        if update.extents.moved or (0, bounds[-1][1] if bounds else 0) in spans:
            return range(len(bounds))
        return [
            index
            for index, (start, stop) in enumerate(bounds)
            if any(begin < stop and end > start for begin, end in spans)
        ]

    # --- the stream ---

    def _tell(self, event: Callable[..., None], *arguments: Any) -> None:
        """Pass an event to the stream, and carry out the actions that follow."""
        with self._lock:
            event(*arguments)
            actions = self._stream.take()
            self._changed.wake()
        me = threading.get_ident()
        if me in self._starting:
            self._starting[me] += actions
            return
        try:
            self._starting[me] = actions
            for action in actions:  # grows meanwhile
                self._carry_out(action)
        finally:
            self._starting.pop(me, None)

    def _carry_out(self, action: Action) -> None:
        if action.do in self._do:
            self._do[action.do](action.about)
            return
        update: RunningUpdate = action.about
        if action.do is Do.SUSPEND:
            assert action.error is not None
            if self.gives_up or not update.suspended(action.error):
                self._tell(self._stream.give_up, update)
            return
        weights_on_ssd = self._store.run_on_ssd(update.unit.index, WEIGHT) is not None
        if action.do is Do.USED:
            update.used()
            if not weights_on_ssd:
                update.updated.finish(action.error)
        else:
            if weights_on_ssd:
                update.updated.finish(action.error)
            update.written.finish(action.error)

    def _read(self, block: Block) -> None:
        self._start(self._updater(block).reads(block), self._stream.has_read, block)

    def _update(self, block: Block) -> None:
        self._start(self._updater(block).computations(block), self._stream.has_updated, block)

    def _write(self, block: Block) -> None:
        self._start(self._updater(block).writes(block), self._stream.has_written, block)

    def _updater(self, block: Block) -> "Updater":
        return self._updaters[self._plan.units[block.unit].updater]

    def _start(self, submitted: Iterator[Handle], ended: Callable[..., None], block: Block) -> None:
        """Submit work for a block, and report when all of it has ended."""
        handles: list[Handle] = []
        try:
            handles.extend(submitted)
        except BaseException as error:  # it ends after all that was submitted
            handles.append(Handle())
            handles[-1].finish(error)
        all_of(handles).then(partial(self._tell, ended, block))


class Updater:
    """Reads, updates and writes blocks of units, in lanes. A subclass updates them by `_compute` and `_apply`."""

    def __init__(self, store: Store, lanes: dict[str, Lane], plan: StreamPlan) -> None:
        layout, units = store.plan.layout, store.plan.units
        self._store = store
        self._lanes = lanes
        self._plan = plan
        self._states = [layout.states_of(unit) for unit in units]
        """The states of each unit."""
        self._streamed = [
            [state.name for state in states if store.run_on_ssd(unit.index, state.name) is not None]
            for unit, states in zip(units, self._states, strict=True)
        ]
        """The states on SSD of each unit."""
        self._ring_offsets: dict[str, int] = {}
        """State -> its first byte in a slot of the ring."""
        offset = 0
        for state in (*layout.moments, layout.weight):
            self._ring_offsets[state.name] = offset
            offset += layout.block_pages(state.name) * store.plan.page_bytes

    def reads(self, block: Block) -> Iterator[Handle]:
        """Submit the reads of a block's states on SSD into its slot."""
        update: RunningUpdate | None = block.update
        # From the run that is written. It has the old content at first, and then what earlier blocks wrote to a page.
        runs = self._store.newest_runs(block.unit) if update is None else update.extents.write
        return self._transfers(LaneName.SSD_READ, block, runs)

    def computations(self, block: Block) -> Iterator[Handle]:
        """Submit the computation of a block. When it has ended, the new values of states on SSD are in the slot."""
        update: RunningUpdate = block.update
        start, stop = self._plan.units[block.unit].bounds[block.index]
        origin = self._store.shards.updated(update.unit.spec).start
        first, last = origin + start, origin + stop
        segments = [each.within(first, last) for each in update.segments if each.start < last and each.stop > first]
        slot = None if block.slot is None else self._store.slots[block.slot]
        yield self._compute(BlockUpdate(update, start, stop, segments, self._parts_of(block), slot, block.place))

    def writes(self, block: Block) -> Iterator[Handle]:
        """Submit the writes of a block's states on SSD from its slot."""
        return self._transfers(LaneName.SSD_WRITE, block, block.update.extents.write)

    def _transfers(self, lane: str, block: Block, runs: Runs) -> Iterator[Handle]:
        """Move a block's parts of its states between runs on SSD and the ring, in whole pages."""
        store, page, unit = self._store, self._store.plan.page_bytes, block.unit
        assert block.slot is not None
        slot, parts, reading = store.slots[block.slot], self._parts_of(block), lane == LaneName.SSD_READ
        move, verb = (store.load, "read") if reading else (store.save, "write")
        for name in self._streamed[unit]:
            if (part := parts.get(name)) is not None:
                nbytes = pages_for(part.elements.stop * store.dtype(unit, name).itemsize - part.page_at, page) * page
                work = partial(move, runs[name], part.page_at, slot.view(self._ring_offsets[name], nbytes))
                yield self._lanes[lane].submit(work, (), nbytes, f"{verb} {store.plan.units[unit].name}")

    def _states_of(self, block: BlockUpdate) -> tuple[StateSpec, ...]:
        return self._states[block.update.unit.index]

    def _parts_of(self, block: Block) -> dict[str, StatePart]:
        """A block's part of each state."""
        if block.payload is None:
            block.payload = self._parts(block.unit, *self._plan.units[block.unit].bounds[block.index])
        parts: dict[str, StatePart] = block.payload
        return parts

    def _parts(self, unit: int, start: int, stop: int) -> dict[str, StatePart]:
        """A block's part of each state. States that its parameter does not have are left out."""
        spec, parts = self._store.plan.units[unit], {}
        for state in self._states[unit]:
            origin = self._store.shards.origin(spec, state.name)
            elements = range(state.elements(origin + start), state.elements(origin + stop))
            parts[state.name] = StatePart(elements, elements.start * state.dtype.itemsize)
        return parts

    def _tensors(self, block: BlockUpdate, runs: Runs) -> dict[str, torch.Tensor]:
        """A block's part of each state, in its run in memory or in the ring."""
        unit, found = block.update.unit.index, {}
        for state in self._states[unit]:
            if (part := block.parts.get(state.name)) is None:
                continue
            home = self._store.tensor(unit, state.name, runs[state.name])
            if home is not None:
                found[state.name] = home[part.elements.start : part.elements.stop]
            else:
                assert block.slot is not None
                at = self._ring_offsets[state.name] + part.elements.start * state.dtype.itemsize - part.page_at
                found[state.name] = block.slot.tensor(state.dtype, len(part.elements), at)
        return found

    def _copy_frozen(self, block: BlockUpdate, copy: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        """With a unit's last block, copy the frozen weights that have to move with the others. `UpdateStream.submit`
        does so for a unit without blocks."""
        unit, extents = block.update.unit.index, block.update.extents
        if WEIGHT in extents.moved and block.stop == self._plan.units[unit].bounds[-1][1]:
            frozen = self._store.frozen(unit, extents.read[WEIGHT])
            if len(frozen):
                copy(self._store.frozen(unit, extents.write[WEIGHT]), frozen)

    def _compute(self, block: BlockUpdate) -> Handle:
        """Submit the computation of a block."""
        raise NotImplementedError

    def _apply_all(
        self,
        block: BlockUpdate,
        gradient: Callable[[], torch.Tensor],
        old: Tensors,
        new: Tensors,
        work: torch.Tensor | None,
    ) -> None:
        """Apply the gradient of a block, which `gradient` returns, to its `old` states. Afterwards, `new` has what it
        changes; both may be the same."""
        part = gradient() if block.segments else None
        for segment in block.segments:
            assert part is not None
            self._apply(block, segment, part, old, new, work)

    def _apply(
        self,
        block: BlockUpdate,
        piece: Segment,
        gradient: torch.Tensor,
        old: Tensors,
        new: Tensors,
        work: torch.Tensor | None,
    ) -> None:
        """Update a piece of a block, with the block's gradient and states, which are flat. `work` is for fp32 copies,
        if the rule computes on them."""
        raise NotImplementedError


def _non_finite(gradient: UnitGradient) -> NonFiniteGradientError | None:
    """The error for a gradient that is NaN or infinite."""
    bad = gradient.non_finite()
    return None if bad is None else non_finite_error(gradient.unit.name(bad[1]))
