"""Records what lanes and compute do during one step, as a timeline like those that the simulator makes."""

import time
from collections.abc import Mapping

from pagoda.simulate.timeline import COMPUTE, Span, Timeline


class TimelineRecorder:
    """Records from its creation until `timeline` is asked for.

    Lanes call `add` from their threads. The other methods are for the thread that runs the model:
    compute is at work on the latest access, but for the time that it waits.
    """

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._held: list[tuple[float, int]] = []
        self._start = time.perf_counter()
        self._access: str | None = None
        self._access_from = 0.0

    def add(self, lane: str, name: str, start: float, end: float, nbytes: int) -> None:
        """Work that has ended; times are of `time.perf_counter`."""
        self._spans.append(Span(lane, name, start - self._start, end - self._start, nbytes))

    def access(self, name: str | None) -> None:
        """Compute turns to `name`; it stays one span while that is what it was at already. None: to nothing."""
        if name != self._access:
            self._cut(time.perf_counter())
            self._access = name

    def waited(self, seconds: float) -> None:
        """Compute has waited for a lane until now."""
        now = time.perf_counter()
        self._cut(now - seconds)
        self._access_from = now

    def leased(self, nbytes: int) -> None:
        """Leases take so many bytes from now on."""
        if not self._held or self._held[-1][1] != nbytes:
            self._held.append((time.perf_counter() - self._start, nbytes))

    def timeline(
        self, stall_s: Mapping[str, float], peak_bytes: Mapping[str, int], lease_tier: str | None, lease_bytes: int
    ) -> Timeline:
        """The step, which ends now.

        Of each tier's `peak_bytes`, `lease_bytes` of `lease_tier` are the most that leases take; all else is taken
        for good.
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
            self.add(COMPUTE, self._access, self._access_from, now, 0)
        self._access_from = now
