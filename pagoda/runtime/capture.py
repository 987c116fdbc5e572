"""Capturing a checkpoint's states while training goes on."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

from pagoda.memory.arena import tensor_bytes
from pagoda.memory.page import Run
from pagoda.memory.region import Region
from pagoda.runtime.lanes import Handle
from pagoda.runtime.ring import Ring
from pagoda.runtime.store import Store


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of one parameter's state, as a checkpoint writes it."""

    unit: int
    state: str
    name: str
    """The parameter's."""
    start: int
    """Elements of the parameter's state before it."""
    count: int
    at: int
    """Where it lies in this rank's extent, in elements."""


@dataclass(eq=False, slots=True)
class _Reading:
    """One unit that is being read."""

    pieces: Iterator[Piece]
    """Those that no writer has taken."""
    kept: Run | None
    """Where the reserve has its states, if they are no longer in their home."""
    writing: int = 0
    """Pieces in the hands of writers."""
    handle: Handle = field(default_factory=Handle)


class Capture:
    """The states of every unit after the last `step()`, which writers take piece by piece.

    The scheduler says when a unit is read and where: in its home, which no update changes until `read`'s handle ends,
    or in the reserve, where `keep` has copied it. States on SSD whose pages the checkpoint keeps have no pieces to
    write: their pages are added to `frozen`.

    `_lock` guards all of it. Nobody finishes a handle while holding it: the scheduler may ask for the next unit then.
    """

    def __init__(
        self, store: Store, pieces: Callable[[int], Iterable[Piece]], extents: Mapping[int, Mapping[str, Run]]
    ) -> None:
        """`pieces` gives what of a unit is written. `extents`: unit -> state -> the run on SSD whose pages are kept."""
        self._store = store
        self._pieces = pieces
        self._extents = extents
        self.frozen = store.ssd.snapshot() if store.ssd is not None and extents else None
        """The pages on SSD that the checkpoint keeps: of all units once `pieces` has ended."""
        self.in_place = [unit.index for unit in store.plan.units if self._has_others_on_ssd(unit.index)]
        """Units whose old states cannot be kept: some are on SSD and not kept as pages."""
        self._lock = threading.Condition()
        self._reading: list[_Reading] = []
        """Units that are being read, the first at the front."""
        self._left = len(store.plan.units)
        """Units that have not been read to their end."""
        self._over = False
        self._error: BaseException | None = None
        piece, spare = store.plan.layout.piece_pages, store.spare
        self._bounce = Ring([spare.part(Run(0, piece))])
        """For a piece that cannot be written from where it lies."""
        self._reserve = spare.part(Run(piece, spare.count - piece))

    # --- for updates and the scheduler ---

    def keep(self, unit: int, kept: Run) -> None:
        """An update is about to change a unit: copy its states in memory to pages `kept` of the reserve."""
        self._freeze(unit)
        if self._over:
            return
        store = self._store
        for state, window in self._windows(unit, kept).items():
            store.copy_out(
                unit, store.newest_extent(unit, state), 0, len(window) // store.dtype(state).itemsize, window
            )

    def read(self, unit: int, kept: Run | None) -> Handle:
        """Have writers take a unit's pieces, from its home or from where they were kept. The handle ends with the last
        one, or when all is over."""
        if kept is None:
            self._freeze(unit)
        reading = _Reading(self._of(unit), kept)
        with self._lock:
            over = self._over
            if not over:
                self._reading.append(reading)
                self._lock.notify_all()
        if over:
            reading.handle.finish(None)
        return reading.handle

    def end(self, error: BaseException | None = None) -> None:
        """Nothing more is captured, and no update waits. Writers that come for more get `error`, if there is one."""
        with self._lock:
            self._over, self._error = True, self._error or error
            readings, self._reading = self._reading, []
            self._lock.notify_all()
        for reading in readings:
            reading.handle.finish(None)

    # --- for writers ---

    def pieces(self) -> Iterator[tuple[Piece, memoryview]]:
        """Every piece once, with its bytes, which stay as they are until the next one is asked for.

        Several threads may each ask for pieces of their own; those of all are every piece. It ends early where another
        has called `end`, and raises the error that was given there.
        """
        while (taken := self._take()) is not None:
            reading, piece = taken
            with self._bounce.one() if self._is_bounced(reading, piece) else nullcontext() as landing:
                yield piece, self._bytes(reading, piece, landing)
            with self._lock:
                reading.writing -= 1
                self._lock.notify_all()

    def _take(self) -> tuple[_Reading, Piece] | None:
        """The next piece to write, once there is one; None when there are no more."""
        while True:
            ended = None
            with self._lock:
                if self._error is not None:
                    raise self._error
                if self._over or not self._left:
                    return None
                for reading in self._reading:
                    piece = next(reading.pieces, None)
                    if piece is not None:
                        reading.writing += 1
                        return reading, piece
                    if not reading.writing:
                        ended = reading
                        break
                if ended is None:
                    self._lock.wait()
                else:
                    self._reading.remove(ended)
                    self._left -= 1
                    self._lock.notify_all()
            if ended is not None:
                ended.handle.finish(None)

    # --- parts ---

    def _of(self, unit: int) -> Iterator[Piece]:
        """A unit's pieces, which a writer looks up when it takes the first one."""
        yield from self._pieces(unit)

    def _freeze(self, unit: int) -> None:
        with self._lock:
            for run in () if self._over else self._extents.get(unit, {}).values():
                assert self.frozen is not None
                self.frozen.add(run)

    def _has_others_on_ssd(self, unit: int) -> bool:
        states, kept = self._store.plan.layout.states, self._extents.get(unit, {})
        return any(self._store.run(unit, state.name) is not None and state.name not in kept for state in states)

    def _windows(self, unit: int, kept: Run) -> dict[str, memoryview]:
        """Where the reserve has each state of a unit."""
        plan, windows, at = self._store.plan, {}, kept.start
        for state, pages in plan.pages_in_memory(plan.units[unit]).items():
            windows[state] = self._reserve.part(Run(at, pages)).view()
            at += pages
        return windows

    def _is_bounced(self, reading: _Reading, piece: Piece) -> bool:
        """Whether a piece can only be written after it has been copied to RAM."""
        store = self._store
        on_ssd = store.tensor(piece.unit, piece.state) is None
        return reading.kept is None and (on_ssd or store.lives_on_device(piece.unit, piece.state))

    def _bytes(self, reading: _Reading, piece: Piece, landing: Region | None) -> memoryview:
        store, size = self._store, self._store.dtype(piece.state).itemsize
        if reading.kept is not None:
            window = self._windows(piece.unit, reading.kept)[piece.state]
            return window[piece.at * size : (piece.at + piece.count) * size]
        extent = store.newest_extent(piece.unit, piece.state)
        home = store.tensor(piece.unit, extent)
        if home is None:
            assert landing is not None
            return store.read_into(landing.view(), piece.unit, extent, piece.at, piece.count)
        if landing is None:
            return tensor_bytes(home[piece.at : piece.at + piece.count])
        into = landing.view(0, piece.count * size)
        store.copy_out(piece.unit, extent, piece.at, piece.count, into)
        return into
