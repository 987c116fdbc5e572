"""Updates by rules that take whole parameters, as they are stored, or as fp32 copies in a work area."""

from collections.abc import Mapping
from typing import Any

import torch

from pagoda.optim.adafactor import Adafactor
from pagoda.optim.flat import join, split
from pagoda.optim.rule import Shape, StateSpec, TensorRule
from pagoda.plan.layout import GRAD, WEIGHT
from pagoda.plan.packed import ShapedSpan
from pagoda.plan.units import UnitSpec
from pagoda.runtime.device import Device
from pagoda.runtime.device_updates import DevicePath, Slot
from pagoda.runtime.gradients import UnitGradient
from pagoda.runtime.host_updates import HostPath
from pagoda.runtime.lanes import Lane
from pagoda.runtime.next_update import Segment
from pagoda.runtime.store import LOW, Store
from pagoda.runtime.streams import Part, UpdatePath
from pagoda.runtime.unit import LiveUnit


class Workbench:
    """Updates parameters one after another on fp32 copies: of the gradient, and of the master if it is stored in
    halves."""

    def __init__(self, area: torch.Tensor, weight: torch.dtype) -> None:
        """`area` is flat fp32 of the size that `Layout.work_pages` gives, in RAM or on a GPU."""
        gradient, *master = area.chunk(1 if weight is torch.float32 else 2)
        self._gradient, self._master = gradient, master[0] if master else None

    def update(
        self,
        piece: Segment,
        shape: Shape,
        kept: torch.Tensor,
        weight: torch.Tensor,
        low: torch.Tensor | None,
        states: Mapping[str, torch.Tensor],
    ) -> None:
        """One step of a parameter of this shape, or of a flat piece of one. Gradient and weights are flat."""
        rule, count = piece.hyper.rule, kept.numel()
        assert isinstance(rule, TensorRule)
        gradient = self._gradient[:count].copy_(kept)
        if piece.hyper.grad_scale != 1.0:
            gradient.mul_(piece.hyper.grad_scale)
        if low is None:
            rule.update(piece.hyper.step, weight.view(shape), gradient.view(shape), states)
            return
        assert self._master is not None
        master = self._master[:count]
        join(weight, low, master)
        rule.update(piece.hyper.step, master.view(shape), gradient.view(shape), states)
        split(master, weight, low)


class CutPath(UpdatePath):
    """Updates parameters, or pieces of those that may be cut, one in each block.

    Parts of several parameters may share a page of a state on SSD. So a block is read after the last write to its first
    page.
    """

    def __init__(self, store: Store, *others: Any) -> None:
        super().__init__(store, *others)
        self._layout = store.plan.layout
        begins = [store.shards.updated(unit).start for unit in store.plan.units]
        self._cuts = [
            {cut.start - begin: cut for cut in self._layout.cuts(unit)}
            for unit, begin in zip(store.plan.units, begins, strict=True)
        ]
        """unit -> first element of a cut, counted from the first element that this rank updates -> cut."""

    def cuts(self, unit: UnitSpec) -> list[tuple[int, int]]:
        return [(start, start + cut.stop - cut.start) for start, cut in self._cuts[unit.index].items()]

    def _readable_ahead(self, unit: UnitSpec) -> list[tuple[int, int]]:
        """The first block. Later blocks may share its pages."""
        return self.cuts(unit)[:1]

    def _parts(self, unit: int, start: int, stop: int) -> dict[str, Part]:
        return {
            state.name: Part(range(span.first, span.first + span.count), self._layout.window(span, state)[0])
            for state, span in self._spans(self._store.plan.units[unit], start).items()
        }

    def _spans(self, unit: UnitSpec, start: int) -> dict[StateSpec, ShapedSpan]:
        """The part of each state that belongs to the block that begins at `start`. States that its parameter does not
        have are left out."""
        cut = self._cuts[unit.index][start]
        spans = {state: self._layout.part(unit, cut, state) for state in self._layout.states}
        return {state: span for state, span in spans.items() if span is not None}

    def _update_cut(
        self,
        unit: UnitSpec,
        start: int,
        piece: Segment,
        bench: Workbench | None,
        kept: torch.Tensor,
        states: Mapping[str, torch.Tensor],
    ) -> None:
        """Update the block that begins at `start` with its gradient as it is stored. Gradient and states are flat.

        `bench` is given if the rule computes on copies.
        """
        cut, rule = self._cuts[unit.index][start], piece.hyper.rule
        shape = unit.slots[cut.slot].param.shape if cut.whole else (cut.stop - cut.start,)
        shapes = {state.name: span.shape for state, span in self._spans(unit, start).items()}
        shaped = {name: tensor.view(shapes[name]) for name, tensor in states.items() if name not in (WEIGHT, LOW)}
        weight, low = states[WEIGHT], states.get(LOW)
        if bench is not None:
            bench.update(piece, shape, kept, weight, low, shaped)
            return
        assert isinstance(rule, Adafactor)
        rule.update(piece.hyper.step, weight.view(shape), kept.view(shape), shaped, low, piece.hyper.grad_scale)


class TensorPath(CutPath, HostPath):
    """Updates parameters where their states are: at home in RAM, or in the ring.

    If there is a workbench, the update lane has one thread, so only one update uses it.
    """

    def __init__(self, store: Store, lanes: dict[str, Lane]) -> None:
        super().__init__(store, _none, lanes)
        self._bench: Workbench | None = None
        if store.work is not None:
            self._bench = Workbench(store.work.tensor(torch.float32), self._states[0].dtype)

    def _apply(self, unit: LiveUnit, start: int, addresses: list[int], record: UnitGradient, piece: Segment) -> None:
        """Update the cut that begins at `start`. It lies within the piece's parameter."""
        spans = self._spans(unit.spec, start)
        tensors = {
            state.name: self._store.at(address, state.dtype, spans[state].count)
            for state, address in zip(self._states, addresses, strict=True)
            if state in spans
        }
        at = start + self._store.shards.origin(unit.spec, GRAD)
        kept = record.buffer[at : at + piece.stop - piece.start]
        self._update_cut(unit.spec, start, piece, self._bench, kept, tensors)


class DeviceTensorPath(CutPath, DevicePath):
    """Updates parameters on the device. Every slot there has a workbench if the rule needs one."""

    def __init__(self, store: Store, lanes: dict[str, Lane], device: Device) -> None:
        super().__init__(store, _none, lanes, device)

    def _apply(
        self,
        unit: UnitSpec,
        start: int,
        piece: Segment,
        gradient: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        slot: Slot | None,
    ) -> None:
        work = None if slot is None else slot.work
        bench = None if work is None else Workbench(work, self._states[0].dtype)
        self._update_cut(unit, start, piece, bench, gradient[: piece.stop - piece.start], states)


def _none(*_: object) -> None:
    raise AssertionError("parameters are updated whole")
