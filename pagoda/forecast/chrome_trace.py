"""Writes a timeline as a Chrome trace: JSON that Perfetto (ui.perfetto.dev) and chrome://tracing display.

The format is Google's "Trace Event Format". Work is written as complete events ("X"), with one thread per lane. If a
lane worked on several things at once, it has several threads. Bytes in use are counters ("C"), one per tier.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pagoda.errors import ConfigError
from pagoda.plan.lanes import ALL_LANES
from pagoda.simulate.timeline import Timeline, TimelineSpan

_US = 1e6
_PID = 1


def chrome_trace(timeline: Timeline, name: str) -> dict[str, Any]:
    """The trace of one step as data for JSON. `name` is shown as the process.

    `ts` and `dur` are microseconds from the start of the step. Work that began in the previous step starts at 0, and
    its `args` say how much earlier it began.
    """
    lanes: dict[str, list[TimelineSpan]] = {}
    for span in timeline.spans:
        lanes.setdefault(span.lane, []).append(span)
    events: list[dict[str, Any]] = [_name("process_name", 0, name)]
    thread = 0
    for lane in sorted(lanes, key=ALL_LANES.index):
        for number, track in enumerate(_tracks(lanes[lane])):
            thread += 1
            events.append(_name("thread_name", thread, lane if number == 0 else f"{lane} ({number + 1})"))
            events.append({**_name("thread_sort_index", thread, ""), "args": {"sort_index": thread}})
            events += (_event(span, thread, timeline.step_s) for span in track)
    for tier, points in timeline.held_bytes.items():
        events += (
            {"ph": "C", "name": f"{tier} bytes", "pid": _PID, "ts": seconds * _US, "args": {"bytes": nbytes}}
            for seconds, nbytes in points
        )
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"step_s": timeline.step_s, "stall_s": dict(timeline.stall_s)},
    }


def write_trace(timeline: Timeline, name: str, path: Path) -> None:
    """Write `chrome_trace` to a file. Raises ConfigError if the file cannot be written."""
    try:
        path.write_text(json.dumps(chrome_trace(timeline, name)) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--trace {path} cannot be written: {error.strerror}; name another file") from error


def _tracks(spans: Iterable[TimelineSpan]) -> list[list[TimelineSpan]]:
    """Distribute the spans of one lane over as few tracks as possible, so that spans of a track do not overlap."""
    tracks: list[list[TimelineSpan]] = []
    for span in sorted(spans, key=lambda span: (span.start_s, span.end_s)):
        free = next((track for track in tracks if track[-1].end_s <= span.start_s), None)
        if free is None:
            tracks.append(free := [])
        free.append(span)
    return tracks


def _event(span: TimelineSpan, thread: int, step_s: float) -> dict[str, Any]:
    start, end = max(0.0, span.start_s), min(span.end_s, step_s)
    args: dict[str, Any] = {"nbytes": span.nbytes}
    if span.start_s < 0:
        args["began_s"] = span.start_s
    when = {"ts": start * _US, "dur": max(0.0, end - start) * _US}
    return {"ph": "X", "name": span.name, "cat": span.lane, "pid": _PID, "tid": thread, **when, "args": args}


def _name(what: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": _PID, "tid": thread, "args": {"name": name}}
