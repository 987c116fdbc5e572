"""The package in random worlds: whatever the order of events, no wrong bit, no lost gradient, no endless wait."""

import pytest

from . import world

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
