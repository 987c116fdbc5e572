"""Updates of rules that take parameters whole: one parameter after another, through a work area in fp32."""

from collections.abc import Iterator
from functools import partial

import torch

from pagoda.optim.formats import halves
from pagoda.optim.rule import TensorRule
from pagoda.plan.layout import GRAD, WEIGHT
from pagoda.plan.packed import Span
from pagoda.plan.units import UnitSpec
from pagoda.runtime.gradients import UnitGradient
from pagoda.runtime.lanes import Handle, Lane
from pagoda.runtime.segments import Segment, TensorSegment
from pagoda.runtime.store import LOW, Store
from pagoda.runtime.unit import LiveUnit
from pagoda.runtime.updates import BlockStream


class TensorStream(BlockStream):
    """A `BlockStream` whose blocks are parameters, or pieces of those that may be cut.

    States are updated where they are: at home in RAM, or in the ring. The gradient, and the master where its halves are
    stored, are made in the work area; the update lane has one thread, so nobody else is in it. What a unit's parameters
    have of a state on SSD shares pages, so one is read when what was written before on its first page is there.
    """

    def __init__(self, store: Store, lanes: dict[str, Lane]) -> None:
        def none(*_: float) -> None:
            raise AssertionError("parameters are updated whole")

        super().__init__(store, none, lanes)
        self._layout = store.plan.layout
        begins = [store.shards.updated(unit).start for unit in store.plan.units]
        self._cuts_of = [
            {cut.start - begin: cut for cut in self._layout.cuts(unit)}
            for unit, begin in zip(store.plan.units, begins, strict=True)
        ]
        """unit -> first element of a cut, from the first that this rank updates on -> cut."""
        self._tails: dict[tuple[int, str], tuple[int, Handle]] = {}
        """(unit, state on SSD) -> where the pages written last end, and what ends when they are there."""
        assert store.work is not None, "the plan of a rule that takes parameters whole has a work area"
        work = store.host.tensor(store.work, torch.float32, store.work.count * store.plan.page_bytes // 4)
        gradient, *master = work.chunk(1 if self._states[0].dtype is torch.float32 else 2)
        self._gradient, self._master = gradient, master[0] if master else None

    def _cuts(self, unit: UnitSpec) -> list[tuple[int, int]]:
        return [(start, start + cut.stop - cut.start) for start, cut in self._cuts_of[unit.index].items()]

    def _readable_ahead(self, unit: UnitSpec) -> list[tuple[int, int]]:
        """The first: others may share its pages."""
        return self._cuts(unit)[:1]

    def _parts(self, unit: int, start: int) -> dict[str, tuple[Span, int]]:
        """State -> what the cut from `start` on has of it, and the offset of the first of the pages that hold it."""
        spec, cut = self._store.plan.units[unit], self._cuts_of[unit][start]
        parts = {state: self._layout.part(spec, cut, state) for state in self._states}
        return {s.name: (part, self._layout.window(part, s)[0]) for s, part in parts.items() if part is not None}

    def _changed(self, unit: int, start: int, stop: int) -> dict[str, range]:
        parts = self._parts(unit, start)
        return {name: range(part.first, part.first + part.count) for name, (part, _) in parts.items()}

    def _addresses(self, unit: LiveUnit, slot: int, start: int, weights: str) -> list[int]:
        """As `BlockStream`, with 0 for a state that the parameter has not."""
        parts = self._parts(unit.index, start)
        addresses: list[int] = []
        for state in self._states:
            if state.name not in parts:
                addresses.append(0)
                continue
            part, offset = parts[state.name]
            first = part.first * state.dtype.itemsize
            home = self._store.tensor(unit.index, weights if state.name == WEIGHT else state.name)
            if home is not None:
                addresses.append(home.data_ptr() + first)
            else:
                addresses.append(self._store.ring_address(slot) + self._ring_offsets[state.name] + first - offset)
        return addresses

    def _apply(self, unit: LiveUnit, start: int, addresses: list[int], record: UnitGradient, piece: Segment) -> None:
        """Update the cut from `start` on, which is within the piece's parameter."""
        assert isinstance(piece, TensorSegment)
        rule = piece.hyper.rule
        assert isinstance(rule, TensorRule)
        assert record.buffer is not None
        parts = self._parts(unit.index, start)
        tensors = {
            state.name: self._store.at(address, state.dtype, parts[state.name][0].count)
            for state, address in zip(self._states, addresses, strict=True)
            if state.name in parts
        }
        cut = self._cuts_of[unit.index][start]
        count = cut.stop - cut.start
        shape = unit.spec.slots[cut.slot].param.shape if cut.whole else (count,)
        at = start + self._store.shards.origin(unit.spec, GRAD)
        gradient = self._gradient[:count].copy_(record.buffer[at : at + count])
        if piece.hyper.grad_scale != 1.0:
            gradient.mul_(piece.hyper.grad_scale)
        weight, low = tensors.pop(WEIGHT), tensors.pop(LOW, None)
        states = {name: tensor.view(parts[name][0].shape) for name, tensor in tensors.items()}
        if low is None:
            rule.update(piece.hyper.step, weight.view(shape), gradient.view(shape), states)
            return
        assert self._master is not None
        master = self._master[:count]
        split, join = halves(weight.dtype)
        join(weight.data_ptr(), low.data_ptr(), master.data_ptr(), count)
        rule.update(piece.hyper.step, master.view(shape), gradient.view(shape), states)
        split(master.data_ptr(), weight.data_ptr(), low.data_ptr(), count)

    def _transfers(
        self, lane: str, unit: int, slot: int, start: int, stop: int, weights: str, after: tuple[Handle, ...] = ()
    ) -> Iterator[Handle]:
        """As `BlockStream`, in whole pages, which other parameters may share."""
        store, ssd = self._store, self._store.ssd
        reading = lane == "ssd_read"
        parts = self._parts(unit, start)
        for state in self._states:
            run = store.run(unit, weights if state.name == WEIGHT else state.name)
            if run is None or state.name not in parts:
                continue
            assert ssd is not None
            move, verb = (ssd.load, "read") if reading else (ssd.store, "write")
            offset, nbytes = self._layout.window(parts[state.name][0], state)
            view = store.ring_view(slot, self._ring_offsets[state.name], nbytes)
            end, written = self._tails.get((unit, state.name), (0, None))
            behind = (written,) if reading and written is not None and end > offset and not written.done else ()
            work = partial(move, run, offset, view)
            handle = self._lanes[lane].submit(work, (*after, *behind), nbytes, f"{verb} {store.plan.units[unit].name}")
            if not reading:
                self._tails[unit, state.name] = offset + nbytes, handle
            yield handle
