"""Measures the SSD: streams through a page file, with the runtime's lanes, transfer sizes and hashes."""

import shutil
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import torch

from pagoda.calibrate.meter import Meter, cpu_cores
from pagoda.errors import StorageError
from pagoda.memory.arena import Arena
from pagoda.memory.sizes import format_bytes
from pagoda.memory.ssd.hashes import hashes_of
from pagoda.memory.ssd.page_file import PageFile
from pagoda.plan.lanes import LARGE_TRANSFER_BYTES, LaneName
from pagoda.runtime.lanes import SSD_THREADS, Lane, wait_all
from pagoda.simulate.hardware import Drive, Figure, SmallTransfers
from pagoda.simulate.machines import rated_endurance

_SMALL_BYTES = 128 << 10
"""Size of a small transfer: a block of moments if RAM or the model is small."""
_HASHED_BYTES = 128 << 10
"""Page size for hashing. It is no larger than a small transfer; the cost of hashing hardly depends on it."""
_FILL_S = 5.0
_WARM_S = 0.1
_ROUNDS = 3
_LEAST_PIECES = 16
"""A window lasts at least until this many pieces have moved."""
_LEAD = 4
"""How many pieces reading or writing may be ahead of the other, as blocks in a ring are."""
_TURNS = 4
_MATMUL_SIZE = 1024

_Samples = defaultdict[str, list[float]]
"""Kind of measurement -> samples, for transfers of one size."""


def check_directory(directory: Path, nbytes: int) -> None:
    """Raises StorageError unless `directory` exists and has `nbytes` free."""
    if not directory.is_dir():
        raise StorageError(f"SSD directory {directory} does not exist: create it (mkdir -p) or name another in --ssd")
    free = shutil.disk_usage(directory).free
    if free < nbytes:
        raise StorageError(
            f"SSD directory {directory} has {format_bytes(free)} free, and measuring it takes {format_bytes(nbytes)}:"
            " free some space or name a directory on another disk in --ssd"
        )


def measure_drive(meter: Meter, directory: Path) -> Drive:
    """All figures of the drive that holds `directory`. No file is left there, even if this fails.

    Raises StorageError if the directory cannot be used, has too little space, or the drive fails.
    """
    check_directory(directory, meter.effort.file_bytes)
    with ExitStack() as stack:
        pieces = meter.effort.file_bytes // LARGE_TRANSFER_BYTES
        file = stack.enter_context(closing(PageFile(directory, pieces, LARGE_TRANSFER_BYTES)))
        meter.report(f"a file of {format_bytes(file.nbytes)} on the SSD")
        reading, writing = (
            stack.enter_context(closing(_Stream(lane, partial(move, file), pieces)))
            for lane, move in ((LaneName.SSD_READ, _read), (LaneName.SSD_WRITE, _write))
        )
        # A block that was never written would not be read from the drive. On a slow drive, only the written blocks are
        # read.
        half = _fill(writing) // 2
        reading.lies_at(0, half)
        writing.lies_at(half, half)
        samples = {nbytes: _Samples(list) for nbytes in (LARGE_TRANSFER_BYTES, _SMALL_BYTES)}
        for round_ in range(_ROUNDS):
            for nbytes, sampled in samples.items():
                meter.report(f"SSD reads and writes of {format_bytes(nbytes)}, {round_ + 1} of {_ROUNDS}")
                reading.nbytes = writing.nbytes = nbytes
                _sample(sampled, meter.effort.figure_s, reading, writing)
    cached = "" if file.direct else f"; through the page cache, as {file.fallback_reason}"
    large, small = (
        _figures(sampled, meter, f"{SSD_THREADS} threads each way, {format_bytes(nbytes)} a transfer{cached}")
        for nbytes, sampled in samples.items()
    )
    capacity = meter.reading(shutil.disk_usage(directory).total, f"all of the file system that holds {directory}")
    return Drive(
        capacity_bytes=capacity,
        endurance_bytes=rated_endurance(capacity.value),
        small=SmallTransfers(_SMALL_BYTES, **small),
        **large,
    )


def _read(file: PageFile, piece: int, into: memoryview) -> None:
    """Read as the runtime does, including the check of each page's hash."""
    file.pread(piece, into)
    hashes_of(into, _HASHED_BYTES)


def _write(file: PageFile, piece: int, data: memoryview) -> None:
    hashes_of(data, _HASHED_BYTES)
    file.pwrite(piece, data)


class _Stream:
    """One direction. It moves the pieces of a range of the file on a lane, over and over."""

    def __init__(self, lane: str, move: Callable[[int, memoryview], None], pieces: int) -> None:
        self.lane = Lane(lane, SSD_THREADS)
        self._move = move
        buffers = Arena(SSD_THREADS * LARGE_TRANSFER_BYTES)
        # Random data, because a drive may compress other data, or not write it at all.
        buffers.view(0, buffers.nbytes)[:] = np.random.default_rng(0).bytes(buffers.nbytes)
        self.views = [buffers.view(i * LARGE_TRANSFER_BYTES, LARGE_TRANSFER_BYTES) for i in range(SSD_THREADS)]
        """One buffer per thread."""
        self._lock = threading.Lock()
        self.nbytes = LARGE_TRANSFER_BYTES
        """Bytes of each transfer, at most a piece."""
        self.lies_at(0, pieces)

    def lies_at(self, first: int, pieces: int) -> None:
        """From now on, stream through `pieces` pieces of the file, starting at `first`."""
        self._first, self.pieces = first, pieces
        self._numbers = count()
        self.moved = 0
        """Bytes read or written since then."""

    def move_next(self, view: memoryview) -> None:
        """Move the next piece."""
        self._move(self._first + next(self._numbers) % self.pieces, view[: self.nbytes])
        with self._lock:
            self.moved += self.nbytes

    def close(self) -> None:
        """Join the lane's threads."""
        self.lane.close()


@contextmanager
def _running(*streams: _Stream) -> Iterator[threading.Event]:
    """Run one or two streams while this context is open. Neither gets more than `_LEAD` pieces ahead of the other. Sets
    the event when a stream has failed, and raises its error at the end."""
    stop = threading.Event()
    leads = [threading.Semaphore(_LEAD) for _ in streams]

    def end() -> None:
        stop.set()
        for lead in leads:
            lead.release(SSD_THREADS)

    def run(index: int, view: memoryview) -> None:
        try:
            while leads[index].acquire() and not stop.is_set():
                leads[index - 1].release()  # the other one's, or its own where it is alone
                streams[index].move_next(view)
        finally:
            end()  # or the other would wait for one that has failed

    handles = [
        stream.lane.submit(partial(run, index, view)) for index, stream in enumerate(streams) for view in stream.views
    ]
    try:
        yield stop
    finally:
        end()
        wait_all(handles)


def _moved(streams: tuple[_Stream, ...]) -> int:
    return sum(stream.moved for stream in streams)


def _rate(window_s: float, *streams: _Stream) -> float:
    """Bytes per second of all streams together."""
    least = _LEAST_PIECES * streams[0].nbytes
    with _running(*streams) as failed:
        time.sleep(_WARM_S)
        start, before = time.perf_counter(), _moved(streams)
        while not failed.is_set() and (time.perf_counter() - start < window_s or _moved(streams) - before < least):
            time.sleep(min(window_s, 0.01))
        return (_moved(streams) - before) / (time.perf_counter() - start)


def _fill(writing: _Stream) -> int:
    """Write the file once, for at most `_FILL_S` seconds. Returns the number of written pieces, from the start of the
    file."""
    end, least = time.perf_counter() + _FILL_S, 2 * _LEAST_PIECES * LARGE_TRANSFER_BYTES
    with _running(writing) as failed:
        while not failed.is_set() and writing.moved < writing.pieces * LARGE_TRANSFER_BYTES:
            if time.perf_counter() > end and writing.moved >= least:
                break
            time.sleep(0.01)
    return min(writing.moved // LARGE_TRANSFER_BYTES, writing.pieces)


def _sample(samples: _Samples, window_s: float, reading: _Stream, writing: _Stream) -> None:
    """Take one more sample of each kind."""
    samples["read"].append(_rate(window_s, reading))
    samples["write"].append(_rate(window_s, writing))
    start, worked = time.perf_counter(), time.process_time()
    both = _rate(window_s, reading, writing)
    samples["both"].append(both)
    samples["busy"].append((time.process_time() - worked) / (time.perf_counter() - start) / cpu_cores())
    for _ in range(_TURNS):
        lost, rate = _beside_products(window_s / _TURNS, reading, writing)
        samples["lost"].append(lost)
        samples["beside"].append(min(rate, both))


def _figures(samples: _Samples, meter: Meter, note: str) -> dict[str, Figure]:
    """The figures by their names in `Drive` and `SmallTransfers`."""
    return {
        "read_bytes_per_s": meter.figure(samples["read"], note),
        "write_bytes_per_s": meter.figure(samples["write"], note),
        "both_bytes_per_s": meter.figure(samples["both"], note),
        "cpu_share": meter.share(
            samples["lost"],
            statistics.median(samples["busy"]),
            "what matrix products lose while the SSD is read and written; its threads' own time, if that is more",
        ),
        "beside_bytes_per_s": meter.figure(samples["beside"], f"{note}, beside matrix products"),
    }


def _beside_products(seconds: float, *streams: _Stream) -> tuple[float, float]:
    """The share that matrix products lose while streams run, and the streams' bytes per second meanwhile. The share is
    below zero if noise is larger. Products alone are timed before and after, because clock rates drift."""
    before = _products(seconds / 2)
    with _running(*streams):
        moved, start = _moved(streams), time.perf_counter()
        beside = _products(seconds)
        moved = max(_moved(streams) - moved, streams[0].nbytes)
        rate = moved / (time.perf_counter() - start)
    return 1 - 2 * beside / (before + _products(seconds / 2)), rate


def _products(seconds: float) -> float:
    """Matrix products per second on all cores."""
    left = torch.ones(_MATMUL_SIZE, _MATMUL_SIZE)
    left @ left
    done, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        left @ left
        done += 1
    return done / elapsed
