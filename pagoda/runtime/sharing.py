"""Sharing: brings the slices of weights that ranks have updated to every rank's copy on SSD."""

from collections.abc import Sequence
from functools import partial

from pagoda.memory.page import pages_for
from pagoda.plan.layout import WEIGHT
from pagoda.plan.ops import HOST
from pagoda.plan.placement import SERVING
from pagoda.runtime.lanes import Lane, wait_all
from pagoda.runtime.store import Store
from pagoda.runtime.unit import LiveUnit

_PIECE_BYTES = 8 << 20
"""Bytes that a thread of a lane reads or writes at a time."""


class SharedWeights:
    """RAM for the trained weights of one unit at a time, as whole pages of its extent; for one thread."""

    def __init__(self, store: Store, lanes: dict[str, Lane]) -> None:
        self._store = store
        self._lanes = lanes
        self._page = store.plan.page_bytes
        self._itemsize = store.dtype(WEIGHT).itemsize
        self._room = store.host.take(store.plan.placement.pages(HOST, SERVING))
        self.weights = self._room.tensor(store.dtype(WEIGHT))
        """A unit's weights from its first element; undefined between two units."""

    def read_own(self, unit: LiveUnit, extent: str) -> None:
        """Read this rank's updated slice of a unit. The other slices are still to come."""
        self._room.poison()
        own, pages = self._store.shards.updated(unit.spec), self._pages(unit)
        reads = []
        if len(own):
            reads.append(
                range(own.start * self._itemsize // self._page, pages_for(own.stop * self._itemsize, self._page))
            )
        if unit.spec.trainable_numel < unit.spec.numel and pages and not any(pages - 1 in each for each in reads):
            reads.append(range(pages - 1, pages))  # it may also have frozen weights, which others do not send
        self._move("ssd_read", unit, extent, reads)

    def write_others(self, unit: LiveUnit, extent: str) -> None:
        """Write the pages that hold parts of the other ranks' slices."""
        own = self._store.shards.updated(unit.spec)
        begin = pages_for(own.start * self._itemsize, self._page)
        end = max(begin, own.stop * self._itemsize // self._page)
        self._move("ssd_write", unit, extent, [range(begin), range(end, self._pages(unit))])

    def _pages(self, unit: LiveUnit) -> int:
        return self._store.plan.layout.trained_weight_pages(unit.spec)

    def _move(self, lane: str, unit: LiveUnit, extent: str, pages: Sequence[range]) -> None:
        """Read or write pages of an extent, and wait for that."""
        run, ssd = self._store.run(unit.index, extent), self._store.ssd
        assert run is not None
        assert ssd is not None
        move, step, moves = ssd.load if lane == "ssd_read" else ssd.store, max(1, _PIECE_BYTES // self._page), []
        for each in pages:
            for first in each[::step]:
                at, nbytes = first * self._page, min(step, each.stop - first) * self._page
                work = partial(move, run, at, self._room.view(at, nbytes))
                moves.append(self._lanes[lane].submit(work, (), nbytes, f"share {unit.spec.name}"))
        wait_all(moves)
