"""What a unit's states were before an update that may have to be undone."""

import ctypes
from collections.abc import Mapping

from pagoda.memory.ssd.tier import PageSnapshot
from pagoda.plan.layout import before
from pagoda.runtime.lanes import Handle
from pagoda.runtime.store import Store


class Undo:
    """Keeps the old states of one unit beside the new ones, until `close` or `revert`, once the update has ended.

    States on SSD keep their pages, while the update writes to others. What is in RAM is copied, block by block, just
    before it changes. `begin` and `save` are the update's, on its threads.
    """

    def __init__(self, store: Store, unit: int) -> None:
        self._store = store
        self._unit = unit
        self.over = Handle()
        """Ends when the unit has its old states back, or when they are given up."""
        self._frozen: PageSnapshot | None = None
        """The pages of states on SSD as they were."""
        self._saved: list[tuple[str, range]] = []
        """State, and which elements of its extent have been copied."""

    def begin(self) -> None:
        """The update is about to begin: nothing of the unit is being stored."""
        runs = [self._store.run(self._unit, state.name) for state in self._store.plan.layout.states]
        if self._store.ssd is not None and any(runs):
            self._frozen = self._store.ssd.snapshot(awaited=False)
            for run in filter(None, runs):
                self._frozen.add(run)

    def save(self, changing: Mapping[str, range]) -> None:
        """These elements of the unit's extents, by state, are about to change."""
        for state, elements in changing.items():
            if self._store.tensor(self._unit, state) is not None:
                self._copy(state, before(state), elements)
                self._saved.append((state, elements))

    def close(self, _: BaseException | None) -> None:
        """The update stands: give the old pages up."""
        if self._frozen is not None:
            self._frozen.close()
        self.over.finish()

    def revert(self) -> None:
        """Have the old states back."""
        if self._frozen is not None:
            self._frozen.restore()
        for state, elements in self._saved:
            self._copy(before(state), state, elements)

    def _copy(self, source: str, target: str, elements: range) -> None:
        """One plain memcpy, without the GIL."""
        read, write = self._store.tensor(self._unit, source), self._store.tensor(self._unit, target)
        assert read is not None
        assert write is not None
        size = read.element_size()
        at = elements.start * size
        ctypes.memmove(write.data_ptr() + at, read.data_ptr() + at, len(elements) * size)
