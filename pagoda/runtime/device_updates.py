"""Updates on the device: blocks of states pass it through a ring, while the CPU updates other units."""

from collections.abc import Sequence

import torch

from pagoda.optim.rule import StateSpec
from pagoda.plan.device_updates import DEVICE_SLOTS, UPDATE_RING, slot_offsets, slot_pages, state_bytes
from pagoda.plan.layout import GRAD
from pagoda.plan.ops import DEVICE
from pagoda.runtime.device import Device, UpdateKernel
from pagoda.runtime.gradients import UnitGradient
from pagoda.runtime.lanes import Handle, Lane
from pagoda.runtime.ring import Ring
from pagoda.runtime.segments import BlockSegment, Segment
from pagoda.runtime.store import Store
from pagoda.runtime.unit import LiveUnit
from pagoda.runtime.updates import Block, UpdatePath


class DeviceRing:
    """Slots on the device, each with room for a block of every state and its gradient."""

    def __init__(self, store: Store) -> None:
        """Take the ring's pages of the device's tier, if the plan has a ring."""
        layout, tier = store.plan.layout, store.device
        assert tier is not None
        slots = DEVICE_SLOTS if store.plan.placement.pages(DEVICE, UPDATE_RING) else 0
        block, states = layout.block_elements, layout.states
        offsets, gradient = slot_offsets(states, block)
        taken = [tier.take(slot_pages(states, block, layout.page_bytes)) for _ in range(slots)]
        self.states = [
            [pages.tensor(state.dtype, state.elements(block), offsets[state.name]) for state in states]
            for pages in taken
        ]
        """slot -> its tensor of each state, flat, in StateSpec order."""
        self.gradients = [pages.tensor(store.dtype(GRAD), block, gradient) for pages in taken]
        self.slots = Ring(range(slots))


class DevicePath(UpdatePath):
    """Updates blocks on the device.

    Units that live there are updated in place. The states of others live in RAM: a block comes with its gradient, is
    updated and goes back, all of it in the pipe of its slot, so that the device needs nobody between the three; the
    blocks of other slots come and go meanwhile. The handles of an update say when all of it is home, as they do on the
    CPU. Plans have no such unit on SSD, nor asynchronous or speculative updates of one.
    """

    def __init__(
        self, store: Store, kernel: UpdateKernel, lanes: dict[str, Lane], device: Device, ring: DeviceRing
    ) -> None:
        super().__init__(store)
        self._kernel = kernel
        self._lanes = lanes
        self._device = device
        self._ring = ring

    def submit(self, block: Block, computed: list[Handle], written: list[Handle]) -> None:
        unit, (start, stop, pieces) = block.update.unit, block[1:]
        if unit.index in self._store.plan.placement.resident:
            computed.append(self._update_at_home(unit, start, stop, pieces))
            return
        device, count, ring = self._device, stop - start, self._ring
        slot = ring.slots.take()
        there = [tensor[: s.elements(count)] for s, tensor in zip(self._states, ring.states[slot], strict=True)]
        home = [self._home(unit.index, state, start, count) for state in self._states]
        (record,) = {id(record): record for record, _ in pieces}.values()
        buffer, gradient = record.buffer, ring.gradients[slot]
        assert buffer is not None

        def work() -> None:
            for target, source in zip(there, home, strict=True):
                device.copy(target, source)
            device.copy(gradient[:count], buffer[start:stop])
            self._compute(there, gradient, start, pieces)
            for target, source in zip(home, there, strict=True):
                device.copy(target, source)

        states, grad_bytes = state_bytes(self._states, count), count * buffer.element_size()
        self._lanes["h2d"].count(states + grad_bytes)
        self._lanes["d2h"].count(states)
        handle = self._lanes["device_update"].submit(
            lambda: device.pipe(slot, work), (), 2 * states + grad_bytes, f"update {unit.spec.name}"
        )
        handle.then(lambda _: ring.slots.give_back(slot))
        computed.append(handle)

    def _update_at_home(
        self, unit: LiveUnit, start: int, stop: int, pieces: Sequence[tuple[UnitGradient, Segment]]
    ) -> Handle:
        """Update a block of a unit that lives on the device, once compute has read the weights for the last time."""
        count = stop - start
        home = [self._home(unit.index, state, start, count) for state in self._states]
        (record,) = {id(record): record for record, _ in pieces}.values()
        buffer, issued = record.buffer, record.issued
        assert buffer is not None
        gradient = buffer[start:stop]
        touched = 2 * state_bytes(self._states, count) + gradient.nbytes
        return self._lanes["device_update"].submit(
            lambda: self._device.pipe(
                start // self._block % DEVICE_SLOTS, lambda: self._compute(home, gradient, start, pieces), issued
            ),
            (),
            touched,
            f"update {unit.spec.name}",
        )

    def _compute(
        self,
        states: list[torch.Tensor],
        gradient: torch.Tensor,
        start: int,
        pieces: Sequence[tuple[UnitGradient, Segment]],
    ) -> None:
        """Update a block, whose first element is `start`, where its states and gradient lie now."""
        for _, piece in pieces:
            assert isinstance(piece, BlockSegment)
            first, size = piece.start - start, piece.stop - piece.start
            parts = [
                tensor[state.elements(first) :][: state.elements(size)]
                for state, tensor in zip(self._states, states, strict=True)
            ]
            self._kernel(parts, gradient[first : first + size], piece.arguments)

    def _home(self, unit: int, state: StateSpec, start: int, count: int) -> torch.Tensor:
        home = self._store.tensor(unit, state.name)
        assert home is not None, "what is updated on the device is in memory"
        first = state.elements(start)
        return home[first : first + state.elements(count)]
