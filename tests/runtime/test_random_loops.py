"""Random loops have the bits of plain PyTorch, or else those of training in RAM.

`python tests/random_loops.py SEED` plays one of them again, and prints a shorter one that fails, too.
"""

from collections import Counter

import pytest
from random_loops import PASSES, USUAL, Case, checked, drawn

pytestmark = pytest.mark.inline


def wrong_in(seeds: range) -> list[str]:
    found = {seed: checked(drawn(seed), Counter()) for seed in seeds}
    return [f"python tests/random_loops.py {seed}: {wrong}" for seed, wrong in found.items() if wrong is not None]


@pytest.mark.parametrize("number", range(len(PASSES)), ids=[*PASSES])
def test_each_kind_of_pass_is_possible_and_has_the_bits_of_torch_alone(number: int) -> None:
    """Weights are read from SSD, or copied to another memory."""
    settings = USUAL | {"activations": ("keep", "recompute", "offload")[number % 3], "inline": False}
    case = Case(
        0, ("deep", "linear", "linear"), "sgd", ("ssd", "device")[number % 2], settings, ([*PASSES][number],) * 3
    )
    refused = Counter[str]()
    assert case.is_plain
    assert checked(case, refused) is None
    assert not refused


@pytest.mark.parametrize("first", range(0, 6, 3))
def test_random_loops_change_no_bit(first: int) -> None:
    assert wrong_in(range(first, first + 3)) == []


@pytest.mark.slow
@pytest.mark.parametrize("first", range(6, 3006, 12))
def test_more_random_loops_change_no_bit(first: int) -> None:
    assert wrong_in(range(first, first + 12)) == []
