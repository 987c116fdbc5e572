"""Repeats micro-batches: derives a step of many micro-batches from a simulated step of a few."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pagoda.plan.trace import Phase, Trace
from pagoda.simulate.timeline import Timeline

FEW = 6
"""Number of micro-batches that are simulated if all between the first and the last are alike."""
_ALIKE = 0.05
"""Share of their mean by which they may differ in length. Leases lie differently in each."""


@dataclass(frozen=True, slots=True)
class Mark:
    """When a micro-batch begins, and how long compute has waited in the step until then."""

    start_s: float
    stall_s: Mapping[str, float]


def pass_begins(trace: Trace) -> list[int]:
    """Ticks at which micro-batches begin: forwards after a backward."""
    phases = [Phase.BACKWARD, *(access.phase for access in trace.accesses[:-1])]
    return [tick for tick, (before, now) in enumerate(pairwise(phases)) if before and not now]


def first_passes(trace: Trace, tick_s: Sequence[float], count: int) -> Trace | None:
    """The trace of a step with `count` of its micro-batches. None if it has no more than that, or if they are not
    alike."""
    begins = pass_begins(trace)
    if len(begins) <= count or (len(trace.accesses) - 1) % len(begins):
        return None
    works = list(zip(trace.accesses[:-1], tick_s, strict=True))
    each = len(works) // len(begins)
    if works != works[:each] * len(begins):
        return None
    return Trace((*trace.accesses[: count * each], trace.accesses[-1]), trace.assumed)


def with_more_passes(timeline: Timeline, marks: Sequence[Mark], more: int) -> Timeline | None:
    """The step with `more` further micro-batches, repeated from those between the first and the last. None if these
    differ too much."""
    begins = [mark.start_s for mark in marks[1:]]
    start, end, middle = begins[0], begins[-1], len(begins) - 1
    mean = (end - start) / middle
    if any(abs(after - before - mean) > _ALIKE * mean for before, after in pairwise(begins)):
        return None
    times, rest = divmod(more, middle)
    whole = end - start
    later = times * whole + begins[rest] - start

    def again(at: float) -> list[float]:
        """The delays of all repetitions of an event at time `at`."""
        if not start <= at < end:
            return [later if at >= end else 0.0]
        return [number * whole for number in range(times + 1 + (at < begins[rest]))]

    # The whole middle is repeated a number of times. Then `rest` of its micro-batches follow, and then the last one.
    spans = [
        span._replace(start_s=span.start_s + shift, end_s=span.end_s + shift)
        for span in timeline.spans
        for shift in again(span.start_s)
    ]
    spans.sort(key=lambda span: span.end_s)
    held = {
        tier: tuple(sorted((at + shift, nbytes) for at, nbytes in account for shift in again(at)))
        for tier, account in timeline.held_bytes.items()
    }

    def waited(lane: str, first: int, last: int) -> float:
        return marks[last].stall_s[lane] - marks[first].stall_s[lane]

    stall_s = {
        lane: seconds + times * waited(lane, 1, -1) + waited(lane, 1, 1 + rest)
        for lane, seconds in timeline.stall_s.items()
    }
    accesses = sorted(
        (served._replace(at_s=served.at_s + shift) for served in timeline.accesses for shift in again(served.at_s)),
        key=lambda served: served.at_s,
    )
    return Timeline(timeline.step_s + later, tuple(spans), stall_s, held, tuple(accesses))
