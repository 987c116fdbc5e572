"""Micro-batches that repeat: a step of many is one of few, in which a micro-batch comes again."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pagoda.plan.trace import Phase, Trace
from pagoda.simulate.timeline import Timeline

FEW = 4
"""Micro-batches that are simulated, if those between the first and the last take equally long."""
_ALIKE = 1e-3
"""Relative difference below which two of them did."""


@dataclass(frozen=True, slots=True)
class Mark:
    """When a micro-batch begins, and what compute has waited for in the step until then."""

    start_s: float
    stall_s: Mapping[str, float]


def pass_begins(trace: Trace) -> list[int]:
    """Ticks with which micro-batches begin: forwards after a backward."""
    phases = [Phase.BACKWARD, *(access.phase for access in trace.accesses[:-1])]
    return [tick for tick, (before, now) in enumerate(itertools.pairwise(phases)) if before and not now]


def first_passes(trace: Trace, tick_s: Sequence[float], count: int) -> Trace | None:
    """The trace of a step of `count` of its micro-batches; None if it has no more, or they are not all alike."""
    begins = pass_begins(trace)
    if len(begins) <= count or (len(trace.accesses) - 1) % len(begins):
        return None
    works = list(zip(trace.accesses[:-1], tick_s, strict=True))
    each = len(works) // len(begins)
    if works != works[:each] * len(begins):
        return None
    return Trace((*trace.accesses[: count * each], trace.accesses[-1]), trace.assumed)


def with_more_passes(timeline: Timeline, marks: Sequence[Mark], more: int) -> Timeline | None:
    """The step with `more` micro-batches like the last but one; None if that one is not like the one before it."""
    before, start, end = (mark.start_s for mark in marks[-3:])
    lasted = end - start
    if abs(lasted - (start - before)) > _ALIKE * lasted:
        return None
    shifts = [number * lasted for number in range(more + 1)]
    spans = []
    for span in timeline.spans:
        again = shifts if start <= span.start_s < end else [shifts[-1] if span.start_s >= end else 0.0]
        spans += [span._replace(start_s=span.start_s + shift, end_s=span.end_s + shift) for shift in again]
    spans.sort(key=lambda span: span.end_s)
    stall_s = {
        lane: seconds + more * (marks[-1].stall_s[lane] - marks[-2].stall_s[lane])
        for lane, seconds in timeline.stall_s.items()
    }
    held = {}
    for tier, account in timeline.held_bytes.items():
        times = [
            (at + shift, nbytes)
            for at, nbytes in account
            for shift in (shifts if start <= at < end else [shifts[-1] if at >= end else 0.0])
        ]
        held[tier] = tuple(sorted(times))
    return Timeline(timeline.step_s + shifts[-1], tuple(spans), stall_s, held)
