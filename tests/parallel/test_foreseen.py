"""What ranks foresee runs with nothing said before, and ranks that are out of step neither hang nor meet another one's
collective."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda.parallel.agreement import Asks, Call
from pagoda.parallel.foreseen import Foreseen
from pagoda.parallel.mesh import Mesh
from pagoda.parallel.world import World
from pagoda.plan.ranks import Ranks
from pagoda.runtime import collective
from pagoda.runtime.collective import Collectives
from pagoda.runtime.device import Device

from .test_agreement import FakeWire, Table


class CountingWire(FakeWire):
    """A wire that counts what is said."""

    said = 0

    def announce(self, numbers: Sequence[int]) -> list[list[int]]:
        self.said += 1
        return super().announce(numbers)


class Rank(threading.Thread):
    """A rank that reduces some units in each step. A reduction meets those of all others, and says what it is about."""

    def __init__(self, rank: int, said: Table, met: Table, steps: Sequence[Sequence[int]]) -> None:
        super().__init__(daemon=True)
        size = len(said.rows)
        self.wire = CountingWire(said, rank)
        self._transport: Any = FakeWire(met, rank)
        self._steps = steps
        self.log: list[tuple[int, bool]] = []
        """(unit, whether this rank had a gradient of it) of each reduction."""
        self.said_in_step: list[int] = []
        wire: Any = self.wire
        shards: Any = type("Shards", (), {"family_of": lambda _, __: frozenset(range(size))})()
        self._collectives = Collectives(Mesh(World(rank, size), Ranks(size, size)), wire, shards, Device())
        self._collectives.take_part = lambda unit: self._meet(unit, mine=False)
        self._collectives.serve(Asks.REDUCE, lambda call, _: self._meet(call.about, mine=False))

    def run(self) -> None:
        for units in self._steps:
            before = self.wire.said
            told: set[int] = set()
            for unit in units:
                self._collectives.reduce(
                    Call(Asks.REDUCE, unit),
                    lambda unit=unit: self._meet(unit, mine=True),
                    (),
                    0,
                    "",  # type: ignore[misc]
                )
            foreseen = self._collectives.foreseen
            self._collectives.jointly(
                "optimizer.step()",
                lambda calls, told=told: told.update(call.version for call in calls),  # type: ignore[misc]
                foreseen.signature,
            )
            foreseen.end_step(len(told) == 1)
            self.said_in_step.append(self.wire.said - before)
        self._collectives.close()

    def _meet(self, unit: int, mine: bool) -> None:
        units = {row[0] for row in self._transport.announce([unit])}
        assert units == {unit}, f"reductions of {units} have met"
        self.log.append((unit, mine))


def play(by_rank: Sequence[Sequence[Sequence[int]]]) -> list[Rank]:
    """What each rank took part in; `by_rank` has the units of each step."""
    said, met = Table(len(by_rank)), Table(len(by_rank))
    ranks = [Rank(rank, said, met, steps) for rank, steps in enumerate(by_rank)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(30)
        assert not rank.is_alive(), "a rank hangs"
    return ranks


@pytest.fixture(autouse=True)
def no_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective, "Group", lambda *_: None)


USUAL = [3, 2, 1, 0]


@st.composite
def worlds(draw: st.DrawFn) -> list[list[list[int]]]:
    """Steps of each rank: mostly the usual one, else one with units left out, in another order, or twice."""
    ranks, steps = draw(st.integers(2, 4)), draw(st.integers(1, 6))
    other = st.lists(st.integers(0, 4), max_size=8)
    step = st.one_of(st.just(USUAL), st.just(USUAL), st.just(USUAL), st.just([]), st.just(2 * USUAL), other)
    return [[draw(step) for _ in range(steps)] for _ in range(ranks)]


@settings(deadline=None, max_examples=60)
@given(worlds())
def test_ranks_out_of_step_take_part_in_the_same_reductions_and_each_of_theirs_once(
    world: list[list[list[int]]],
) -> None:
    ranks = play(world)
    assert len({tuple(unit for unit, _ in rank.log) for rank in ranks}) == 1
    for rank, steps in zip(ranks, world, strict=True):
        assert [unit for unit, mine in rank.log if mine] == [unit for units in steps for unit in units]


def test_once_all_ranks_have_had_the_same_step_only_its_end_is_said() -> None:
    for rank in play([[USUAL] * 3] * 3):
        assert rank.said_in_step == [len(USUAL) + 1, 1, 1]


def test_a_step_that_is_new_to_all_is_foreseen_once_they_have_had_it_twice() -> None:
    new = [0, 1]
    for rank in play([[USUAL, new, new, new]] * 2):
        assert rank.said_in_step == [5, 2, 2, 1]


def test_a_rank_that_leaves_a_unit_out_passes_over_it_with_nothing_said() -> None:
    ranks = play([[USUAL] * 3, [USUAL, [3, 1, 0], []]])
    for rank in ranks:
        assert rank.said_in_step == [5, 1, 1]
        assert [unit for unit, _ in rank.log] == 3 * USUAL
    assert [mine for _, mine in ranks[1].log] == 4 * [True] + [True, False, True, True] + 4 * [False]


def test_what_comes_too_early_is_not_in_the_list_and_does_not_move_the_place_in_it() -> None:
    foreseen = Foreseen()
    for unit, now in ((5, 1), (6, 2), (7, 9)):
        assert foreseen.claim(unit, now) is None
    foreseen.end_step(agreed=True)
    assert foreseen.claim(7, 3) is None
    assert foreseen.claim(6, 3) == [5]
    assert foreseen.overdue(8) == []
    assert foreseen.overdue(9) == [7]
    assert foreseen.passed == 2


def test_the_list_changes_only_when_all_ranks_had_the_same_step() -> None:
    foreseen = Foreseen()
    foreseen.claim(5, 1)
    foreseen.end_step(agreed=True)
    for _ in range(3):
        foreseen.claim(6, 1)
        foreseen.end_step(agreed=False)
    assert foreseen.claim(5, 1) == []
