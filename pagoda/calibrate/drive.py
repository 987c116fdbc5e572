"""The SSD: streams through a page file, with the runtime's lanes, transfer sizes and hashes."""

import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import torch

from pagoda.calibrate.meter import Meter, cpu_cores
from pagoda.errors import StorageError
from pagoda.memory.arena import Arena
from pagoda.memory.sizes import format_bytes
from pagoda.memory.ssd.file import PageFile
from pagoda.memory.ssd.xxh3 import hashes_of
from pagoda.plan.ops import LARGE_TRANSFER_BYTES
from pagoda.runtime.lanes import SSD_THREADS, Handle, Lane, wait_all
from pagoda.simulate.hardware import Drive, Figure, SmallTransfers
from pagoda.simulate.machines import rated_endurance

_SMALL_BYTES = 128 << 10
"""A small transfer: a block of moments where RAM or the model is small."""
_HASHED_BYTES = 128 << 10
"""Of a page: no smaller than a small transfer has, and a page's size changes little of what hashing costs."""
_FILL_S = 5.0
_WARM_S = 0.1
_ROUNDS = 3
_LEAST_PIECES = 16
"""A window is as long as these take, at least."""
_LEAD = 4
"""Pieces that reading or writing may be ahead of the other, as blocks in a ring are."""
_TURNS = 4
_MATMUL_SIZE = 1024


def check_directory(directory: Path, nbytes: int) -> None:
    """Raises StorageError unless `directory` is there and has `nbytes` free."""
    if not directory.is_dir():
        raise StorageError(f"SSD directory {directory} is not there: create it (mkdir -p) or name another in --ssd")
    free = shutil.disk_usage(directory).free
    if free < nbytes:
        raise StorageError(
            f"SSD directory {directory} has {format_bytes(free)} free, and measuring it takes {format_bytes(nbytes)}:"
            " free some space or name a directory on another disk in --ssd"
        )


def measure_drive(meter: Meter, directory: Path) -> Drive:
    """Every figure of the drive that holds `directory`, in which nothing is left behind, however this ends.

    Raises StorageError when the directory cannot be used, has too little space, or the drive fails.
    """
    check_directory(directory, meter.effort.file_bytes)
    with ExitStack() as stack:
        pieces = meter.effort.file_bytes // LARGE_TRANSFER_BYTES
        file = stack.enter_context(PageFile(directory, pieces, LARGE_TRANSFER_BYTES))
        buffers = Arena(2 * SSD_THREADS * LARGE_TRANSFER_BYTES)
        # What a drive could compress, or not write at all, would not be the rate of weights.
        buffers.tensor(0, buffers.nbytes, torch.uint8).numpy()[:] = np.frombuffer(
            np.random.default_rng(0).bytes(buffers.nbytes), np.uint8
        )
        meter.report(f"a file of {format_bytes(file.nbytes)} on the SSD")
        reading = stack.enter_context(closing(_Stream("ssd_read", partial(_read, file), pieces, buffers, 0)))
        writing = stack.enter_context(
            closing(_Stream("ssd_write", partial(_write, file), pieces, buffers, SSD_THREADS))
        )
        # Blocks that were never written would be read from nowhere. On a slow drive, what has been written must do.
        half = _fill(writing) // 2
        reading.lies_at(0, half)
        writing.lies_at(half, half)
        window_s = meter.effort.figure_s
        samples = {nbytes: _Samples() for nbytes in (LARGE_TRANSFER_BYTES, _SMALL_BYTES)}
        for round_ in range(_ROUNDS):
            for nbytes, sampled in samples.items():
                meter.report(f"SSD reads and writes of {format_bytes(nbytes)}, {round_ + 1} of {_ROUNDS}")
                reading.nbytes = writing.nbytes = nbytes
                sampled.add(window_s, reading, writing)
    cached = "" if file.direct else f"; through the page cache, as {file.fallback_reason}"
    large, small = (
        sampled.figures(meter, f"{SSD_THREADS} threads each way, {format_bytes(nbytes)} a transfer{cached}")
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
    """As the runtime does, with what each page holds checked."""
    file.pread(piece, into)
    hashes_of(into, _HASHED_BYTES)


def _write(file: PageFile, piece: int, data: memoryview) -> None:
    hashes_of(data, _HASHED_BYTES)
    file.pwrite(piece, data)


class _Samples:
    """What is measured of transfers of one size."""

    def __init__(self) -> None:
        self._read: list[float] = []
        self._write: list[float] = []
        self._both: list[float] = []
        self._busy: list[float] = []
        self._shares: list[float] = []
        self._beside: list[float] = []

    def add(self, window_s: float, reading: "_Stream", writing: "_Stream") -> None:
        """One more sample of each."""
        self._read.append(_rate(window_s, reading))
        self._write.append(_rate(window_s, writing))
        start, worked = time.perf_counter(), time.process_time()
        self._both.append(_rate(window_s, reading, writing))
        self._busy.append((time.process_time() - worked) / (time.perf_counter() - start) / cpu_cores())
        for turn in range(_TURNS):
            share, rate = _beside_products(window_s / _TURNS, turn % 2 == 0, reading, writing)
            self._shares.append(share)
            self._beside.append(min(rate, self._both[-1]))

    def figures(self, meter: Meter, note: str) -> dict[str, Figure]:
        """The figures by their names in `Drive` and `SmallTransfers`."""
        return {
            "read_bytes_per_s": meter.figure(self._read, note),
            "write_bytes_per_s": meter.figure(self._write, note),
            "both_bytes_per_s": meter.figure(self._both, note),
            "cpu_share": meter.share(
                self._shares,
                statistics.median(self._busy),
                "what matrix products lose while the SSD is read and written; its threads' own time, if that is more",
            ),
            "beside_bytes_per_s": meter.figure(self._beside, f"{note}, beside matrix products"),
        }


class _Pace:
    """Keeps streams in step, none more than `_LEAD` pieces ahead of another, until they are stopped."""

    def __init__(self, streams: int) -> None:
        self._moved = [0] * streams
        self.stopped = False
        self._changed = threading.Condition()

    def next(self, stream: int) -> bool:
        """Whether `stream` goes on, which waits for the others."""
        with self._changed:
            while not self.stopped and self._moved[stream] - min(self._moved) >= _LEAD:
                self._changed.wait()
            self._moved[stream] += 1
            self._changed.notify_all()
            return not self.stopped

    def stop(self) -> None:
        with self._changed:
            self.stopped = True
            self._changed.notify_all()


class _Stream:
    """One direction: the pieces of a range of the file, round and round, on a lane."""

    def __init__(
        self, name: str, move: Callable[[int, memoryview], None], pieces: int, buffers: Arena, first_buffer: int
    ) -> None:
        self._move = move
        self._lane = Lane(name, SSD_THREADS)
        starts = [(first_buffer + thread) * LARGE_TRANSFER_BYTES for thread in range(SSD_THREADS)]
        self._views = [buffers.view(start, LARGE_TRANSFER_BYTES) for start in starts]
        self._lock = threading.Lock()
        self.nbytes = LARGE_TRANSFER_BYTES
        """Of each transfer, which moves so much of a piece."""
        self.lies_at(0, pieces)

    def lies_at(self, first: int, pieces: int) -> None:
        """From now on stream through `pieces` of the file from `first` on."""
        self._first, self.pieces = first, pieces
        self._next = 0
        self.moved = 0
        """Bytes that have been read or written since."""

    def start(self, pace: _Pace, number: int) -> list[Handle]:
        """Stream on every thread until `pace` ends."""
        return [self._lane.submit(partial(self._run, pace, number, view)) for view in self._views]

    def close(self) -> None:
        """Join the lane's threads."""
        self._lane.close()

    def _run(self, pace: _Pace, number: int, view: memoryview) -> None:
        try:
            while pace.next(number):
                with self._lock:
                    piece, self._next = self._first + self._next % self.pieces, self._next + 1
                self._move(piece, view[: self.nbytes])
                with self._lock:
                    self.moved += self.nbytes
        except BaseException:
            pace.stop()  # or the others would wait for this one
            raise


@contextmanager
def _running(*streams: _Stream) -> Iterator[_Pace]:
    """Streams run while this is open; raises what any of them raised."""
    pace = _Pace(len(streams))
    handles = [handle for number, stream in enumerate(streams) for handle in stream.start(pace, number)]
    try:
        yield pace
    finally:
        pace.stop()
        wait_all(handles)


def _rate(window_s: float, *streams: _Stream) -> float:
    """Bytes per second of all streams together."""
    least = _LEAST_PIECES * streams[0].nbytes

    def moved() -> int:
        return sum(stream.moved for stream in streams)

    with _running(*streams) as pace:
        time.sleep(_WARM_S)
        start, before = time.perf_counter(), moved()
        while (time.perf_counter() - start < window_s or moved() - before < least) and not pace.stopped:
            time.sleep(min(window_s, 0.01))
        return (moved() - before) / (time.perf_counter() - start)


def _fill(writing: _Stream) -> int:
    """Write the file once, for `_FILL_S` at most; returns the pieces that were written, from its start."""
    start = time.perf_counter()
    with _running(writing) as pace:
        while writing.moved < writing.pieces * LARGE_TRANSFER_BYTES and not pace.stopped:
            if time.perf_counter() - start > _FILL_S and writing.moved >= 2 * _LEAST_PIECES * LARGE_TRANSFER_BYTES:
                break
            time.sleep(0.01)
    return min(writing.moved // LARGE_TRANSFER_BYTES, writing.pieces)


def _beside_products(seconds: float, alone_first: bool, *streams: _Stream) -> tuple[float, float]:
    """What matrix products lose while streams run, below zero where noise outweighs it; the streams' bytes per second
    meanwhile."""
    rates = {}
    streamed = 0.0
    for alone in (alone_first, not alone_first):
        with nullcontext() if alone else _running(*streams):
            before, start = sum(stream.moved for stream in streams), time.perf_counter()
            rates[alone] = _products(seconds)
            if not alone:
                moved = sum(stream.moved for stream in streams) - before
                streamed = max(moved, streams[0].nbytes) / (time.perf_counter() - start)
    return 1 - rates[False] / rates[True], streamed


def _products(seconds: float) -> float:
    """Matrix products per second on all cores."""
    left = torch.ones(_MATMUL_SIZE, _MATMUL_SIZE)
    left @ left
    count, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        left @ left
        count += 1
    return count / elapsed
