"""Updates by rules that take whole parameters, as they are stored, or as fp32 copies in a work area."""

from typing import Any

import torch

from pagoda.optim.adafactor import Adafactor
from pagoda.optim.flat import join, split
from pagoda.optim.rule import StateSpec, TensorRule
from pagoda.plan.layout import WEIGHT
from pagoda.plan.packed import ShapedSpan
from pagoda.plan.units import UnitSpec
from pagoda.runtime.device_updates import DeviceUpdater
from pagoda.runtime.host_updates import HostUpdater
from pagoda.runtime.next_update import Segment
from pagoda.runtime.store import LOW, Store
from pagoda.runtime.updates import Block, Part, Tensors, Updater


class ParameterUpdater(Updater):
    """Updates parameters, or pieces of those that may be cut, one in each block.

    Parts of several parameters may share a page of a state on SSD. So a block is read after the last write to its first
    page.
    """

    def __init__(self, store: Store, *others: Any) -> None:
        super().__init__(store, *others)
        self._layout = store.plan.layout
        begins = [store.shards.updated(unit).start for unit in store.plan.units]
        self._cuts_of = [
            {cut.start - begin: cut for cut in self._layout.cuts(unit)}
            for unit, begin in zip(store.plan.units, begins, strict=True)
        ]
        """unit -> first element of a cut, counted from the first element that this rank updates -> cut."""

    def _cuts(self, unit: UnitSpec) -> list[tuple[int, int]]:
        return [(start, start + cut.stop - cut.start) for start, cut in self._cuts_of[unit.index].items()]

    def _readable_ahead(self, unit: UnitSpec) -> list[tuple[int, int]]:
        """The first block. Later blocks may share its pages."""
        return self._cuts(unit)[:1]

    def _parts(self, unit: int, start: int, stop: int) -> dict[str, Part]:
        return {
            state.name: Part(range(span.first, span.first + span.count), self._layout.window(span, state)[0])
            for state, span in self._spans(self._store.plan.units[unit], start).items()
        }

    def _spans(self, unit: UnitSpec, start: int) -> dict[StateSpec, ShapedSpan]:
        """The part of each state that belongs to the block that begins at `start`. States that its parameter does not
        have are left out."""
        cut = self._cuts_of[unit.index][start]
        spans = {state: self._layout.part(unit, cut, state) for state in self._layout.states}
        return {state: span for state, span in spans.items() if span is not None}

    def _apply(
        self, block: Block, piece: Segment, gradient: torch.Tensor, states: Tensors, work: torch.Tensor | None
    ) -> None:
        unit, rule, kept = block.update.unit.spec, piece.hyper.rule, gradient[: piece.stop - piece.start]
        cut = self._cuts_of[unit.index][block.start]
        shape = unit.slots[cut.slot].param.shape if cut.whole else (cut.stop - cut.start,)
        shapes = {state.name: span.shape for state, span in self._spans(unit, block.start).items()}
        shaped = {name: tensor.view(shapes[name]) for name, tensor in states.items() if name not in (WEIGHT, LOW)}
        step, scale, weight, low = piece.hyper.step, piece.hyper.grad_scale, states[WEIGHT], states.get(LOW)
        if work is None:
            assert isinstance(rule, Adafactor)
            rule.update(step, weight.view(shape), kept.view(shape), shaped, low, scale)
            return
        # On fp32 copies of the gradient, and of the master if it is stored in halves.
        assert isinstance(rule, TensorRule)
        count = kept.numel()
        copy, *rest = work.chunk(1 if low is None else 2)
        copy = copy[:count].copy_(kept)
        if scale != 1.0:
            copy.mul_(scale)
        if low is None:
            rule.update(step, weight.view(shape), copy.view(shape), shaped)
            return
        master = rest[0][:count]
        join(weight, low, master)
        rule.update(step, master.view(shape), copy.view(shape), shaped)
        split(master, weight, low)


class HostParameterUpdater(ParameterUpdater, HostUpdater):
    """Updates parameters where their states are: at home in RAM, or in the ring."""


class DeviceParameterUpdater(ParameterUpdater, DeviceUpdater):
    """Updates parameters on the device. Every slot there has a work area if the rule needs one."""
