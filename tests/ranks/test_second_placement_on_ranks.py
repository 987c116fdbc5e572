"""Ranks choose homes again together, from what the rank that needs most has needed, and no bit changes."""

from typing import Any

import pytest
from zoo import assert_equal

from .ranks import RankServer
from .test_same_bits_on_ranks import alone


@pytest.mark.parametrize(
    ("stage", "kind"),
    [
        (3, "adapting-ssd"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, "adapting"), (2, "adapting-ssd"))),
    ],
)
def test_ranks_move_states_together(stage: int, kind: str, ranks: RankServer, once: Any) -> None:
    recipe = {"model": "llama", "precision": "fp32", "clip": 0.5, "steps": 5}
    results = once("train", 2, recipe=recipe, stage=stage, kind=kind)
    reference = alone(once, 2, recipe)
    for result in results:
        assert_equal(result["weights"], reference["weights"])
        assert_equal(result["states"], reference["states"])
        assert result["lines"]["device"]["exp_avg"] > 0
    assert results[0]["lines"] == results[1]["lines"]
