"""Random number generators go on where they were, also after a trip through JSON."""

import json
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from pagoda.checkpoint.rng import restore_rng, rng_state

DRAWS: dict[str, Callable[[], list[float]]] = {
    "torch": lambda: torch.randn(17).tolist() + torch.rand(3, dtype=torch.float64).tolist(),
    "numpy": lambda: np.random.standard_normal(3).tolist() + np.random.rand(5).tolist(),
    "python": lambda: [random.gauss(0, 1), random.random(), float(random.getrandbits(40))],
}


@pytest.mark.parametrize("generator", DRAWS)
def test_numbers_drawn_after_a_restore_are_those_drawn_after_the_snapshot(generator: str) -> None:
    before = rng_state()
    try:
        draw = DRAWS[generator]
        draw()  # an odd number of normals leaves one cached in NumPy and in Python
        state = json.loads(json.dumps(rng_state()))
        expected = draw()
        assert draw() != expected
        restore_rng(state)
        assert draw() == expected
    finally:
        restore_rng(before)
