"""Updates on the device: blocks of states pass it through a ring, while the CPU updates other units."""

import threading
from collections.abc import Callable

import torch

from pagoda.memory.tier import MemoryTier
from pagoda.optim.rule import StateSpec
from pagoda.plan.device_updates import DEVICE_SLOTS, slot_offsets, slot_pages, state_bytes
from pagoda.plan.layout import GRAD
from pagoda.runtime.device import Device, UpdateKernel
from pagoda.runtime.gradients import UnitGradient
from pagoda.runtime.lanes import Handle, Lane
from pagoda.runtime.store import Store
from pagoda.runtime.undo import Undo
from pagoda.runtime.unit import LiveUnit
from pagoda.runtime.updates import IN_PLACE, BlockStream, Segment, WeightPath


class DeviceRing:
    """Slots on the device, each with room for a block of every state and its gradient."""

    def __init__(self, store: Store, tier: MemoryTier) -> None:
        """Take the ring's pages of the device's tier."""
        layout = store.plan.layout
        block, states = layout.block_elements, layout.states
        pages = slot_pages(states, block, layout.page_bytes)
        offsets, gradient = slot_offsets(states, block)
        runs = [tier.alloc(pages) for _ in range(DEVICE_SLOTS)]
        self.states = [
            [tier.tensor(run, state.dtype, state.elements(block), offsets[state.name]) for state in states]
            for run in runs
        ]
        """slot -> its tensor of each state, flat, in StateSpec order."""
        self.gradients = [tier.tensor(run, store.dtype(GRAD), block, gradient) for run in runs]
        self._free = list(range(DEVICE_SLOTS))
        self._lock = threading.Condition()

    def take(self) -> int:
        """A free slot, once there is one."""
        with self._lock:
            while not self._free:
                self._lock.wait()
            return self._free.pop()

    def release(self, slot: int) -> None:
        """Nothing reads or writes a slot any more."""
        with self._lock:
            self._free.append(slot)
            self._lock.notify_all()


class DeviceBlockStream(BlockStream):
    """Runs the updates of units on the device, block by block.

    Their states live in RAM. A block comes with its gradient, is updated and goes back, all of it in the pipe of its
    slot, so that the device needs nobody between the three; the blocks of other slots come and go meanwhile. The
    handles of an update say when all of it is home, as they do on the CPU.
    """

    def __init__(
        self,
        store: Store,
        kernel: UpdateKernel,
        lanes: dict[str, Lane],
        finished: Callable[[UnitGradient], None],
        device: Device,
        ring: DeviceRing,
    ) -> None:
        super().__init__(store, kernel, lanes, finished)
        self._device = device
        self._ring = ring

    def _feed_block(
        self,
        unit: LiveUnit,
        start: int,
        stop: int,
        pieces: list[tuple[UnitGradient, Segment]],
        streamed: list[str],
        weights: WeightPath,
        undo: Undo | None,
        computed: list[Handle],
        written: list[Handle],
    ) -> None:
        assert not streamed, "units with states on SSD are updated by the CPU"
        assert weights == IN_PLACE, "asynchronous updates are the CPU's"
        assert undo is None, "only units with states on SSD are speculated on"
        device, count, slot = self._device, stop - start, self._ring.take()
        there = [tensor[: s.elements(count)] for s, tensor in zip(self._states, self._ring.states[slot], strict=True)]
        home = [self._home(unit.index, state, start, count) for state in self._states]
        (record,) = {id(record): record for record, _ in pieces}.values()
        buffer, gradient = record.buffer, self._ring.gradients[slot]
        assert buffer is not None

        def work() -> None:
            for target, source in zip(there, home, strict=True):
                device.copy(target, source)
            device.copy(gradient[:count], buffer[start:stop])
            for _, piece in pieces:
                first, size = piece.start - start, piece.stop - piece.start
                parts = [
                    tensor[state.elements(first) :][: state.elements(size)]
                    for state, tensor in zip(self._states, there, strict=True)
                ]
                self._kernel(parts, gradient[first : first + size], piece.arguments)
            for target, source in zip(home, there, strict=True):
                device.copy(target, source)

        states, grad_bytes = state_bytes(self._states, count), count * buffer.element_size()
        self._lanes["h2d"].count(states + grad_bytes)
        self._lanes["d2h"].count(states)
        handle = self._lanes["device_update"].submit(
            lambda: device.pipe(slot, work), (), 2 * states + grad_bytes, f"update {unit.spec.name}"
        )
        handle.then(lambda _: self._ring.release(slot))
        computed.append(handle)

    def _home(self, unit: int, state: StateSpec, start: int, count: int) -> torch.Tensor:
        home = self._store.tensor(unit, state.name)
        assert home is not None, "states that pass the device live in RAM"
        first = state.elements(start)
        return home[first : first + state.elements(count)]
