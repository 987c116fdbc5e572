"""Writers: threads, one for each core, that write parameters to their homes."""

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from pagoda.process import callers_gpu


class Writers:
    """Threads that write values to their homes, while the caller goes on to the next parameter.

    At most `most_bytes` of values wait or are being written, or one parameter if it has more.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)), "pagoda-writer", callers_gpu())
        self._running: deque[tuple[Future[None], int]] = deque()
        self._bytes = 0

    def submit(self, nbytes: int, write: Callable[[], None]) -> None:
        """Call `write()`, which holds `nbytes` of values, on one of the threads. Waits until they fit. Raises the error
        of an earlier call."""
        while self._running and self._bytes + nbytes > self._most:
            self._wait()
        self._running.append((self._pool.submit(write), nbytes))
        self._bytes += nbytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Wait for all calls, and raise the first error of theirs. After an error of the caller, cancel those that have
        not begun."""
        with self._pool:
            while self._running and error is None:
                self._wait()
            for running in self._running:
                running[0].cancel()

    def _wait(self) -> None:
        future, nbytes = self._running.popleft()
        self._bytes -= nbytes
        future.result()
