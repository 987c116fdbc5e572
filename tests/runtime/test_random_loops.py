"""Random loops have the bits of plain PyTorch, or else those of training in RAM.

`python tests/random_loops.py SEED` plays one of them again, and prints a shorter one that fails, too.
"""

from collections import Counter

import pytest
from random_loops import checked, drawn

pytestmark = pytest.mark.inline


def wrong_in(seeds: range) -> list[str]:
    found = {seed: checked(drawn(seed), Counter()) for seed in seeds}
    return [f"python tests/random_loops.py {seed}: {wrong}" for seed, wrong in found.items() if wrong is not None]


@pytest.mark.parametrize("first", range(0, 12, 3))
def test_random_loops_change_no_bit(first: int) -> None:
    assert wrong_in(range(first, first + 3)) == []


@pytest.mark.slow
@pytest.mark.parametrize("first", range(12, 3012, 12))
def test_more_random_loops_change_no_bit(first: int) -> None:
    assert wrong_in(range(first, first + 12)) == []
