"""Random number generators go on where they were, also after a trip through JSON."""

import json
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from pagoda.checkpoint.rng import check_rng, restore_rng, rng_state
from pagoda.errors import CheckpointError

DRAWS: dict[str, Callable[[], list[float]]] = {
    "torch": lambda: torch.randn(17).tolist() + torch.rand(3, dtype=torch.float64).tolist(),
    "numpy": lambda: np.random.standard_normal(3).tolist() + np.random.rand(5).tolist(),
    "python": lambda: [random.gauss(0, 1), random.random(), float(random.getrandbits(40))],
}


@pytest.mark.parametrize("warm", [0, 1, 5])
@pytest.mark.parametrize("generator", DRAWS)
def test_numbers_drawn_after_a_restore_are_those_drawn_after_the_snapshot(generator: str, warm: int) -> None:
    before = rng_state()
    try:
        draw = DRAWS[generator]
        for _ in range(warm):  # an odd number of normals leaves one cached in NumPy and in Python
            draw()
        state = json.loads(json.dumps(rng_state()))
        expected = draw()
        assert draw() != expected
        restore_rng(state)
        assert draw() == expected
    finally:
        restore_rng(before)


def test_a_snapshot_changes_nothing() -> None:
    before = rng_state()
    assert rng_state() == before
    restore_rng(before)
    assert rng_state() == before


@pytest.mark.parametrize(
    "damage",
    [
        {"torch": "AAAA"},
        {"torch": 7},
        {"python": [3, [1, 2], None]},
        {"python": None},
        {"numpy": ["MT19937", [2**40], 0, 0, 0.0]},
        {"numpy": ["PCG64", [1], 0, 0, 0.0]},
        {"numpy": []},
    ],
    ids=str,
)
def test_a_state_that_cannot_be_restored_is_refused_and_changes_nothing(damage: dict[str, object]) -> None:
    before = rng_state()
    check_rng(before)
    with pytest.raises(CheckpointError, match="random number generators cannot be restored"):
        check_rng({**before, **damage})
    with pytest.raises(CheckpointError, match="random number generators cannot be restored"):
        check_rng({key: value for key, value in before.items() if key not in damage})
    assert rng_state() == before
