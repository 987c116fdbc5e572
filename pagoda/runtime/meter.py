"""The meter: counts what happens during a step, above all how long compute waits for each lane."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from pagoda.plan.planner import Plan
from pagoda.runtime.lanes import Handle
from pagoda.runtime.timeline_recorder import TimelineRecorder
from pagoda.schedule.scheduler import Scheduler
from pagoda.schedule.waits import Ended, InFlight, charged
from pagoda.simulate.timeline import TierUse


class _Held:
    """How much of a memory is in use over a step."""

    def __init__(self) -> None:
        self._now = self._most = 0
        self._since = self._start = time.perf_counter()
        self._sum = 0.0

    def restart(self, now: float) -> None:
        self._start = self._since = now
        self._sum, self._most = 0.0, self._now

    def note(self, count: int) -> None:
        if count != self._now:
            now = time.perf_counter()
            self._sum += self._now * (now - self._since)
            self._now, self._since, self._most = count, now, max(self._most, count)

    def until(self, now: float) -> tuple[float, int]:
        """The mean and the most."""
        return (self._sum + self._now * (now - self._since)) / max(1e-9, now - self._start), self._most


class StepMeter:
    """Counts what happens during a step."""

    def __init__(self, lanes: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self._lanes = lanes
        self._waits: tuple[list[Ended], ...] = ()
        """For each wait that is under way, the work that has ended since it began."""
        self._frames, self._pages = _Held(), _Held()
        self.recorder: TimelineRecorder | None = None
        """Where the step is recorded, if it is recorded."""
        self.reset()

    def reset(self) -> None:
        """Start a step."""
        self.started = time.perf_counter()
        self.stall_s = dict.fromkeys(self._lanes, 0.0)
        self.accesses: dict[str, dict[str, float]] = {}
        """What accesses to weights found: see `schedule/served.py`. Only compute adds to them."""
        for held in (self._frames, self._pages):
            held.restart(self.started)

    def hold(self, scheduler: Scheduler) -> None:
        """Note what leases and gradient buffers hold now. The driver calls this after events, under its lock."""
        usage = scheduler.usage
        self._frames.note(usage.frames)
        self._pages.note(usage.pages)

    def tier_use(self, plan: Plan) -> dict[str, TierUse]:
        """tier -> how much of its budget was in use since the step began. Offloaded activations are not counted."""
        now = time.perf_counter()
        means, peaks = (
            plan.bytes_in_use(*of) for of in zip(self._frames.until(now), self._pages.until(now), strict=True)
        )
        budgets = {tier: budget for tier, budget in asdict(plan.budgets).items() if budget and tier in means}
        return {tier: TierUse(means[tier] / budget, peaks[tier] / budget) for tier, budget in budgets.items()}

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
        try:
            with self._lock:
                self._waits = (*self._waits, ended)
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
        for transfer in in_flight.above(most):
            self.wait_for(transfer)
