"""Updates on the CPU: in place if states are in RAM, or in the ring if they are on SSD."""

import ctypes
from collections.abc import Mapping, Sequence

from pagoda.memory.region import Region
from pagoda.optim.kernels import UpdateKernel
from pagoda.plan.layout import GRAD, MASTER, WEIGHT
from pagoda.plan.units import UnitSpec
from pagoda.runtime.gradients import UnitGradient
from pagoda.runtime.lanes import Handle, Lane
from pagoda.runtime.next_update import Segment
from pagoda.runtime.store import Store
from pagoda.runtime.streams import IN_PLACE, Block, Part, UpdatePath
from pagoda.runtime.unit import LiveUnit
from pagoda.schedule.operations import Writes


class HostPath(UpdatePath):
    """Updates blocks by an element-wise rule, on the update lane's threads. States in RAM are updated at home."""

    def __init__(self, store: Store, kernel: UpdateKernel, lanes: dict[str, Lane]) -> None:
        super().__init__(store, lanes)
        self._kernel = kernel
        layout = store.plan.layout
        self._touched = [int(layout.updated_elements(unit) * layout.bytes_per_update) for unit in store.plan.units]
        """Bytes that each unit's update reads and writes."""

    def is_small(self, unit: UnitSpec) -> bool:
        return self._touched[unit.index] <= self._lanes["update"].inline_bytes and not self._streamed[unit.index]

    def cuts(self, unit: UnitSpec) -> list[tuple[int, int]]:
        if self.is_small(unit):  # threads need not share it
            return [(0, len(self._store.shards.updated(unit)))]
        return super().cuts(unit)

    def _compute(self, block: Block, parts: Mapping[str, Part], slot: Region | None, after: Sequence[Handle]) -> Handle:
        update, start, stop, pieces = block
        unit, undo, store = update.unit, update.undo, self._store
        addresses = self._addresses(unit.index, slot, parts, update.weights.write, update.writes)
        old = store.tensor(unit.index, update.weights.read) if update.weights != IN_PLACE else None
        weights, itemsize = parts[WEIGHT].elements, self._states[0].dtype.itemsize

        def compute() -> None:
            if old is not None:
                ctypes.memmove(addresses[0], old.data_ptr() + weights.start * itemsize, len(weights) * itemsize)
            if undo is not None:
                undo.save({name: part.elements for name, part in parts.items()})
            for record, piece in pieces:
                self._apply(unit, start, addresses, record, piece)

        states = sum(len(part.elements) * store.dtype(name).itemsize for name, part in parts.items())
        touched = 2 * states + (stop - start) * store.dtype(GRAD).itemsize
        return self._lanes["update"].submit(compute, after, touched, f"update {unit.spec.name}")

    def _addresses(
        self, unit: int, slot: Region | None, parts: Mapping[str, Part], weights: str, writes: Writes
    ) -> list[int]:
        """Address of each state of a block during its update: at home in RAM, or in the ring; 0 if there is none.

        If only moments change, weights are computed in the ring from whatever it contains, and left there.
        """
        addresses: list[int] = []
        for state in self._states:
            part = parts.get(state.name)
            home = self._store.tensor(unit, weights if state.name == WEIGHT else state.name)
            if part is None:
                addresses.append(0)
            elif home is not None and not (writes is Writes.MOMENTS and state.name in MASTER):
                addresses.append(home.data_ptr() + part.elements.start * state.dtype.itemsize)
            else:
                assert slot is not None
                addresses.append(self._in_ring(slot, part, state))
        return addresses

    def _apply(self, unit: LiveUnit, start: int, addresses: list[int], record: UnitGradient, piece: Segment) -> None:
        """Update a piece of the block that begins at `start`."""
        buffer = record.buffer
        within, origin = self._store.shards.updated(unit.spec).start, self._store.shards.origin(unit.spec, GRAD)
        ahead = piece.start - within - start
        states = [a + state.nbytes(ahead) for a, state in zip(addresses, self._states, strict=True)]
        at = buffer.data_ptr() + (origin + piece.start - within) * buffer.element_size()
        self._kernel(*states, at, piece.stop - piece.start, *piece.arguments)
