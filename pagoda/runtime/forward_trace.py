"""The trace of one forward: how many bytes each block leaves to its backward."""

import time
from collections.abc import Sequence

import torch

from pagoda.plan.activations import BlockSizes, Policy, StepSizes
from pagoda.runtime.device import Device
from pagoda.runtime.saved import SavedStorage, SavedStorages


class BlockTrace:
    """What is known of one block so far. Bytes as in `BlockSizes`."""

    def __init__(self, policy: Policy) -> None:
        self.given: frozenset[SavedStorage] = frozenset()
        """Storages of its arguments."""
        self.inputs = self.inner = self.movable_inputs = self.movable_inner = 0
        self.started = self.forward_s = 0.0
        self.complete = not policy.recomputes
        """Whether all its storages have been seen; those of a recomputed block only in backward."""


class ForwardTrace:
    """Puts every storage that a forward saves on the account of the block that saw it first."""

    def __init__(self, saved: SavedStorages, page_bytes: int, timed_on: Device | None) -> None:
        """`page_bytes`: of offloaded storages, and the least of those that can be. `timed_on`: the device to wait for
        around each block, so that its time is its own; None takes no times."""
        self._saved = saved
        self._page_bytes = page_bytes
        self._timed_on = timed_on
        self.blocks: list[BlockTrace] = []
        self._outside = [0]
        self._largest = 0
        self._current: BlockTrace | None = None

    @property
    def complete(self) -> bool:
        """Whether the sizes of every block are known."""
        return bool(self.blocks) and all(block.complete for block in self.blocks)

    @property
    def begun(self) -> bool:
        """Whether the sizes of some block are known."""
        return any(block.complete for block in self.blocks)

    def enter(self, policy: Policy, inputs: Sequence[torch.Tensor]) -> BlockTrace:
        """A block starts."""
        block = self._current = BlockTrace(policy)
        self.blocks.append(block)
        self._outside.append(0)
        block.given = frozenset(map(self._saved.find, inputs))
        self._synchronize()
        block.started = time.perf_counter()
        return block

    def leave(self) -> None:
        """The block that was entered last has ended."""
        block, self._current = self._current, None
        assert block is not None
        self._synchronize()
        block.forward_s = time.perf_counter() - block.started
        block.given = frozenset()

    def note(self, storage: SavedStorage) -> None:
        """Forward saves a storage."""
        if not self._is_new(storage):
            return
        if self._current is not None:
            self._add(self._current, storage)
        else:
            self._outside[-1] += storage.nbytes

    def note_recomputed(self, block: BlockTrace, storage: SavedStorage) -> None:
        """A block that is recomputed saves a storage."""
        block.complete = True
        if self._is_new(storage):
            self._add(block, storage)

    def sizes(self) -> StepSizes:
        """What forward left to backward."""
        blocks = tuple(
            BlockSizes(b.inputs, b.inner, b.movable_inputs, b.movable_inner, b.forward_s) for b in self.blocks
        )
        return StepSizes(blocks, tuple(self._outside), self._largest)

    def _add(self, block: BlockTrace, storage: SavedStorage) -> None:
        if storage in block.given:
            block.inputs += storage.nbytes
            block.movable_inputs += self._movable(storage)
            return
        block.inner += storage.nbytes
        block.movable_inner += self._movable(storage)

    def _is_new(self, storage: SavedStorage) -> bool:
        if storage.seen is self:
            return False
        storage.seen = self
        return True

    def _movable(self, storage: SavedStorage) -> int:
        if storage.nbytes < self._page_bytes:
            return 0
        pages = -(-storage.nbytes // self._page_bytes)
        self._largest = max(self._largest, storage.nbytes)
        return pages * self._page_bytes

    def _synchronize(self) -> None:
        if self._timed_on is not None:
            self._timed_on.fence().synchronize()
