"""The feeder: the thread that submits the blocks of updates to their path."""

import threading
from collections.abc import Callable, Sequence
from functools import partial

from pagoda.errors import UsageError
from pagoda.plan.layout import WEIGHT
from pagoda.runtime.gradients import UnitGradient, non_finite_error
from pagoda.runtime.lanes import Handle, Lane, all_of, wait_all
from pagoda.runtime.next_update import Segment
from pagoda.runtime.store import Store
from pagoda.runtime.streams import IN_PLACE, Block, Update, UpdatePath


class Feeder:
    """The thread that feeds updates to a path, in the order in which the scheduler issues them. The submitting thread
    feeds small updates itself, so they may overtake others."""

    def __init__(self, store: Store, path: UpdatePath) -> None:
        self.path = path
        self.refused: BaseException | None = None
        """The error with which every update that has not begun fails, if any."""
        self._store = store
        self._lock = threading.Lock()
        self._closed = False
        self._thread = Lane("feeder")
        path.more = lambda: self._later(path.read_more)

    def submit(self, update: Update) -> None:
        """Feed an update to the path, after the ones before it. Its handles end when it has ended, with or without an
        error.

        A small update in RAM is fed at once, because handing it to another thread would take as long.
        """
        if update.kept is None and self.path.is_small(update.unit.spec):
            self._feed(update)
            return
        if self._later(partial(self._feed, update)) is None:  # one that came of what was under way then
            update.finish(self.refused or UsageError("The optimizer is closed."))

    def read_ahead(self, unit: int) -> None:
        """After the submitted updates, this unit will probably be updated next."""
        self._later(partial(self.path.read_ahead, unit))

    def drop_ahead(self) -> None:
        """Wait until nothing is being read ahead."""
        reads: list[Handle] = []
        dropped = self._later(lambda: reads.extend(self.path.drop_ahead()))
        if dropped is not None:
            dropped.wait()
            wait_all(reads)

    def _later(self, work: Callable[[], None]) -> Handle | None:
        """Do work on this thread after everything submitted before. Returns None if the feeder is closed."""
        with self._lock:
            return None if self._closed else self._thread.submit(work)

    def close(self) -> None:
        """Finish the queued updates and join the thread."""
        with self._lock:
            self._closed = True
        self._thread.close()

    def _feed(self, update: Update) -> None:
        try:
            for record, _ in update.parts:
                if (bad := record.non_finite()) is not None:
                    raise non_finite_error(record.unit.name(bad[1]))
            self.feed(update)
        except BaseException as error:
            update.finish(error)

    def feed(self, update: Update) -> None:
        """Submit every block of one unit's update to the lanes.

        Raises only before the first block. A later error ends the update's handles once the submitted blocks have
        ended.
        """
        if self.refused is not None:
            raise self.refused
        unit = update.unit
        if update.kept is not None:
            update.kept.wait()
        if update.undo is not None:
            update.undo.begin()
        self.path.begin(unit.index)
        origin = self._store.shards.updated(unit.spec).start
        computed: list[Handle] = []
        written: list[Handle] = []
        for start, stop in self.path.cuts(unit.spec):
            pieces = _within(update.parts, origin + start, origin + stop)
            if not pieces and update.weights == IN_PLACE:
                continue
            try:
                self.path.submit(Block(update, start, stop, pieces), computed, written)
            except BaseException as error:
                computed.append(Handle())
                computed[-1].finish(error)
                break
        self.path.end(unit.index)
        all_computed, all_written = all_of(computed), all_of([*computed, *written])
        all_computed.then(lambda _: update.used())
        weights_on_ssd = self._store.run(unit.index, WEIGHT) is not None
        (all_written if weights_on_ssd else all_computed).then(update.updated.finish)
        all_written.then(update.written.finish)


def _within(
    parts: Sequence[tuple[UnitGradient, Sequence[Segment]]], first: int, last: int
) -> list[tuple[UnitGradient, Segment]]:
    """What of the parts of an update lies in elements [first, last) of its unit."""
    return [
        (record, segment.within(first, last))
        for record, segments in parts
        for segment in segments
        if segment.start < last and segment.stop > first
    ]
