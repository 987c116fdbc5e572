"""The meter: counts what happens during a step, above all how long compute waits for each lane."""

import threading
import time
from collections import deque
from collections.abc import Sequence

from pagoda.runtime.lanes import Handle
from pagoda.runtime.stats import Found
from pagoda.runtime.timeline_recorder import TimelineRecorder


class Meter:
    """Counts what happens during a step."""

    def __init__(self, lanes: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self._lanes = lanes
        self.recorder: TimelineRecorder | None = None
        """Where the step is recorded, if it is recorded."""
        self.reset()

    def reset(self) -> None:
        """Start a step."""
        self.started = time.perf_counter()
        self.stall_s = dict.fromkeys(self._lanes, 0.0)
        self.accesses = dict.fromkeys(Found, 0)

    def stalled(self, lane: str, seconds: float) -> None:
        """Compute waited for `lane`."""
        with self._lock:
            self.stall_s[lane] += seconds
            if self.recorder is not None:
                self.recorder.waited(seconds)

    def wait_for(self, handle: Handle) -> None:
        """Wait until work of a lane has ended. Compute waits for that lane meanwhile. Raises the work's error."""
        if not handle.done:
            start = time.perf_counter()
            handle.wait_until_done()
            self.stalled(handle.lane, time.perf_counter() - start)
        handle.wait()


class InFlight:
    """Transfers that compute has started and has not waited for. Only the compute thread uses it."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._transfers: deque[tuple[Handle, int]] = deque()
        self._nbytes = 0

    def add(self, transfer: Handle, nbytes: int) -> None:
        """A transfer of `nbytes` was started."""
        self._transfers.append((transfer, nbytes))
        self._nbytes += nbytes

    def hold_back(self, most: int) -> None:
        """Wait until at most `most` bytes are on their way. Raises the errors of transfers that have ended."""
        while self._transfers and (self._transfers[0][0].done or self._nbytes > most):
            transfer, nbytes = self._transfers.popleft()
            self._nbytes -= nbytes
            self._meter.wait_for(transfer)
