"""What a unit's states were before an update that may have to be undone."""

import ctypes
import threading

from pagoda.memory.frozen import Fork
from pagoda.plan.layout import WEIGHT
from pagoda.plan.placement import UNDO
from pagoda.runtime.store import Store


class Undo:
    """Keeps the old states of one unit beside the new ones, until `keep` or `revert`, one of which is called once.

    States on SSD keep their pages, while the update writes to others. Weights in RAM are copied, block by block, just
    before they change. `begin`, `save` and `ended` are the update's, on its threads; `_lock` guards the forks.
    """

    def __init__(self, store: Store, unit: int) -> None:
        self._store = store
        self._unit = unit
        self._lock = threading.Lock()
        self._forks: list[Fork] = []
        self._saved: list[tuple[int, int]] = []
        """Elements [start, stop) of the weights that have been copied."""
        self._over = False
        """True once the update has ended."""
        self._kept = False

    def begin(self) -> None:
        """The update is about to begin: nothing of the unit is being stored."""
        ssd = self._store.ssd
        assert ssd is not None, "states of a unit whose update may be undone are on SSD"
        for state in self._store.plan.layout.states:
            run = self._store.run(self._unit, state.name)
            if run is not None:
                self._forks.append(ssd.fork(run))

    def save(self, start: int, stop: int) -> None:
        """Elements [start, stop) of the weights are about to change."""
        copy = self._store.tensor(self._unit, UNDO)
        if copy is not None:
            self._copy(WEIGHT, UNDO, start, stop)
            self._saved.append((start, stop))

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
        for fork in self._forks:
            fork.undo()
        for start, stop in self._saved:
            self._copy(UNDO, WEIGHT, start, stop)

    def _let_go(self) -> None:
        if self._over and self._kept:
            for fork in self._forks:
                fork.keep()

    def _copy(self, source: str, target: str, start: int, stop: int) -> None:
        """One plain memcpy, without the GIL."""
        read, write = self._store.tensor(self._unit, source), self._store.tensor(self._unit, target)
        assert read is not None
        assert write is not None
        size = read.element_size()
        ctypes.memmove(write.data_ptr() + start * size, read.data_ptr() + start * size, (stop - start) * size)
