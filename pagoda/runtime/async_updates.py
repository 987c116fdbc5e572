"""Asynchronous updates: an updater that sweeps units as long as gradients wait, beside a forward that reads on.

The mechanism is Angel-PTM's lock-free update (Nie et al., "Angel-PTM: A Scalable and Economical Large-scale
Pre-training System in Tencent", VLDB 2023), with a bound on how far weights may lag.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from pagoda.plan.layout import WEIGHT, WEIGHT_BACK
from pagoda.runtime.gradients import UnitGradient
from pagoda.runtime.lanes import Handle
from pagoda.runtime.segments import Segment
from pagoda.runtime.store import Store
from pagoda.runtime.unit import LiveUnit
from pagoda.runtime.updates import BlockStream, Part, WeightPath, update_lane

_TO_BACK, _IN_BACK = WeightPath(WEIGHT, WEIGHT_BACK), WeightPath(WEIGHT_BACK, WEIGHT_BACK)


@dataclass
class _Progress:
    """How far the gradients of one unit have come, counted in steps. None is in two places."""

    unit: LiveUnit
    urgency: float = 0.0
    waiting: list[Part] = field(default_factory=list)
    """Queued, oldest first."""
    applying: int = 0
    """In the update under way."""
    applied: int = 0
    """In the back of the weights, not in the front."""
    writing: bool = False
    """From the start of an update until every state is home."""


class AsyncUpdater:
    """Takes the unit whose gradients have waited longest, applies all of them, and takes the next one.

    Gradients of several steps are not summed: each is applied as its own step of the rule, with the step number,
    hyperparameters and clip factor of its `step()`, one after another on each block while that is in RAM. So every
    gradient gives the update it would have given, and only the weights it was computed at are older.

    Weights are written to the back. `swap` makes it the front once whoever reads the front allows that. Until then
    the unit is left alone, except in a drain, which updates the back in place. `_lock`, the stream's, guards progress.
    """

    def __init__(self, store: Store, units: Sequence[LiveUnit], stream: BlockStream) -> None:
        self._store = store
        self._stream = stream
        self._lock = stream.lock
        self._progress = [_Progress(unit) for unit in units]
        self._wanted = -1
        """The unit that compute waits for: it comes first."""
        self._draining = False
        self._closed = False
        self._error: BaseException | None = None
        """The first error that nobody has been told of."""
        self._thread = threading.Thread(target=self._run, name="pagoda-updater", daemon=True)
        self._thread.start()

    def submit(self, record: UnitGradient, segments: Sequence[Segment], urgency: float) -> None:
        """Queue one step's gradient of a unit; `urgency` is when the next forward needs the unit."""
        with self._lock:
            progress = self._progress[record.unit.index]
            progress.urgency = urgency
            progress.waiting.append(Part(record, tuple(segments)))
            self._lock.notify_all()

    def lane(self, unit: LiveUnit) -> str:
        """The lane that whoever waits for a unit's update waits for."""
        return update_lane(self._store, unit.index)

    def staleness(self, unit: LiveUnit) -> int:
        """Steps whose gradients the front of a unit's weights would lack after a `swap`."""
        progress = self._progress[unit.index]
        with self._lock:
            return len(progress.waiting) + progress.applying

    def lag(self, unit: LiveUnit) -> int:
        """Steps whose gradients the front lacks now."""
        progress = self._progress[unit.index]
        with self._lock:
            return len(progress.waiting) + progress.applying + progress.applied

    def swap(self, unit: LiveUnit) -> bool:
        """Make the newest weights of a unit the front; False when they are already, or are being updated.

        The caller sees to it that nothing reads the front. Raises the first error of an update, once.
        """
        progress = self._progress[unit.index]
        with self._lock:
            self._raise_error()
            if not progress.applied or progress.applying:
                return False
            self._store.swap(unit.index)
            progress.applied = 0
            self._lock.notify_all()
            return True

    def wait(self, unit: LiveUnit, at_most: int) -> None:
        """Wait until a `swap` leaves a unit no more than `at_most` steps behind; raises the first error, once."""
        progress = self._progress[unit.index]
        with self._lock:
            self._wanted = unit.index
            while self._error is None and len(progress.waiting) + progress.applying > at_most:
                if progress.applied and not progress.applying:
                    break  # the caller must swap before the next update can begin
                self._lock.wait()
            self._wanted = -1
            self._raise_error()

    def drain(self) -> None:
        """Wait until every gradient is applied and every state home; raises the first error, once."""
        with self._lock:
            self._draining = True
            self._lock.notify_all()
            try:
                while any(p.waiting or p.writing for p in self._progress):
                    self._lock.wait()
            finally:
                self._draining = False
            self._raise_error()

    def close(self) -> None:
        """Finish what is queued and join the thread."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            self._update(*taken)

    def _take(self) -> tuple[_Progress, list[Part], WeightPath] | None:
        """All that waits of the unit to be updated next; None once closed and nothing is left."""
        with self._lock:
            while True:
                ready = [p for p in self._progress if self._may_start(p)]
                if ready:
                    break
                if self._closed and not any(p.waiting for p in self._progress):
                    return None
                self._lock.wait()
            chosen = min(ready, key=lambda p: (p.unit.index != self._wanted, -len(p.waiting), p.urgency))
            parts, chosen.waiting = chosen.waiting, []
            chosen.applying = len(parts)
            chosen.writing = True
            return chosen, parts, _IN_BACK if chosen.applied else _TO_BACK

    def _may_start(self, progress: _Progress) -> bool:
        if not progress.waiting or progress.writing:
            return False
        return not progress.applied or self._draining or self._closed

    def _update(self, progress: _Progress, parts: list[Part], path: WeightPath) -> None:
        unit = progress.unit

        def published(error: BaseException | None) -> None:
            with self._lock:
                self._error = self._error or error
                if error is None:
                    progress.applied += progress.applying
                    self._store.newest[unit.index] = WEIGHT_BACK
                progress.applying = 0
                self._lock.notify_all()

        def written(error: BaseException | None) -> None:
            with self._lock:
                self._error = self._error or error
                progress.writing = False
                self._lock.notify_all()
            self._stream.damage.note(error)

        handles = Handle(self.lane(unit)), Handle("ssd_write")
        handles[0].then(published)
        handles[1].then(written)
        try:
            self._stream.feed(unit, parts, *handles, path)
        except BaseException as error:
            for part in parts:
                self._stream.finished(part.record)
            for handle in handles:
                handle.finish(error)

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
