"""Records the work of lanes and compute during one step, as a timeline like a simulated one."""

import time
from collections.abc import Mapping

from pagoda.plan.lanes import LaneName
from pagoda.simulate.timeline import Timeline, TimelineSpan


class TimelineRecorder:
    """Records from its creation until `timeline` is called.

    Lanes call `add` from their threads. The compute thread calls the other methods. Compute counts as working on the
    latest access, except while it waits.
    """

    def __init__(self) -> None:
        self._spans: list[TimelineSpan] = []
        self._held: list[tuple[float, int]] = []
        self._start = time.perf_counter()
        self._access: str | None = None
        self._access_from = 0.0

    def add(self, lane: str, name: str, start: float, end: float, nbytes: int) -> None:
        """Record work that has ended. Times are those of `time.perf_counter`."""
        self._spans.append(TimelineSpan(lane, name, start - self._start, end - self._start, nbytes))

    def access(self, name: str | None) -> None:
        """Compute starts to work on `name`, or on nothing if it is None. Repeated calls with the same name extend one
        span."""
        if name != self._access:
            self._cut(time.perf_counter())
            self._access = name

    def waited(self, seconds: float) -> None:
        """Compute has waited for a lane until now."""
        now = time.perf_counter()
        self._cut(now - seconds)
        self._access_from = now

    def leased(self, nbytes: int) -> None:
        """From now on, leases take `nbytes` bytes."""
        if not self._held or self._held[-1][1] != nbytes:
            self._held.append((time.perf_counter() - self._start, nbytes))

    def timeline(
        self, stall_s: Mapping[str, float], peak_bytes: Mapping[str, int], lease_tier: str | None, lease_bytes: int
    ) -> Timeline:
        """The timeline of the step, which ends now.

        `peak_bytes` has the bytes of each tier, of which leases take at most `lease_bytes` of `lease_tier`. All others
        are taken during the whole step.
        """
        self.access(None)
        held_bytes: dict[str, tuple[tuple[float, int], ...]] = {}
        for tier, peak in peak_bytes.items():
            held = self._held if tier == lease_tier else []
            held_bytes[tier] = tuple((at, peak - lease_bytes + nbytes) for at, nbytes in held) or ((0.0, peak),)
        step_s = time.perf_counter() - self._start
        spans = sorted(self._spans, key=lambda span: span.end_s)
        return Timeline(step_s, tuple(spans), dict(stall_s), held_bytes)

    def _cut(self, now: float) -> None:
        """End compute's span at `now`."""
        if self._access is not None and now > self._access_from:
            self.add(LaneName.COMPUTE, self._access, self._access_from, now, 0)
        self._access_from = now
