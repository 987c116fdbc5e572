"""The meter: counts what happens during a step, above all how long compute waits for each lane."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pagoda.runtime.lanes import Handle
from pagoda.runtime.timeline_recorder import TimelineRecorder
from pagoda.schedule.served import Served, count_access
from pagoda.schedule.waits import Ended, InFlight, charged


class StepMeter:
    """Counts what happens during a step."""

    def __init__(self, lanes: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self._lanes = lanes
        self._waits: tuple[list[Ended], ...] = ()
        """For each wait that is under way, the work that has ended since it began."""
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

    def worked(self, lane: str, label: str, start_s: float, end_s: float, nbytes: int) -> None:
        """Work of a lane has ended. Lanes call this from their threads."""
        for ended in self._waits:
            ended.append(Ended(lane, start_s, end_s))
        if (recorder := self.recorder) is not None:
            recorder.add(lane, label, start_s, end_s, nbytes)

    @contextmanager
    def waiting(self, lane: str) -> Iterator[None]:
        """Inside, compute waits for `lane`, which may itself wait for others. The time is charged as in `charged`."""
        ended: list[Ended] = []
        start = time.perf_counter()
        with self._lock:
            self._waits = (*self._waits, ended)
        try:
            yield
        finally:
            with self._lock:
                end = time.perf_counter()
                self._waits = tuple(other for other in self._waits if other is not ended)
                for charge, seconds in charged(reversed(ended), start, end, lane):
                    self.stall_s[charge] += seconds
                if self.recorder is not None:
                    self.recorder.waited(end - start)

    def wait_for(self, handle: Handle) -> None:
        """Wait until work of a lane has ended. Compute waits for that lane meanwhile. Raises the work's error."""
        if not handle.done:
            with self.waiting(handle.lane):
                handle.wait_until_done()
        handle.wait()

    def hold_back(self, in_flight: InFlight[Handle], most: int) -> None:
        """Wait until at most `most` bytes are on their way. Raises the errors of transfers that have ended."""
        for transfer in in_flight.over(most):
            self.wait_for(transfer)
