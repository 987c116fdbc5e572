"""What a timeline says of its lanes."""

import pytest

from pagoda.simulate.timeline import TierUse, Timeline, TimelineSpan


@pytest.mark.parametrize(
    ("busy", "waits", "binds"),
    [
        ({"compute": 0.98, "ssd_write": 0.99}, {"update": 0.02, "ssd_write": 0.0}, "compute"),
        ({"compute": 0.8, "update": 0.3, "h2d": 0.5}, {"update": 0.15, "h2d": 0.05}, "update"),
        ({"compute": 0.9, "update": 0.3}, {"update": 0.03, "h2d": 0.03}, "compute"),
    ],
)
def test_the_lane_that_binds_is_the_one_that_compute_waits_for_most_if_it_waits_at_all(
    busy: dict[str, float], waits: dict[str, float], binds: str
) -> None:
    spans = tuple(TimelineSpan(lane, "work", 0.0, seconds) for lane, seconds in busy.items())
    assert Timeline(1.0, spans, waits).binding_lane == binds


def test_the_use_of_a_tier_is_its_mean_over_the_step_and_its_peak() -> None:
    held = {"host": ((0.0, 10), (1.0, 30), (3.0, 10)), "ssd": ((0.0, 5),)}
    uses = Timeline(4.0, (), {}, held).tier_use({"host": 40, "device": None, "ssd": 10})
    assert uses == {"host": TierUse(0.5, 0.75), "ssd": TierUse(0.5, 0.5)}
