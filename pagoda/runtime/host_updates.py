"""Updates on the CPU: in place if states are in RAM, or in the ring if they are on SSD."""

from collections.abc import Mapping, Sequence

import torch

from pagoda.memory.arena import copy_bytes
from pagoda.memory.region import Region
from pagoda.optim.kernels import UpdateKernel
from pagoda.plan.layout import GRAD, WEIGHT
from pagoda.plan.units import UnitSpec
from pagoda.runtime.lanes import Handle, Lane
from pagoda.runtime.next_update import Segment
from pagoda.runtime.store import Store
from pagoda.runtime.updates import IN_PLACE, Block, Part, Tensors, Updater


class HostUpdater(Updater):
    """Updates blocks by an element-wise rule, on the update lane's threads. States in RAM are updated at home."""

    def __init__(self, store: Store, lanes: dict[str, Lane], kernel: UpdateKernel | None) -> None:
        """`kernel`: of the element-wise rule."""
        super().__init__(store, lanes)
        self._kernel = kernel
        layout = store.plan.layout
        self._touched = [int(layout.updated_elements(unit) * layout.bytes_per_update) for unit in store.plan.units]
        """Bytes that each unit's update reads and writes."""
        self._work = None if store.work is None else store.work.tensor(torch.float32)
        """If there is one, the update lane has one thread, so only one update uses it."""

    def _is_small(self, unit: UnitSpec) -> bool:
        return self._touched[unit.index] <= self._lanes["update"].inline_bytes and not self._streamed[unit.index]

    def _compute(self, block: Block, parts: Mapping[str, Part], slot: Region | None, after: Sequence[Handle]) -> Handle:
        unit, guess, weights, store = block.update.unit, block.update.guess, block.update.weights, self._store
        states = self._tensors(block, weights.write, parts, slot)
        old = store.tensor(unit.index, weights.read) if weights != IN_PLACE else None
        changing = {name: part.elements for name, part in parts.items()}
        at, count = store.shards.origin(unit.spec, GRAD) + block.start, block.stop - block.start

        def compute() -> None:
            if old is not None:
                copy_bytes(states[WEIGHT], old[changing[WEIGHT].start : changing[WEIGHT].stop])
            if guess is not None:
                guess.save(changing)
            self._apply_all(block, lambda record: record.buffer[at : at + count], states, self._work)

        touched = 2 * sum(state.nbytes for state in states.values()) + count * store.dtype(GRAD).itemsize
        return self._lanes["update"].submit(compute, after, touched, f"update {unit.spec.name}")

    def _apply(
        self, block: Block, piece: Segment, gradient: torch.Tensor, states: Tensors, work: torch.Tensor | None
    ) -> None:
        first = piece.start - self._store.shards.updated(block.update.unit.spec).start - block.start
        addresses = [states[state.name].data_ptr() + state.nbytes(first) for state in self._states]
        at = gradient.data_ptr() + first * gradient.element_size()
        assert self._kernel is not None
        self._kernel(*addresses, at, piece.stop - piece.start, *piece.arguments)
