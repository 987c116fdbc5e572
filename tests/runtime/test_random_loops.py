"""Random loops have the bits of plain PyTorch, or those of training in RAM, and what they cannot do is refused by name.

`python tests/random_loops.py SEED` plays one of them again, and prints a shorter one that fails, too.
"""

from collections import Counter

import pytest
from random_loops import checked, drawn


def wrong_in(seeds: range) -> list[str]:
    return [f"python tests/random_loops.py {seed}: {wrong}" for seed in seeds if (wrong := checked(drawn(seed), Counter()))]


@pytest.mark.inline
@pytest.mark.parametrize("first", range(0, 12, 3))
def test_random_loops_change_no_bit(first: int) -> None:
    assert wrong_in(range(first, first + 3)) == []


@pytest.mark.slow
@pytest.mark.inline
@pytest.mark.parametrize("first", range(12, 3000, 12))
def test_more_random_loops_change_no_bit(first: int) -> None:
    assert wrong_in(range(first, first + 12)) == []
