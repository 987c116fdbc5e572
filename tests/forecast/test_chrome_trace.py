"""The trace of a forecast."""

from typing import Any

import pytest

from pagoda.forecast.chrome_trace import chrome_trace
from pagoda.simulate.timeline import Timeline, TimelineSpan

TIMELINE = Timeline(
    2.0,
    (
        TimelineSpan("ssd_read", "read layers.0", -0.5, 0.25, 100),
        TimelineSpan("ssd_read", "fetch layers.1", 0.1, 0.3, 200),
        TimelineSpan("compute", "forward layers.0", 0.25, 1.0),
        TimelineSpan("ssd_read", "fetch layers.2", 0.4, 0.5, 300),
        TimelineSpan("update", "update layers.0", 1.5, 2.5, 400),
    ),
    {"ssd_read": 0.25},
    {"host": ((0.0, 1 << 30), (1.0, 2 << 30)), "ssd": ((0.0, 1 << 30),)},
)


def events(kind: str) -> list[dict[str, Any]]:
    return [event for event in chrome_trace(TIMELINE, "a step")["traceEvents"] if event["ph"] == kind]


def test_a_lane_is_a_thread_in_the_order_of_the_lanes_and_one_more_where_it_did_two_things_at_once() -> None:
    names = [event["args"]["name"] for event in events("M") if event["name"] == "thread_name"]
    assert names == ["compute", "ssd_read", "ssd_read (2)", "update"]
    threads: dict[int, float] = {}
    for event in events("X"):
        assert event["ts"] >= threads.get(event["tid"], 0.0)
        threads[event["tid"]] = event["ts"] + event["dur"]


def test_spans_lie_within_the_step_in_microseconds_and_say_their_bytes() -> None:
    spans = {event["name"]: event for event in events("X")}
    assert len(spans) == len(TIMELINE.spans)
    for event in spans.values():
        assert 0 <= event["ts"] <= event["ts"] + event["dur"] <= 2e6
    assert spans["fetch layers.1"]["ts"] == pytest.approx(1e5)
    assert spans["fetch layers.1"]["dur"] == pytest.approx(2e5)
    assert spans["fetch layers.1"]["args"] == {"nbytes": 200}
    assert spans["read layers.0"]["dur"] == pytest.approx(2.5e5)
    counted = [(event["name"], event["ts"], event["args"]["bytes"]) for event in events("C")]
    assert counted == [("host bytes", 0.0, 1 << 30), ("host bytes", 1e6, 2 << 30), ("ssd bytes", 0.0, 1 << 30)]
    assert spans["read layers.0"]["args"] == {"nbytes": 100, "began_s": -0.5}
