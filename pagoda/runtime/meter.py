"""The meter: counts what happens during a step, above all how long compute waits for each lane."""

import threading
import time
from collections.abc import Sequence

from pagoda.runtime.lanes import Handle
from pagoda.runtime.timeline_recorder import TimelineRecorder
from pagoda.schedule.served import Served, count_access
from pagoda.schedule.waits import InFlight


class StepMeter:
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
        self.accesses: dict[str, dict[str, float]] = {}
        """What accesses to weights found: see `schedule/served.py`. Only compute adds to them."""

    def accessed(self, access: Served) -> None:
        """Compute can read the weights that it has accessed."""
        count_access(self.accesses, access)

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

    def hold_back(self, in_flight: InFlight[Handle], most: int) -> None:
        """Wait until at most `most` bytes are on their way. Raises the errors of transfers that have ended."""
        for transfer in in_flight.over(most):
            self.wait_for(transfer)
