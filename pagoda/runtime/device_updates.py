"""Updates on the device: blocks of states pass it through a ring, while the CPU updates other units."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

import torch

from pagoda.optim.rule import StateSpec
from pagoda.plan.device_updates import DEVICE_SLOTS, UPDATE_RING, slot_offsets, slot_pages, state_bytes
from pagoda.plan.layout import GRAD, WEIGHT
from pagoda.plan.ops import DEVICE
from pagoda.plan.units import UnitSpec
from pagoda.runtime.device import Device, UpdateKernel
from pagoda.runtime.gradients import UnitGradient
from pagoda.runtime.lanes import Handle, Lane
from pagoda.runtime.ring import Ring
from pagoda.runtime.store import Store
from pagoda.runtime.updates import IN_PLACE, Block, UpdatePath


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
    that the device needs nobody between the three; the blocks of other slots come and go meanwhile. Gradients of
    several steps come one after another. The handles of an update say when all of it is home, as they do on the CPU.
    Plans have no such unit on SSD, nor speculative updates of one.
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
        offsets, gradient = slot_offsets(layout)
        for number in range(DEVICE_SLOTS if self._store.plan.placement.pages(DEVICE, UPDATE_RING) else 0):
            pages = tier.take(slot_pages(layout))
            tensors = [pages.tensor(state.dtype, state.elements(block), offsets[state.name]) for state in states]
            slots.append(_Slot(number, tensors, pages.tensor(self._store.dtype(GRAD), block, gradient)))
        return slots

    def submit(self, block: Block, computed: list[Handle], written: list[Handle]) -> None:
        update, start, count, device = block.update, block.start, block.stop - block.start, self._device
        unit, weights = update.unit, update.weights
        old, new = (self._homes(unit.spec, extent, start, count) for extent in (weights.read, weights.write))
        at, states = self._store.shards.origin(unit.spec, GRAD) + start, state_bytes(self._states, count)
        brought = count * self._store.dtype(GRAD).itemsize * len(update.parts)

        def gradient_of(record: UnitGradient) -> torch.Tensor:
            buffer = record.buffer
            assert buffer is not None
            return buffer[at : at + count]

        def update_at_home() -> None:
            if weights != IN_PLACE:
                device.copy(new[0], old[0])
            self._compute(block, new, gradient_of)

        def update_in_slot() -> None:
            there = [tensor[: len(at_home)] for tensor, at_home in zip(slot.states, old, strict=True)]

            def bring(record: UnitGradient) -> torch.Tensor:
                device.copy(slot.gradient[:count], gradient_of(record))
                return slot.gradient

            for target, source in zip(there, old, strict=True):
                device.copy(target, source)
            self._compute(block, there, bring)
            for target, source in zip(new, there, strict=True):
                device.copy(target, source)

        lane, label, touched = self._lanes["device_update"], f"update {unit.spec.name}", 2 * states + brought
        if unit.index in self._store.plan.placement.resident:
            pipe, issued = start // self._block % DEVICE_SLOTS, update.parts[-1][0].issued
            computed.append(lane.submit(lambda: device.pipe(pipe, update_at_home, issued), (), touched, label))
            return
        slot = self._ring.take()
        self._lanes["h2d"].count(states + brought)
        self._lanes["d2h"].count(states)
        computed.append(lane.submit(lambda: device.pipe(slot.number, update_in_slot), (), touched, label))
        computed[-1].then(lambda _: self._ring.give_back(slot))

    def _compute(
        self, block: Block, states: Sequence[torch.Tensor], bring: Callable[[UnitGradient], torch.Tensor]
    ) -> None:
        """Update a block where its states lie now; `bring` says where its part of a gradient does, until the next."""
        begin = self._store.shards.updated(block.update.unit.spec).start + block.start
        for record, pieces in groupby(block.pieces, lambda piece: piece[0]):
            gradient = bring(record)
            for _, piece in pieces:
                first, size = piece.start - begin, piece.stop - piece.start
                parts = [
                    tensor[state.elements(first) :][: state.elements(size)]
                    for state, tensor in zip(self._states, states, strict=True)
                ]
                self._kernel(parts, gradient[first : first + size], piece.arguments)

    def _homes(self, unit: UnitSpec, weights: str, start: int, count: int) -> list[torch.Tensor]:
        """A block of every state where it lives, with the weights of an extent."""
        return [
            self._home(unit, state, weights if state.name == WEIGHT else state.name, start, count)
            for state in self._states
        ]

    def _home(self, unit: UnitSpec, state: StateSpec, extent: str, start: int, count: int) -> torch.Tensor:
        home = self._store.tensor(unit.index, extent)
        assert home is not None, "what is updated on the device is in memory"
        first = state.elements(self._store.shards.origin(unit, state.name) + start)
        return home[first : first + state.elements(count)]
