"""The trace of one forward: how many bytes each block leaves to its backward."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from pagoda.plan.activations import BlockSizes, Policy, StepSizes, Storages
from pagoda.runtime.device import Device
from pagoda.runtime.saved import SavedStorage


class BlockTrace:
    """What is known of one block so far."""

    def __init__(self, policy: Policy, given: frozenset[SavedStorage]) -> None:
        self.given = given
        """Storages of its arguments."""
        self.inputs = self.saved_inputs = self.inner = Storages()
        self.forward_s = 0.0
        self.complete = not policy.recomputes
        """Whether all its storages have been seen; those of a recomputed block only in backward."""

    @property
    def sizes(self) -> BlockSizes:
        return BlockSizes(self.inputs, self.saved_inputs, self.inner, self.forward_s)


class ForwardTrace:
    """Puts every storage that a forward saves on the account of the block that saw it first."""

    def __init__(self, page_bytes: int, timed_on: Device | None) -> None:
        """`page_bytes`: of offloaded storages, and the least of those that can be. `timed_on`: the device to wait for
        around each block, so that its time is its own; None takes no times."""
        self._page_bytes = page_bytes
        self._timed_on = timed_on
        self.blocks: list[BlockTrace] = []
        self._outside = [0]
        self._current: BlockTrace | None = None
        self._given: set[SavedStorage] = set()
        """What was booked as an argument of a block."""
        self._saved: set[SavedStorage] = set()
        """What was booked as saved."""

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

    @contextmanager
    def block(self, policy: Policy, given: frozenset[SavedStorage]) -> Iterator[BlockTrace]:
        """Inside, a block runs whose arguments lie in the given storages."""
        block = self._current = BlockTrace(policy, given)
        self.blocks.append(block)
        self._outside.append(0)
        for storage in given - self._given:
            block.inputs = block.inputs.with_one(storage.nbytes, self._page_bytes)
        self._given |= given
        self._synchronize()
        started = time.perf_counter()
        try:
            yield block
        finally:
            self._current = None
            self._synchronize()
            block.forward_s = time.perf_counter() - started

    def note(self, storage: SavedStorage, recomputed: BlockTrace | None = None) -> None:
        """Forward saves a storage, or a block that is `recomputed` does."""
        block = recomputed or self._current
        if recomputed is not None:
            recomputed.complete = True
        elif block is not None and not block.complete:
            return  # its arguments, which are booked
        if storage in self._saved:
            return
        self._saved.add(storage)
        if block is None:
            self._outside[-1] += storage.nbytes
        elif storage in block.given:
            block.saved_inputs = block.saved_inputs.with_one(storage.nbytes, self._page_bytes)
        else:
            block.inner = block.inner.with_one(storage.nbytes, self._page_bytes)

    def _synchronize(self) -> None:
        if self._timed_on is not None:
            self._timed_on.fence().synchronize()
