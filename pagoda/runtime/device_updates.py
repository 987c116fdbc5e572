"""Updates on the device: blocks of states pass it through slots, while the CPU updates other units."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from pagoda.memory.region import Region
from pagoda.plan.device_updates import DEVICE_SLOTS, UPDATE_RING, WORK, slot_count, slot_offsets, slot_pages
from pagoda.plan.layout import GRAD, WEIGHT
from pagoda.plan.ops import DEVICE
from pagoda.runtime.device import PAST, Device, UpdateKernel
from pagoda.runtime.gradients import UnitGradient
from pagoda.runtime.lanes import Handle, Lane
from pagoda.runtime.next_update import Segment
from pagoda.runtime.ring import Ring
from pagoda.runtime.store import Store
from pagoda.runtime.updates import IN_PLACE, Block, Part, Tensors, Updater


class Slot(NamedTuple):
    """Room on the device for a block of every state and its gradient."""

    number: int
    states: Mapping[str, torch.Tensor]
    """Flat, by name, in the order of the StateSpecs."""
    gradient: torch.Tensor
    work: torch.Tensor | None
    """For fp32 copies, if the rule computes on them."""


class DeviceUpdater(Updater):
    """Updates blocks on the device, by an element-wise rule.

    States that live on the device are updated in place, weights once compute has read them for the last time. Other
    states come from RAM, or from SSD through the ring in RAM. A block of them is copied to a slot on the device,
    updated, and copied back. All three steps are in the pipe of the slot, so the device waits for no thread between
    them. Blocks of other slots move at the same time. The gradient is copied too, unless it lives on the device.
    Gradients of several steps come one after another. An update ends when all its states are home, as on the CPU. Plans
    have no speculative updates of such units.
    """

    def __init__(self, store: Store, lanes: dict[str, Lane], kernel: UpdateKernel | None, device: Device) -> None:
        """`kernel`: of the element-wise rule."""
        super().__init__(store, lanes)
        self._kernel = kernel
        self._device = device
        self._slots = Ring(self._open_slots())
        self._works_in_slots = store.plan.layout.weight.copied
        """Whether units that live on the device need a slot too."""

    def _open_slots(self) -> list[Slot]:
        """The slots in the device's memory, if the plan has them."""
        layout, tier = self._store.plan.layout, self._store.device
        assert tier is not None
        at, _ = slot_offsets(layout)
        slots = []
        for number in range(slot_count(layout) if self._store.plan.placement.pages(DEVICE, UPDATE_RING) else 0):
            pages = tier.take(slot_pages(layout))
            states = {
                state.name: pages.tensor(state.dtype, elements, at[state.name])
                for state in layout.states
                if (elements := layout.most_in_block(state))
            }
            gradient = pages.tensor(layout.gradient_dtype, layout.block_elements, at[GRAD])
            work = layout.work_elements
            slots.append(Slot(number, states, gradient, pages.tensor(torch.float32, work, at[WORK]) if work else None))
        return slots

    def _compute(self, block: Block, parts: Mapping[str, Part], slot: Region | None, after: Sequence[Handle]) -> Handle:
        update, start, count, device = block.update, block.start, block.stop - block.start, self._device
        unit, weights = update.unit, update.weights
        old, new = (self._tensors(block, extent, parts, slot) for extent in (weights.read, weights.write))
        moving = [name for name in new if not self._store.lives_on_device(unit.index, name)]
        brings = not self._store.lives_on_device(unit.index, GRAD)
        at, nbytes = self._store.shards.origin(unit.spec, GRAD) + start, sum(tensor.nbytes for tensor in new.values())
        gradients = count * self._store.dtype(GRAD).itemsize * len({record for record, _ in block.pieces})
        there = self._slots.take() if moving or brings or self._works_in_slots else None

        def gradient_of(record: UnitGradient) -> torch.Tensor:
            gradient = record.buffer[at : at + count]
            if there is not None and brings:
                device.copy(there.gradient[:count], gradient)
                gradient = there.gradient[:count]
            return gradient

        def work() -> None:
            states = dict(new)
            if there is not None:
                states |= {name: there.states[name][: len(new[name])] for name in moving}
            if weights != IN_PLACE and WEIGHT not in moving:
                device.copy(new[WEIGHT], old[WEIGHT])
            for name in moving:
                device.copy(states[name], old[name])
            self._apply_all(block, gradient_of, states, None if there is None else there.work)
            for name in moving:
                device.copy(new[name], states[name])

        moved = sum(new[name].nbytes for name in moving)
        self._lanes["h2d"].count(moved + gradients * brings)
        self._lanes["d2h"].count(moved)
        # Compute may still read weights that live there.
        read = PAST if WEIGHT in moving else update.parts[-1][0].issued
        pipe = start // self._block % DEVICE_SLOTS if there is None else there.number
        label, touched = f"update {unit.spec.name}", 2 * nbytes + gradients
        queued = partial(device.pipe, pipe, work, read)
        handle = self._lanes["device_update"].submit(queued, after, touched, label)
        if there is not None:
            handle.then(lambda _: self._slots.give_back(there))
        return handle

    def _apply(
        self, block: Block, piece: Segment, gradient: torch.Tensor, states: Tensors, work: torch.Tensor | None
    ) -> None:
        first = piece.start - self._store.shards.updated(block.update.unit.spec).start - block.start
        size = piece.stop - piece.start
        parts = [states[s.name][s.elements(first) :][: s.elements(size)] for s in self._states]
        assert self._kernel is not None
        self._kernel(parts, gradient[first : first + size], piece.arguments)
