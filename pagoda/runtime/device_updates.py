"""Updates on the device: blocks of states pass it through a ring, while the CPU updates other units."""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch

from pagoda.plan.device_updates import DEVICE_SLOTS, UPDATE_RING, WORK, slot_count, slot_offsets, slot_pages
from pagoda.plan.layout import GRAD, WEIGHT
from pagoda.plan.ops import DEVICE
from pagoda.plan.units import UnitSpec
from pagoda.runtime.device import PAST, Device, UpdateKernel
from pagoda.runtime.gradients import UnitGradient
from pagoda.runtime.lanes import Handle, Lane
from pagoda.runtime.next_update import Segment
from pagoda.runtime.ring import Ring
from pagoda.runtime.store import Store
from pagoda.runtime.updates import IN_PLACE, Block, UpdatePath


class Slot(NamedTuple):
    """Room on the device for a block of every state and its gradient."""

    number: int
    states: Mapping[str, torch.Tensor]
    """Flat, by name, in StateSpec order."""
    gradient: torch.Tensor
    work: torch.Tensor | None
    """For fp32 copies, where the rule computes on them."""


class DevicePath(UpdatePath):
    """Updates blocks on the device, by an element-wise rule.

    States that live there are updated in place, weights once compute has read them for the last time. A block of those
    that live in RAM comes to a slot, is updated and goes back, all of it in the pipe of its slot, so that the device
    needs nobody between the three; the blocks of other slots come and go meanwhile. So does the gradient, unless it
    lives there; those of several steps come one after another. The handles of an update say when all of it is home, as
    they do on the CPU. Plans have no such unit on SSD, nor speculative updates of one.
    """

    def __init__(self, store: Store, kernel: UpdateKernel, lanes: dict[str, Lane], device: Device) -> None:
        super().__init__(store, lanes)
        self._kernel = kernel
        self._device = device
        self._ring = Ring(self._open_slots())
        self._works_in_slots = store.plan.layout.weight.copied
        """Whether units that live on the device need a slot too."""

    def _open_slots(self) -> list[Slot]:
        """The ring's pages of the device's tier, if the plan has a ring."""
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

    def submit(self, block: Block, computed: list[Handle], written: list[Handle]) -> None:
        update, start, count, device = block.update, block.start, block.stop - block.start, self._device
        unit, weights = update.unit, update.weights
        old, new = (self._homes(unit.spec, extent, start, count) for extent in (weights.read, weights.write))
        moving = [name for name in new if not self._store.lives_on_device(unit.index, name)]
        brings = not self._store.lives_on_device(unit.index, GRAD)
        at, states = self._store.shards.origin(unit.spec, GRAD) + start, sum(tensor.nbytes for tensor in new.values())
        gradients = count * self._store.dtype(GRAD).itemsize * len({record for record, _ in block.pieces})
        slot = self._ring.take() if moving or brings or self._works_in_slots else None

        def gradient_of(record: UnitGradient) -> torch.Tensor:
            buffer = record.buffer
            assert buffer is not None
            gradient = buffer[at : at + count]
            if slot is not None and brings:
                device.copy(slot.gradient[:count], gradient)
                gradient = slot.gradient[:count]
            return gradient

        def work() -> None:
            there = dict(new)
            if slot is not None:
                there |= {name: slot.states[name][: len(new[name])] for name in moving}
            if weights != IN_PLACE and WEIGHT not in moving:
                device.copy(new[WEIGHT], old[WEIGHT])
            for name in moving:
                device.copy(there[name], old[name])
            self._compute(block, there, gradient_of, slot)
            for name in moving:
                device.copy(new[name], there[name])

        moved = sum(new[name].nbytes for name in moving)
        self._lanes["h2d"].count(moved + gradients * brings)
        self._lanes["d2h"].count(moved)
        # Compute may still read weights that live there.
        after = PAST if WEIGHT in moving else update.parts[-1][0].issued
        pipe = start // self._block % DEVICE_SLOTS if slot is None else slot.number
        label, touched = f"update {unit.spec.name}", 2 * states + gradients
        queued = partial(device.pipe, pipe, work, after)
        computed.append(self._lanes["device_update"].submit(queued, (), touched, label))
        if slot is not None:
            computed[-1].then(lambda _: self._ring.give_back(slot))

    def _compute(
        self,
        block: Block,
        states: Mapping[str, torch.Tensor],
        bring: Callable[[UnitGradient], torch.Tensor],
        slot: Slot | None,
    ) -> None:
        """Update a block where its states lie now; `bring` says where its part of a gradient does, until the next."""
        for record, pieces in groupby(block.pieces, lambda piece: piece[0]):
            gradient = bring(record)
            for _, piece in pieces:
                self._apply(block.update.unit.spec, block.start, piece, gradient, states, slot)

    def _apply(
        self,
        unit: UnitSpec,
        start: int,
        piece: Segment,
        gradient: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        slot: Slot | None,
    ) -> None:
        """Update a piece of the block from `start` on, of which are the gradient and the states."""
        first, size = piece.start - self._store.shards.updated(unit).start - start, piece.stop - piece.start
        parts = [states[s.name][s.elements(first) :][: s.elements(size)] for s in self._states]
        self._kernel(parts, gradient[first : first + size], piece.arguments)

    def _homes(self, unit: UnitSpec, weights: str, start: int, count: int) -> dict[str, torch.Tensor]:
        """What a block has of every state where it lives, with the weights of an extent."""
        homes = {}
        for state in self._states:
            home = self._store.tensor(unit.index, weights if state.name == WEIGHT else state.name)
            assert home is not None, "what is updated on the device is in memory"
            first = state.elements(self._store.shards.origin(unit, state.name) + start)
            homes[state.name] = home[first : first + state.elements(count)]
        return homes
