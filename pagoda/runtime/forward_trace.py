"""The trace of one forward: how many bytes each block leaves to its backward."""

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from pagoda.plan.activations import BlockSizes, Policy, StepSizes, Storages
from pagoda.runtime.device import Device
from pagoda.runtime.saved import SavedStorage, SavedStorages


class BlockTrace:
    """What is known of one block so far."""

    def __init__(self, policy: Policy) -> None:
        self.sizes = BlockSizes()
        self.given: frozenset[SavedStorage] = frozenset()
        """Storages of its arguments, as long as it may still save some."""
        self.started = 0.0
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
        self._current: BlockTrace | None = None
        self._saving_inputs = False

    @property
    def complete(self) -> bool:
        """Whether the sizes of every block are known."""
        return bool(self.blocks) and all(block.complete for block in self.blocks)

    @property
    def begun(self) -> bool:
        """Whether the sizes of some block are known."""
        return any(block.complete for block in self.blocks)

    @property
    def sizes(self) -> StepSizes:
        """What forward left to backward."""
        return StepSizes(tuple(block.sizes for block in self.blocks), tuple(self._outside))

    def enter(self, policy: Policy, inputs: Sequence[torch.Tensor]) -> BlockTrace:
        """A block starts."""
        block = self._current = BlockTrace(policy)
        self._saving_inputs = policy.recomputes
        self.blocks.append(block)
        self._outside.append(0)
        block.given = frozenset(map(self._saved.find, inputs))
        for storage in block.given:
            if storage.given_to is not self:
                storage.given_to = self
                block.sizes = replace(block.sizes, inputs=self._with(block.sizes.inputs, storage))
        self._synchronize()
        block.started = time.perf_counter()
        return block

    def leave(self) -> None:
        """The block that was entered last has ended."""
        block, self._current = self._current, None
        assert block is not None
        self._synchronize()
        block.sizes = replace(block.sizes, forward_s=time.perf_counter() - block.started)
        if block.complete:
            block.given = frozenset()

    def note(self, storage: SavedStorage) -> None:
        """Forward saves a storage."""
        if self._current is None:
            if self._is_new(storage):
                self._outside[-1] += storage.nbytes
        elif not self._saving_inputs:
            self._add(self._current, storage)

    def note_recomputed(self, block: BlockTrace, storage: SavedStorage) -> None:
        """A block that is recomputed saves a storage."""
        self._add(block, storage)
        block.complete = True

    def _add(self, block: BlockTrace, storage: SavedStorage) -> None:
        if not self._is_new(storage):
            return
        if storage in block.given:
            block.sizes = replace(block.sizes, saved_inputs=self._with(block.sizes.saved_inputs, storage))
        else:
            block.sizes = replace(block.sizes, inner=self._with(block.sizes.inner, storage))

    def _with(self, part: Storages, storage: SavedStorage) -> Storages:
        return part.with_one(storage.nbytes, self._page_bytes)

    def _is_new(self, storage: SavedStorage) -> bool:
        if storage.seen is self:
            return False
        storage.seen = self
        return True

    def _synchronize(self) -> None:
        if self._timed_on is not None:
            self._timed_on.fence().synchronize()
