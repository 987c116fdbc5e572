"""Captures the states for a checkpoint, and writes it, while training continues."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from pagoda.memory.arena import tensor_bytes
from pagoda.memory.page import PageRun
from pagoda.memory.region import Region
from pagoda.plan.tiers import HOST
from pagoda.runtime.buffer_pool import BufferPool
from pagoda.runtime.lanes import SSD_THREADS, Handle, Lane, wait_all
from pagoda.runtime.store import Store

_log = logging.getLogger("pagoda")


@dataclass(frozen=True, slots=True)
class CapturedPiece:
    """A piece of one parameter's state, as a checkpoint writes it."""

    unit: int
    state: str
    name: str
    """Name of the parameter."""
    start: int
    """Index of its first element in the parameter's state."""
    count: int
    at: int
    """Index of its first element in this rank's extent."""


@dataclass(eq=False, slots=True)
class _Reading:
    """A unit that is being read."""

    pieces: Iterator[CapturedPiece]
    """The pieces that no writer has taken yet."""
    runs: Mapping[str, PageRun]
    """State -> the run in which it is."""
    writing: int = 0
    """Number of pieces that writers are writing."""
    handle: Handle = field(default_factory=Handle)


class Capture:
    """The states of every unit after the last `step()`. Writers take them piece by piece.

    The scheduler says when a unit is read, and from which runs. No update changes these until `read`'s handle ends.
    States on SSD whose pages become part of the checkpoint have no pieces to write. `snapshot` gets their pages.

    `_lock` guards everything. Nobody finishes a handle while holding it, because the scheduler may then ask for the
    next unit.
    """

    def __init__(
        self,
        store: Store,
        pieces: Callable[[int], Iterator[CapturedPiece]],
        extents: Mapping[int, Mapping[str, PageRun]],
    ) -> None:
        """`pieces` makes the pieces of a unit to write, when a writer takes them. `extents`: unit -> state -> the run
        on SSD whose pages are kept: the one from which the unit is read."""
        self._store = store
        self._pieces = pieces
        self._extents = extents
        self.snapshot = store.ssd.snapshot() if store.ssd is not None and extents else None
        """The pages on SSD that the checkpoint keeps. Complete once `pieces` has ended."""
        # SSD may be full, because an earlier checkpoint keeps the room until this one replaces it.
        plan = store.plan
        full = store.ssd is not None and store.ssd.free_slots < plan.placement.changing_on_ssd
        self.one_version = [unit.index for unit in plan.units if self._has_one_version_on_ssd(unit.index, full)]
        """Units of which SSD has room for one version, because it is full, or some states are not kept as pages."""
        self._lock = threading.Condition()
        self._reading: list[_Reading] = []
        """Units that are being read, the first one at the front."""
        self._left = len(store.plan.units)
        """Number of units that have not been read completely."""
        self._over = False
        self._error: BaseException | None = None
        self._bounce = BufferPool([store.spare])
        """Buffer for a piece that cannot be written directly from its place."""

    # --- for the scheduler ---

    def read(self, unit: int, runs: Sequence[PageRun]) -> Handle:
        """Let writers take a unit's pieces from the runs of its states. The handle ends with the last piece or with the
        capture."""
        named = self._store.named(unit, runs)
        self._add_to_snapshot(unit, named)
        reading = _Reading(self._pieces(unit), named)
        with self._lock:
            over = self._over
            if not over:
                self._reading.append(reading)
                self._lock.notify_all()
        if over:
            reading.handle.finish(None)
        return reading.handle

    def end(self, error: BaseException | None = None) -> None:
        """End the capture. Updates no longer wait for it. Writers that ask for more pieces get `error`, if given."""
        with self._lock:
            self._over, self._error = True, self._error or error
            readings, self._reading = self._reading, []
            self._lock.notify_all()
        for reading in readings:
            reading.handle.finish(None)

    # --- for writers ---

    def pieces(self) -> Iterator[tuple[CapturedPiece, memoryview]]:
        """All pieces with their bytes. The bytes stay unchanged until the next piece is asked for.

        Several threads may iterate at once; each piece goes to one of them. The iteration stops early if `end` is
        called, and raises the error given there.
        """
        while (taken := self._take()) is not None:
            reading, piece = taken
            in_ram = self._store.tier(piece.unit, piece.state) == HOST
            with nullcontext() if in_ram else self._bounce.one() as landing:
                yield piece, self._bytes(reading, piece, landing)
            with self._lock:
                reading.writing -= 1
                self._lock.notify_all()

    def _take(self) -> tuple[_Reading, CapturedPiece] | None:
        """The next piece to write, once there is one. None if there are no more."""
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

    def _add_to_snapshot(self, unit: int, runs: Mapping[str, PageRun]) -> None:
        with self._lock:
            for state, run in () if self._over else self._extents.get(unit, {}).items():
                assert self.snapshot is not None
                assert run == runs[state], "nothing has moved since the checkpoint said which pages it keeps"
                self.snapshot.add(run)

    def _has_one_version_on_ssd(self, unit: int, full: bool) -> bool:
        states, kept = self._store.plan.layout.states, self._extents.get(unit, {})
        on_ssd = [state.name for state in states if self._store.run_on_ssd(unit, state.name) is not None]
        return any(full or state not in kept for state in on_ssd)

    def _bytes(self, reading: _Reading, piece: CapturedPiece, landing: Region | None) -> memoryview:
        store, run = self._store, reading.runs[piece.state]
        dtype, home = store.dtype(piece.unit, piece.state), store.tensor(piece.unit, piece.state, run)
        if home is None:
            assert landing is not None
            return store.read_into(landing.view(), dtype, run, piece.at, piece.count)
        source = home[piece.at : piece.at + piece.count]
        if landing is None:
            return tensor_bytes(source)
        into = landing.view(0, source.nbytes)
        store.copy_out(source, into)
        return into


class Saver:
    """A thread that writes checkpoints, with more threads for their pieces. An error is kept until someone asks, and is
    raised once, in every thread that waits for it. Thread-safe, except that only one thread at a time may `start`."""

    def __init__(self) -> None:
        self._lane = Lane("checkpoint")
        self._writers = Lane("checkpoint_pieces", SSD_THREADS)
        self._job: Handle | None = None
        self._lock = threading.Lock()

    @property
    def pending(self) -> bool:
        """Whether a checkpoint is being written."""
        job = self._job
        return job is not None and not job.done

    def start(self, work: Callable[[], None], on_error: Callable[[Exception], None] | None = None) -> None:
        """Write a checkpoint in the background. The previous one must have been waited for. `on_error` gets the error
        of the write, on its thread, in place of whoever waits."""
        assert self._job is None

        def write() -> None:
            try:
                work()
            except Exception as error:
                if on_error is None:
                    raise
                on_error(error)

        self._job = self._lane.submit(write)

    def divide(self, work: Callable[[], None]) -> None:
        """Do `work` on every writer thread and wait for all of them, as part of writing a checkpoint. Raises the first
        error."""
        wait_all([self._writers.submit(work) for _ in range(SSD_THREADS)])

    def wait(self) -> None:
        """Wait for the checkpoint that is being written, if there is one. Raises the error of the last checkpoint."""
        job = self._job
        if job is None:
            return
        try:
            job.wait()
        finally:
            with self._lock:
                if job.done and self._job is job:  # another thread may have started the next one
                    self._job = None

    def check(self) -> None:
        """Raises the error of a checkpoint that has failed since the last check."""
        if not self.pending:
            self.wait()

    def settle(self) -> None:
        """Wait until no state is read any more. Errors are left for `check`."""
        job = self._job
        if job is not None:
            job.wait_until_done()

    def close(self) -> None:
        """Finish the checkpoint that is being written, and join the threads. Raises its error."""
        self._lane.close()
        self._writers.close()
        self.wait()
