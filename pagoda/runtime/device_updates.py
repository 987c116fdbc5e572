"""Updates on the device: blocks of states pass it through a ring, while the CPU updates other units."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from pagoda.optim.rule import StateSpec
from pagoda.plan.device_updates import DEVICE_SLOTS, UPDATE_RING, slot_offsets, slot_pages, state_bytes
from pagoda.plan.layout import GRAD
from pagoda.plan.ops import DEVICE
from pagoda.plan.units import UnitSpec
from pagoda.runtime.device import Device, UpdateKernel
from pagoda.runtime.lanes import Handle, Lane
from pagoda.runtime.ring import Ring
from pagoda.runtime.store import Store
from pagoda.runtime.updates import Block, UpdatePath


class _Slot(NamedTuple):
    """Room on the device for a block of every state and its gradient."""

    number: int
    states: Sequence[torch.Tensor]
    """Flat, in StateSpec order."""
    gradient: torch.Tensor


class DevicePath(UpdatePath):
    """Updates blocks on the device.

    Units that live there are updated in place, once compute has read the weights for the last time. The states of
    others live in RAM: a block comes with its gradient, is updated and goes back, all of it in the pipe of its slot, so
    that the device needs nobody between the three; the blocks of other slots come and go meanwhile. The handles of an
    update say when all of it is home, as they do on the CPU. Plans have no such unit on SSD, nor asynchronous or
    speculative updates of one.
    """

    def __init__(self, store: Store, kernel: UpdateKernel, lanes: dict[str, Lane], device: Device) -> None:
        super().__init__(store, lanes)
        self._kernel = kernel
        self._device = device
        self._ring = Ring(self._open_slots())

    def _open_slots(self) -> list[_Slot]:
        """The ring's pages of the device's tier, if the plan has a ring."""
        layout, tier = self._store.plan.layout, self._store.device
        assert tier is not None
        block, states, slots = layout.block_elements, layout.states, []
        offsets, gradient = slot_offsets(states, block)
        for number in range(DEVICE_SLOTS if self._store.plan.placement.pages(DEVICE, UPDATE_RING) else 0):
            pages = tier.take(slot_pages(states, block, layout.page_bytes))
            tensors = [pages.tensor(state.dtype, state.elements(block), offsets[state.name]) for state in states]
            slots.append(_Slot(number, tensors, pages.tensor(self._store.dtype(GRAD), block, gradient)))
        return slots

    def submit(self, block: Block, computed: list[Handle], written: list[Handle]) -> None:
        unit, start, count, device = block.update.unit, block.start, block.stop - block.start, self._device
        ((record, _),) = block.update.parts
        buffer = record.buffer
        assert buffer is not None
        home = [self._home(unit.spec, state, start, count) for state in self._states]
        gradient = buffer[self._store.shards.origin(unit.spec, GRAD) + start :][:count]
        states = state_bytes(self._states, count)

        def update_at_home() -> None:
            self._compute(block, home, gradient)

        def update_in_slot() -> None:
            there = [tensor[: len(at_home)] for tensor, at_home in zip(slot.states, home, strict=True)]
            for target, source in zip((*there, slot.gradient[:count]), (*home, gradient), strict=True):
                device.copy(target, source)
            self._compute(block, there, slot.gradient)
            for target, source in zip(home, there, strict=True):
                device.copy(target, source)

        lane, label, touched = self._lanes["device_update"], f"update {unit.spec.name}", 2 * states + gradient.nbytes
        if unit.index in self._store.plan.placement.resident:
            pipe = start // self._block % DEVICE_SLOTS
            computed.append(lane.submit(lambda: device.pipe(pipe, update_at_home, record.issued), (), touched, label))
            return
        slot = self._ring.take()
        self._lanes["h2d"].count(states + gradient.nbytes)
        self._lanes["d2h"].count(states)
        computed.append(lane.submit(lambda: device.pipe(slot.number, update_in_slot), (), touched, label))
        computed[-1].then(lambda _: self._ring.give_back(slot))

    def _compute(self, block: Block, states: Sequence[torch.Tensor], gradient: torch.Tensor) -> None:
        """Update a block where its states and gradient lie now."""
        begin = self._store.shards.updated(block.update.unit.spec).start + block.start
        for _, piece in block.pieces:
            first, size = piece.start - begin, piece.stop - piece.start
            parts = [
                tensor[state.elements(first) :][: state.elements(size)]
                for state, tensor in zip(self._states, states, strict=True)
            ]
            self._kernel(parts, gradient[first : first + size], piece.arguments)

    def _home(self, unit: UnitSpec, state: StateSpec, start: int, count: int) -> torch.Tensor:
        home = self._store.tensor(unit.index, state.name)
        assert home is not None, "what is updated on the device is in memory"
        first = state.elements(self._store.shards.origin(unit, state.name) + start)
        return home[first : first + state.elements(count)]
