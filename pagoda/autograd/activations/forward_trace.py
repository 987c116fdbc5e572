"""The trace of one forward: how many bytes each block keeps for its backward."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from pagoda.autograd.activations.saved import SavedStorage
from pagoda.plan.activations import BlockSizes, Policy, StepSizes, Storages
from pagoda.runtime.device import Device


class BlockTrace:
    """The storages of one block that are known so far."""

    def __init__(self, policy: Policy, given: frozenset[SavedStorage]) -> None:
        self.given = given
        """Storages of its arguments."""
        self.saved: list[SavedStorage] = []
        self.forward_s = 0.0
        self.complete = not policy.recomputes
        """Whether all storages that it saves are known. A recomputed block saves most of them in backward."""

    def save(self, storage: SavedStorage) -> None:
        """The block saves a storage, in its first forward or when it is recomputed."""
        self.saved.append(storage)
        self.complete = True


class ForwardTrace:
    """Records every storage that a forward saves, by block."""

    def __init__(self, timed_on: Device | None) -> None:
        """`timed_on`: the device to synchronize around each block, so that the block's time is its own. None measures
        no times."""
        self._timed_on = timed_on
        self.blocks: list[BlockTrace] = []
        self._outside: list[list[SavedStorage]] = [[]]
        """Storages saved outside blocks: before each block, and after the last one."""
        self._current: BlockTrace | None = None

    @property
    def complete(self) -> bool:
        """Whether the sizes of every block are known."""
        return bool(self.blocks) and all(block.complete for block in self.blocks)

    @property
    def begun(self) -> bool:
        """Whether the sizes of some block are known."""
        return any(block.complete for block in self.blocks)

    def sizes(self, page_bytes: int) -> StepSizes:
        """Sizes of everything that the forward keeps for backward, and in pages of `page_bytes` what can be offloaded.

        A storage counts where it was saved first.
        """
        given: set[SavedStorage] = set()
        saved: set[SavedStorage] = set()

        def first(storages: Iterable[SavedStorage], seen: set[SavedStorage]) -> Storages:
            total = Storages()
            for storage in storages:
                if storage not in seen:
                    seen.add(storage)
                    total = total.with_one(storage.nbytes, page_bytes)
            return total

        blocks, outside = [], [first(self._outside[0], saved).nbytes]
        for block, after in zip(self.blocks, self._outside[1:], strict=True):
            inputs = first(block.given, given)
            saved_inputs = first((storage for storage in block.saved if storage in block.given), saved)
            blocks.append(BlockSizes(inputs, saved_inputs, first(block.saved, saved), block.forward_s))
            outside.append(first(after, saved).nbytes)
        return StepSizes(tuple(blocks), tuple(outside))

    @contextmanager
    def block(self, policy: Policy, given: frozenset[SavedStorage]) -> Iterator[BlockTrace]:
        """Inside, a block runs. Its arguments lie in the storages `given`."""
        block = self._current = BlockTrace(policy, given)
        self.blocks.append(block)
        self._outside.append([])
        self._synchronize()
        started = time.perf_counter()
        try:
            yield block
        finally:
            self._current = None
            self._synchronize()
            block.forward_s = time.perf_counter() - started

    def save(self, storage: SavedStorage) -> None:
        """The forward saves a storage."""
        if self._current is None:
            self._outside[-1].append(storage)
        elif self._current.complete:
            self._current.save(storage)  # else it is an argument of a block that will be recomputed

    def _synchronize(self) -> None:
        if self._timed_on is not None:
            self._timed_on.fence().synchronize()
