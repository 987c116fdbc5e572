"""The package in random worlds: whatever the order of events, no wrong bit, no lost gradient, no endless wait."""

from collections.abc import Iterable

import pytest

from . import world
from .mutants import MUTANTS
from .noticing import kept_worlds, near, noticed
from .rules import Rules

pytestmark = pytest.mark.filterwarnings("ignore")
FIRST = sorted({*range(20), *kept_worlds().values()})
"""The first worlds, and those that notice a mutant first: each mutant is noticed by one of them."""
KINDS = [
    Rules.offloading,
    Rules.passing,
    Rules.failing_kernels,
    Rules.adapting,
    Rules.predicting,
    Rules.scaling,
]
BATCH = 20
PARTS = 48


def wrong_in(seeds: Iterable[int], rules: world.Change = Rules.as_drawn) -> list[str]:
    """What goes wrong in worlds of these seeds."""
    with world.alone():
        return [wrong for seed in seeds if (wrong := world.run(seed, rules=rules))]


@pytest.mark.parametrize("first", range(0, len(FIRST), BATCH))
def test_random_worlds_hold(first: int) -> None:
    assert wrong_in(FIRST[first : first + BATCH]) == []


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(20, 1000, 20))])
@pytest.mark.parametrize("rules", KINDS)
def test_random_worlds_of_a_kind_hold(rules: world.Change, first: int) -> None:
    assert wrong_in(range(first, first + 20), rules) == []


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 20_000, 100))
def test_more_random_worlds_hold(first: int) -> None:
    assert wrong_in(range(first, first + 100)) == []


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, PARTS))])
def test_the_worlds_that_noticed_a_mutant_first_still_do(part: int) -> None:
    """If one fails: `python -m tests.worlds.noticing --keep --lost` looks for another world."""
    kept = kept_worlds()
    assert kept.keys() == {mutant.breaks for mutant in MUTANTS}
    assert wrong_in(range(2)) == []  # imports and compiles what worlds need
    soon = MUTANTS[part::PARTS]
    with world.alone():
        assert [mutant.breaks for mutant in soon if not noticed(mutant, near(kept[mutant.breaks]))] == []


def test_the_same_seed_gives_the_same_world() -> None:
    """Nothing depends on addresses, clocks or the order of sets."""

    def told(seed: int) -> tuple[list[str], int]:
        one = world.World(seed, log=True)
        one.run()
        assert one.log is not None
        return one.log[1:], one.threads.turns

    with world.alone():
        for seed in range(2):
            assert told(seed) == told(seed)
