"""Lanes: ordered executors, one per resource, and the handles that stand for their work."""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from torch.profiler import record_function

from pagoda.runtime.tape import Tape

SSD_THREADS = 2
"""Threads of `ssd_read` for each drive, and of `ssd_write`: one transfer is on it while the next is prepared."""


class Handle:
    """Work submitted to a lane. Waiting on it raises what the work raised."""

    __slots__ = ("_callbacks", "_done", "_error", "_lock", "lane")

    def __init__(self, lane: str) -> None:
        self.lane = lane
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[BaseException | None], None]] = []
        self._lock = threading.Lock()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    @property
    def succeeded(self) -> bool:
        """True once the work has ended without an error."""
        return self._done.is_set() and self._error is None

    def wait(self) -> None:
        """Block until the work has ended; raises its error."""
        self._done.wait()
        if self._error is not None:
            raise self._error

    def wait_until_done(self) -> None:
        """Block until the work has ended, however it did."""
        self._done.wait()

    def finish(self, error: BaseException | None = None) -> None:
        """Mark the work as ended. Called by whoever does it, once."""
        with self._lock:
            self._error = error
            self._done.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(error)

    def then(self, callback: Callable[[BaseException | None], None]) -> None:
        """Call `callback(error)` once the work has ended: on the thread that ends it, or now."""
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(callback)
                return
        callback(self._error)


class Latch(Handle):
    """A handle that ends when all the handles it watches have ended; it keeps the first error."""

    __slots__ = ("_count", "_first_error")

    def __init__(self, lane: str, handles: Sequence[Handle]) -> None:
        super().__init__(lane)
        self._count = len(handles)
        self._first_error: BaseException | None = None
        if not handles:
            self.finish()
        for handle in handles:
            handle.then(self._part_ended)

    def _part_ended(self, error: BaseException | None) -> None:
        with self._lock:
            self._first_error = self._first_error or error
            self._count -= 1
            last = self._count == 0
        if last:
            self.finish(self._first_error)


class Lane:
    """One resource's executor: work starts in the order in which it became ready, on `threads` threads.

    Work that depends on other lanes names their handles in `after` and is ready when they have ended, so no thread
    ever sits waiting while there is other work, and work may depend on what is submitted to this lane later.
    """

    def __init__(self, name: str, threads: int = 1) -> None:
        self.name = name
        self.tape: Tape | None = None
        """Where work is recorded as it ends, if anywhere."""
        self._label = f"pagoda::{name}"
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], str, int, Handle] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._busy_s = 0.0
        self._bytes = 0
        self._threads = [
            threading.Thread(target=self._run, name=f"pagoda-{name}-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self, work: Callable[[], None], after: Iterable[Handle] = (), nbytes: int = 0, label: str = ""
    ) -> Handle:
        """Do `work`, which moves `nbytes`, once `after` have ended; if one of them failed, fail with its error.

        `label` is what a tape calls it: a verb of `plan.ops.Kind` and a unit's name, as in a simulated timeline.
        """
        handle = Handle(self.name)

        def ready(error: BaseException | None) -> None:
            if error is None:
                self._queue.put((work, label, nbytes, handle))
            else:
                handle.finish(error)

        pending = [other for other in after if not other.succeeded]
        if pending:
            Latch(self.name, pending).then(ready)
        else:
            ready(None)
        return handle

    def take_counters(self) -> tuple[float, int]:
        """Seconds of work (summed over threads) and bytes moved since the last call."""
        with self._lock:
            counters = self._busy_s, self._bytes
            self._busy_s, self._bytes = 0.0, 0
        return counters

    def close(self) -> None:
        """Finish what is queued and join the threads."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, label, nbytes, handle = item
            start = time.perf_counter()
            error: BaseException | None = None
            try:
                with record_function(self._label):
                    work()
            except BaseException as caught:
                error = caught
            end = time.perf_counter()
            with self._lock:
                self._busy_s += end - start
                self._bytes += nbytes
            if (tape := self.tape) is not None:
                tape.add(self.name, label or self.name, start, end, nbytes)
            # Drop references first, or the last gradient of a step would live until the next one.
            del item, work
            handle.finish(error)
            del handle, error


def wait_all(handles: Iterable[Handle]) -> None:
    """Wait for every handle, then raise the first error, so that no work is left running behind an exception."""
    error: BaseException | None = None
    for handle in handles:
        try:
            handle.wait()
        except BaseException as caught:
            error = error or caught
    if error is not None:
        raise error
