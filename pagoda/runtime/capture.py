"""Capturing a checkpoint's states while training goes on: copy-on-write between the updater and the writer."""

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

from pagoda.memory.arena import tensor_bytes
from pagoda.memory.page import Run
from pagoda.memory.pool import PagePool
from pagoda.runtime.lanes import Handle
from pagoda.runtime.store import Store


@dataclass(eq=False, slots=True)
class Piece:
    """A piece of one parameter's state: elements [first, first + count) of its unit's state."""

    unit: int
    state: str
    name: str
    """The parameter's."""
    start: int
    """Elements of the parameter's state before it."""
    first: int
    count: int
    at: int
    """Where it lies in this rank's extent."""
    changed: int
    until: int
    """It changes with elements [changed, until) of the unit."""
    copy: Run | None = None
    """Frames with the captured values, where an update has come before the writer."""
    written: bool = False

    def overlaps(self, start: int, stop: int) -> bool:
        """Whether an update of the unit's elements [start, stop) may change it."""
        return self.changed < stop and start < self.until


class Capture:
    """The states of every unit after the last update that was queued when the capture was made.

    A unit's turn comes when that update has been written home; until its next one, its pieces can be read where they
    live. Writers take them in the order in which their next updates are expected, so that they stay ahead of those as
    long as the drive takes all states in the time of a step. The updater calls `before_update` before it touches a
    block: pieces not written by then are copied to spare frames, as far as these go, and the update waits while the
    others are written before anything else. Pieces on SSD are never copied. Extents that stay on SSD have no pieces:
    they are added to `frozen` when their unit's turn comes.

    `_lock` guards all of it. Every piece is in one place: with the originals, among the urgent ones, among the copies,
    or in the hands of the updater (being copied) or of a writer.
    """

    def __init__(
        self,
        store: Store,
        pieces: Iterable[Piece],
        pending: Mapping[int, Handle],
        extents: Mapping[int, list[Run]],
    ) -> None:
        """`pieces` in the order of their units' next updates. `pending`: the handles of updates that the capture has.

        `extents`: unit -> runs on SSD that are to be kept there.
        """
        self._store = store
        self._pending = pending
        self.frozen = store.ssd.begin_freeze() if store.ssd is not None and extents else None
        """The pages on SSD, of all units once `pieces` has ended."""
        self._extents = dict(extents)
        self._lock = threading.Condition()
        by_unit: dict[int, list[Piece]] = {}
        for piece in pieces:
            by_unit.setdefault(piece.unit, []).append(piece)
        self._originals = {unit: deque(sorted(of, key=lambda piece: piece.changed)) for unit, of in by_unit.items()}
        self._urgent: deque[Piece] = deque()
        self._copies: deque[Piece] = deque()
        self._writing: list[Piece] = []
        self._left = sum(map(len, self._originals.values()))
        self._ready: set[int] = set()
        """Units whose states are those to capture."""
        self._error: BaseException | None = None
        self._over = False
        frames = store.spare
        self._spare = PagePool(frames.count, frames.start)
        bounced = any(self._bounced(piece) for unit in self._originals.values() for piece in unit)
        self._bounce = self._spare.alloc(store.plan.layout.piece_pages) if bounced else None
        self._bouncing = threading.Lock()
        """Held by the writer that uses `_bounce`."""
        for unit in {*self._originals, *self._extents} - pending.keys():
            self._turn_to(unit)
        for unit, handle in pending.items():
            handle.then(lambda error, unit=unit: self._updated(unit, error))  # type: ignore[misc]

    def before_update(self, unit: int, update: Handle, start: int, stop: int) -> None:
        """Elements [start, stop) of a unit are about to change: capture them first. Called by the updater."""
        if self._over or self._pending.get(unit) is update:
            return
        with self._lock:
            self._turn_to(unit)
            touched = [piece for piece in self._originals.get(unit, ()) if piece.overlaps(start, stop)]
            if touched:
                self._originals[unit] = deque(p for p in self._originals[unit] if not p.overlaps(start, stop))
            for piece in touched:
                piece.copy = None if self._on_ssd(piece) else self._spare.alloc(self._pages(piece))
            copied = [piece for piece in touched if piece.copy is not None]
            awaited = [piece for piece in touched if piece.copy is None]
            self._urgent.extend(awaited)
            self._lock.notify_all()
        for piece in copied:
            self._copy(piece)
        with self._lock:
            self._copies.extend(copied)
            self._lock.notify_all()
            awaited += [p for p in self._writing if p.copy is None and p.unit == unit and p.overlaps(start, stop)]
            self._lock.wait_for(lambda: self._over or all(piece.written for piece in awaited))

    def pieces(self) -> Iterator[tuple[Piece, memoryview]]:
        """Every piece once, with its bytes, which stay as they are until the next one is asked for.

        Several threads may each ask for pieces of their own; those of all are every piece. It ends early where another
        has called `end`. Raises the error of an update whose result belongs to the capture.
        """
        while (piece := self._take()) is not None:
            with self._bouncing if piece.copy is None and self._bounced(piece) else nullcontext():
                yield piece, self._bytes(piece)
            with self._lock:
                if piece.copy is not None:
                    self._spare.free(piece.copy)
                piece.written = True
                self._writing.remove(piece)
                self._left -= 1
                self._lock.notify_all()

    def end(self) -> None:
        """Nothing more is captured; no update waits."""
        with self._lock:
            self._over = True
            self._lock.notify_all()

    def _updated(self, unit: int, error: BaseException | None) -> None:
        with self._lock:
            self._error = self._error or error
            if not self._over:
                self._turn_to(unit)
            self._lock.notify_all()

    def _turn_to(self, unit: int) -> None:
        """The states of a unit are those to capture."""
        self._ready.add(unit)
        for run in self._extents.pop(unit, ()):
            assert self.frozen is not None
            self.frozen.add(run)

    def _take(self) -> Piece | None:
        """The next piece to write, once there is one; None when every piece is written and every extent frozen, or all
        is over."""
        with self._lock:
            while True:
                if self._error is not None:
                    raise self._error
                if self._over or not (self._left or self._extents):
                    return None
                if (piece := self._next()) is not None:
                    self._writing.append(piece)
                    return piece
                self._lock.wait()

    def _next(self) -> Piece | None:
        if self._urgent:
            return self._urgent.popleft()
        for unit, pieces in self._originals.items():
            if pieces and unit in self._ready:
                return pieces.popleft()
        return self._copies.popleft() if self._copies else None

    def _bytes(self, piece: Piece) -> memoryview:
        store = self._store
        if piece.copy is not None:
            return store.host.arena.view(piece.copy.start * store.plan.page_bytes, self._nbytes(piece))
        home = store.tensor(piece.unit, self._extent(piece))
        if home is not None and not self._bounced(piece):
            return tensor_bytes(home[piece.at : piece.at + piece.count])
        assert self._bounce is not None, "there are pieces elsewhere than in RAM"
        window = store.host.arena.view(
            self._bounce.start * store.plan.page_bytes, self._bounce.count * store.plan.page_bytes
        )
        if home is not None:
            into = window[: self._nbytes(piece)]
            store.copy_out(piece.unit, self._extent(piece), piece.at, piece.count, into)
            return into
        return store.read_into(window, piece.unit, self._extent(piece), piece.at, piece.count)

    def _copy(self, piece: Piece) -> None:
        store = self._store
        assert piece.copy is not None
        into = store.host.arena.view(piece.copy.start * store.plan.page_bytes, self._nbytes(piece))
        store.copy_out(piece.unit, self._extent(piece), piece.at, piece.count, into)

    def _extent(self, piece: Piece) -> str:
        return self._store.newest_extent(piece.unit, piece.state)

    def _on_ssd(self, piece: Piece) -> bool:
        return self._store.tensor(piece.unit, self._extent(piece)) is None

    def _bounced(self, piece: Piece) -> bool:
        """Whether it can only be written after it has been copied to RAM."""
        return self._on_ssd(piece) or piece.unit in self._store.plan.placement.resident

    def _nbytes(self, piece: Piece) -> int:
        return piece.count * self._store.dtype(piece.state).itemsize

    def _pages(self, piece: Piece) -> int:
        return -(-self._nbytes(piece) // self._store.plan.page_bytes)
