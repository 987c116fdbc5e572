"""What a forecast shows: its table, its trace and its picture."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagoda.errors import ConfigError
from pagoda.forecast.chrome_trace import chrome_trace
from pagoda.forecast.draw import colour, draw
from pagoda.plan.exchanges import GRADIENTS, SEND, SUM, TOKENS
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


def test_a_picture_has_every_kind_of_work_in_its_colour(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    path = tmp_path / "step.png"
    of_ranks = [
        TimelineSpan("collective", f"{kind} layers.0", 1.8, 1.9) for kind in ("share", TOKENS, SUM, GRADIENTS, SEND)
    ]
    draw(replace(TIMELINE, spans=(*TIMELINE.spans, *of_ranks)), {"host": 3 << 30, "ssd": 100 << 30}, "a step", path)
    picture = imread(path)
    assert picture.shape[0] > 200
    assert picture.shape[1] > 800
    for kind in ("forward", "update"):
        near = abs(picture[..., :3] - colour(kind)).max(axis=-1) < 0.01
        assert near.mean() > 0.005, kind
    assert not (abs(picture[..., :3] - colour("write")).max(axis=-1) < 0.01).any()
    with pytest.raises(ConfigError, match=r"--plot .*not-there"):
        draw(TIMELINE, {}, "a step", tmp_path / "not-there" / "step.png")


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pagoda-train\[plot\]"):
        draw(TIMELINE, {}, "a step", tmp_path / "step.png")
