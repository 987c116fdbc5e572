"""benchmarks/roofline.py: its arithmetic, and a run from end to end."""

import json
from pathlib import Path

import pytest

import roofline
from pagoda.plan.lanes import LaneName
from pagoda.simulate.timeline import Timeline, TimelineSpan
from roofline import Raw, Work, both, bounds_of, covered, length_of, lost_in
from training import Workload

RAW = Raw(
    flops=1e9,
    memory_bytes=1e9,
    ssd_read_bytes=1e8,
    ssd_write_bytes=2e8,
    link_bytes=1e9,
    hashed_bytes=1e9,
    parameters_of_python=1e4,
)


@pytest.fixture(scope="module")
def work() -> Work:
    return Work(Workload("llama-15m", 1, 16, layers=1))


def test_bounds_are_work_over_rates(work: Work) -> None:
    bounds = bounds_of(work, RAW, {"ssd_read": 10**8, "ssd_write": 10**8, "d2h": 10**9})
    products = sum(n * (forwards + 2) * 2 * t * i * o for (t, i, o, forwards), n in work.products.items())
    assert 0 < products < work.flops < 1.2 * products, "attention comes on top"
    assert bounds == {
        "compute": work.flops / 1e9,
        "DRAM": pytest.approx((38 * work.parameters + 2e8) / 1e9),
        "SSD": 1.0,
        "link": 1.0,
    }


def test_what_is_lost_is_what_the_record_has(work: Work) -> None:
    spans = (
        TimelineSpan(LaneName.COMPUTE, "forward a", 0.0, 1.0),
        TimelineSpan("update", "update a", -1.0, 0.5),
        TimelineSpan("update", "update b", 0.8, 1.6),
        TimelineSpan("update", "update c", 1.2, 1.8),
        TimelineSpan("ssd_read", "read b", 1.5, 2.0, 10**8),
        TimelineSpan(LaneName.COMPUTE, "backward a", 2.0, 4.0),
        TimelineSpan(LaneName.COMPUTE, "step", 4.0, 4.25),
    )
    step = Timeline(4.25, spans, {"ssd_read": 1.0, "h2d": 0.0})
    assert covered(step, ("update",)) == [(0.0, 0.5), (0.8, 1.8)]
    assert length_of(both(covered(step, ("update",)), covered(step, (LaneName.COMPUTE,)))) == pytest.approx(0.7)
    lost = lost_in(step, work, RAW, plain_passes_s=2.5, plain_s=3.0)
    assert lost["waits for ssd_read"] == 1.0
    assert "waits for h2d" not in lost
    assert lost["forward and backward, above plain PyTorch"] == pytest.approx(0.5)
    assert lost["step()"] == pytest.approx(0.25)
    assert lost["hashing, on one core"] == pytest.approx(0.1)
    assert lost["updates while nothing else runs"] == pytest.approx(0.5), "from the end of forward to the read"
    above = sum(list(lost.values())[:4])
    assert above == pytest.approx(step.step_s - 3.0), "the first rows are all that a step takes above plain PyTorch"


@pytest.mark.slow
def test_it_measures_and_writes_a_page_and_a_plot(tmp_path: Path) -> None:
    page, out = tmp_path / "roofline.md", tmp_path / "roofline.json"
    page.write_text("before\n<!-- figures: benchmarks/roofline.py writes them -->\n<!-- end of figures -->\nafter\n")
    states = ("pagoda-ram", "pagoda-ssd")
    roofline.main(tmp_path, "llama-15m", (8, 16), states, rounds=1, layers=1, raw_mib=32, out=out, docs=page)
    result = json.loads(out.read_text())
    for state in states:
        for tokens in ("8", "16"):
            figures = result["figures"][state][tokens]
            assert figures["limit_s"] > 0
            assert figures["step_s"] > 0
            assert min(figures["raw"].values()) > 0
            assert (figures["bounds_s"]["SSD"] > 0) == (state == "pagoda-ssd")
    assert "all on SSD" in page.read_text()
    assert page.read_text().endswith("<!-- end of figures -->\nafter\n")
    assert (tmp_path / "roofline.png").stat().st_size > 1000
    assert {path.name for path in tmp_path.iterdir()} == {"roofline.md", "roofline.json", "roofline.png"}
