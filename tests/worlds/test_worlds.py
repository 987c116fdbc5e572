"""The package in random worlds: whatever the order of events, no wrong bit, no lost gradient, no endless wait."""

import pytest

from tests.schedule.mutants import MUTANTS

from . import world
from .mutants import noticed

pytestmark = pytest.mark.filterwarnings("ignore")
BATCH = 50


def wrong_in(seeds: range) -> list[str]:
    """What goes wrong in worlds of these seeds."""
    with world.alone():
        return [wrong for seed in seeds if (wrong := world.run(seed))]


@pytest.mark.parametrize("first", range(0, 300, BATCH))
def test_random_worlds_hold(first: int) -> None:
    assert wrong_in(range(first, first + BATCH)) == []


@pytest.mark.slow
@pytest.mark.parametrize("first", range(300, 20_000, 100))
def test_more_random_worlds_hold(first: int) -> None:
    assert wrong_in(range(first, first + 100)) == []


@pytest.mark.parametrize(
    "breaks",
    [
        "a lease stays when the weights change",
        "a fetch does not wait for the update",
        "frames that something refers to are free",
        "old leases outlive what has been overwritten",
    ],
)
def test_worlds_notice_wrong_values(breaks: str) -> None:
    (mutant,) = (each for each in MUTANTS if each.breaks == breaks)
    assert wrong_in(range(2)) == []  # imports and compiles what worlds need
    found = noticed(mutant, worlds=20)
    assert found is not None
    assert " reads " in found[1] or "a view of" in found[1]


def test_the_same_seed_gives_the_same_world() -> None:
    """Nothing depends on addresses, clocks or the order of sets."""

    def told(seed: int) -> tuple[list[str], int]:
        one = world.World(seed, log=True)
        one.run()
        assert one.log is not None
        return one.log[1:], one.threads.turns

    with world.alone():
        for seed in range(5):
            assert told(seed) == told(seed)
