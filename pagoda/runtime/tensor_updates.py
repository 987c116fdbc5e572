"""Updates of rules that take parameters whole: one parameter after another, through a work area in fp32."""

import torch

from pagoda.optim.kernels import halves
from pagoda.optim.rule import StateSpec, TensorRule
from pagoda.plan.layout import GRAD, WEIGHT
from pagoda.plan.packed import ShapedSpan
from pagoda.plan.units import UnitSpec
from pagoda.runtime.gradients import UnitGradient
from pagoda.runtime.host_updates import HostPath, Part
from pagoda.runtime.lanes import Lane
from pagoda.runtime.next_update import Segment
from pagoda.runtime.store import LOW, Store
from pagoda.runtime.unit import LiveUnit


class TensorPath(HostPath):
    """A `HostPath` whose blocks are parameters, or pieces of those that may be cut.

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
        assert store.work is not None, "the plan of a rule that takes parameters whole has a work area"
        work = store.work.tensor(torch.float32)
        gradient, *master = work.chunk(1 if self._states[0].dtype is torch.float32 else 2)
        self._gradient, self._master = gradient, master[0] if master else None

    def cuts(self, unit: UnitSpec) -> list[tuple[int, int]]:
        return [(start, start + cut.stop - cut.start) for start, cut in self._cuts_of[unit.index].items()]

    def _readable_ahead(self, unit: UnitSpec) -> list[tuple[int, int]]:
        """The first: others may share its pages."""
        return self.cuts(unit)[:1]

    def _spans(self, unit: UnitSpec, start: int) -> dict[StateSpec, ShapedSpan]:
        """What the cut from `start` on has of each state, of those that its parameter has."""
        spans = {state: self._layout.part(unit, self._cuts_of[unit.index][start], state) for state in self._states}
        return {state: span for state, span in spans.items() if span is not None}

    def _parts(self, unit: int, start: int, stop: int) -> dict[str, Part]:
        return {
            state.name: Part(range(span.first, span.first + span.count), self._layout.window(span, state)[0])
            for state, span in self._spans(self._store.plan.units[unit], start).items()
        }

    def _apply(self, unit: LiveUnit, start: int, addresses: list[int], record: UnitGradient, piece: Segment) -> None:
        """Update the cut from `start` on, which is within the piece's parameter."""
        rule = piece.hyper.rule
        assert isinstance(rule, TensorRule)
        buffer = record.buffer
        assert buffer is not None
        cut, spans = self._cuts_of[unit.index][start], self._spans(unit.spec, start)
        tensors = {
            state.name: self._store.at(address, state.dtype, spans[state].count)
            for state, address in zip(self._states, addresses, strict=True)
            if state in spans
        }
        count = cut.stop - cut.start
        shape = unit.spec.slots[cut.slot].param.shape if cut.whole else (count,)
        at = start + self._store.shards.origin(unit.spec, GRAD)
        gradient = self._gradient[:count].copy_(buffer[at : at + count])
        if piece.hyper.grad_scale != 1.0:
            gradient.mul_(piece.hyper.grad_scale)
        weight, low = tensors.pop(WEIGHT), tensors.pop(LOW, None)
        shapes = {state.name: span.shape for state, span in spans.items()}
        states = {name: tensor.view(shapes[name]) for name, tensor in tensors.items()}
        if low is None:
            rule.update(piece.hyper.step, weight.view(shape), gradient.view(shape), states)
            return
        assert self._master is not None
        master = self._master[:count]
        split, join = halves(weight.dtype)
        join(weight.data_ptr(), low.data_ptr(), master.data_ptr(), count)
        rule.update(piece.hyper.step, master.view(shape), gradient.view(shape), states)
        split(master.data_ptr(), weight.data_ptr(), low.data_ptr(), count)
