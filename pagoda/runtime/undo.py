"""What a unit's states were before an update that may have to be undone."""

import ctypes
import threading
from collections.abc import Mapping

from pagoda.memory.ssd.tier import PageSnapshot
from pagoda.plan.layout import before
from pagoda.runtime.store import Store


class Undo:
    """Keeps the old states of one unit beside the new ones, until `keep` or `revert`, one of which is called once.

    States on SSD keep their pages, while the update writes to others. What is in RAM is copied, block by block, just
    before it changes. `begin`, `save` and `ended` are the update's, on its threads; `_lock` guards how
    far it has come.
    """

    def __init__(self, store: Store, unit: int) -> None:
        self._store = store
        self._unit = unit
        self._lock = threading.Lock()
        self._frozen: PageSnapshot | None = None
        """The pages of states on SSD as they were."""
        self._saved: list[tuple[str, range]] = []
        """State, and which elements of its extent have been copied."""
        self._over = False
        """True once the update has ended."""
        self._kept = False

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

    def ended(self, _: BaseException | None) -> None:
        """The update has ended, however it did."""
        with self._lock:
            self._over = True
            self._let_go()

    def keep(self) -> None:
        """The update stands: old pages are free as soon as it has ended, before its unit's next one begins."""
        with self._lock:
            self._kept = True
            self._let_go()

    def revert(self) -> None:
        """Have the old states back; the update has ended."""
        if self._frozen is not None:
            self._frozen.restore()
        for state, elements in self._saved:
            self._copy(before(state), state, elements)

    def _let_go(self) -> None:
        if self._over and self._kept and self._frozen is not None:
            self._frozen.close()

    def _copy(self, source: str, target: str, elements: range) -> None:
        """One plain memcpy, without the GIL."""
        read, write = self._store.tensor(self._unit, source), self._store.tensor(self._unit, target)
        assert read is not None
        assert write is not None
        size = read.element_size()
        at = elements.start * size
        ctypes.memmove(write.data_ptr() + at, read.data_ptr() + at, len(elements) * size)
