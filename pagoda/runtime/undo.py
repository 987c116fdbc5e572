"""The old states of a unit, kept for an update that may have to be undone."""

import ctypes
from collections.abc import Mapping

from pagoda.memory.ssd.tier import PageSnapshot
from pagoda.plan.layout import before
from pagoda.runtime.lanes import Handle
from pagoda.runtime.store import Store


class Undo:
    """Keeps the old states of one unit next to the new ones until the update has ended and `close` or `revert` is
    called.

    States on SSD keep their old pages, while the update writes to other pages. States in RAM are copied, block by
    block, just before they change. The update calls `begin` and `save` on its threads.
    """

    def __init__(self, store: Store, unit: int) -> None:
        self._store = store
        self._unit = unit
        self.over = Handle()
        """Ends when the unit has its old states back, or when they are given up."""
        self._frozen: PageSnapshot | None = None
        """The old pages of states on SSD."""
        self._saved: list[tuple[str, range]] = []
        """Each copied part: the state, and the elements of its extent."""

    def begin(self) -> None:
        """The update is about to begin. No state of the unit is being stored."""
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
        """Keep the update and give up the old states."""
        if self._frozen is not None:
            self._frozen.close()
        self.over.finish()

    def revert(self) -> None:
        """Restore the old states."""
        if self._frozen is not None:
            self._frozen.restore()
        for state, elements in self._saved:
            self._copy(before(state), state, elements)

    def _copy(self, source: str, target: str, elements: range) -> None:
        """One memcpy, without the GIL."""
        read, write = self._store.tensor(self._unit, source), self._store.tensor(self._unit, target)
        assert read is not None
        assert write is not None
        size = read.element_size()
        at = elements.start * size
        ctypes.memmove(write.data_ptr() + at, read.data_ptr() + at, len(elements) * size)
