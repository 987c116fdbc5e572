"""What ranks foresee runs with nothing said before it. Ranks that are out of step neither hang nor meet in the wrong
collective."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from pagoda.distributed.agreement import Call, CollectiveKind
from pagoda.distributed.foreseen import Entry, Foreseen
from pagoda.distributed.mesh import Mesh
from pagoda.distributed.world import World
from pagoda.errors import RankError, UsageError
from pagoda.plan.ranks import Ranks
from pagoda.runtime import collective
from pagoda.runtime.collective import Collectives
from pagoda.runtime.device import Device
from pagoda.runtime.lanes import Handle

from .test_agreement import FakeWire, Table

Event = tuple[str, int]
"""What compute does: "gather" or "reduce" a unit, "read" something together, "evaluate" a unit."""
UNITS = 5


class CountingWire(FakeWire):
    """A transport that counts what is said."""

    said = 0
    broken = False

    def announce(self, numbers: Sequence[int]) -> list[list[int]]:
        self.said += 1
        return super().announce(numbers)


class Rank(threading.Thread):
    """A rank, whose compute does the same as a real one, and whose collectives meet those of all others and say what
    they are about. A unit is due at its own place in the trace, forward and then backward."""

    def __init__(self, rank: int, said: Table, met: Table, steps: Sequence[Sequence[Event]]) -> None:
        super().__init__(daemon=True)
        size = len(said.rows)
        self.transport = CountingWire(said, rank)
        self._transport: Any = FakeWire(met, rank)
        self._steps = steps
        self.log: list[tuple[str, int, bool]] = []
        """(kind, unit, whether this rank had a use for it) of each collective."""
        self.alone: list[int] = []
        """Units that it got from services."""
        self.said_in_step: list[int] = []
        self.error: BaseException | None = None
        transport: Any = self.transport
        everyone = tuple(range(size))
        shards: Any = type("Shards", (), {"family": lambda *_: frozenset(everyone), "sharers": lambda *_: everyone})()
        order = type("Order", (), {"trace": "trace", "position": 0})()
        self._scheduler: Any = type("Scheduler", (), {"order": order})()
        units: Any = [type("Unit", (), {"version": 0, "spec": unit, "index": unit})() for unit in range(UNITS)]
        mesh = Mesh(World(rank, size), Ranks(size, size))
        self._collectives = Collectives(mesh, transport, shards, Device(), units, self._scheduler)
        for kind in (CollectiveKind.GATHER, CollectiveKind.REDUCE):
            name = kind.name.lower()
            self._collectives.serve(kind, lambda unit, _, name=name: self._meet(name, unit.index, mine=False))

    def run(self) -> None:
        try:
            for events in self._steps:
                self._step(events)
        except BaseException as error:
            self.error = error
        self._collectives.close()

    def _step(self, events: Sequence[Event]) -> None:
        before = self.transport.said
        self._scheduler.order.position = 0
        handles = []
        for kind, about in events:
            if kind == "read":
                self._collectives.on_all_ranks(f"reading {about}", lambda _: None)
                continue
            self._collectives.begin_access(recorded=kind != "evaluate")
            if kind != "evaluate":
                place = about if kind == "gather" else 2 * UNITS - about
                self._scheduler.order.position = max(self._scheduler.order.position, place)
            kind = CollectiveKind.REDUCE if kind == "reduce" else CollectiveKind.GATHER
            work = self._work(kind.name.lower(), about)
            handles.append(self._collectives.submit(Call(kind, about), work, ()))
        for handle in handles:
            handle.wait()
        self._collectives.on_all_ranks("optimizer.step()", lambda _: None, step=True)
        self.said_in_step.append(self.transport.said - before)

    def _work(self, kind: str, unit: int) -> Callable[[bool], None]:
        def work(together: bool) -> None:
            if together or kind == "reduce":
                self._meet(kind, unit, mine=True)
            else:
                self.alone.append(unit)

        return work

    def _meet(self, kind: str, unit: int, mine: bool) -> None:
        found = {tuple(row) for row in self._transport.announce([kind == "gather", unit])}
        assert found == {(kind == "gather", unit)}, f"{found} have met"
        self.log.append((kind, unit, mine))


def play(by_rank: Sequence[Sequence[Sequence[Event]]]) -> list[Rank]:
    """What each rank took part in; `by_rank` has the events of each step."""
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


def gathers(*units: int) -> list[Event]:
    return [("gather", unit) for unit in units]


def reduces(*units: int) -> list[Event]:
    return [("reduce", unit) for unit in units]


USUAL = [*gathers(0, 1, 2, 3), *reduces(3, 2, 1, 0)]


def kinds(rank: Rank) -> list[tuple[str, int]]:
    return [(kind, unit) for kind, unit, _ in rank.log]


def test_once_all_ranks_have_had_the_same_step_its_beginning_and_its_end_are_said() -> None:
    for rank in play([[USUAL] * 3] * 3):
        assert rank.error is None
        assert rank.said_in_step == [len(USUAL) + 2, 2, 2]
        assert kinds(rank) == 3 * USUAL
        assert not rank.alone


def test_a_rank_that_leaves_units_out_takes_part_with_nothing_said_and_the_others_go_on() -> None:
    short = [*gathers(0, 2, 3), *reduces(3, 1, 0)]
    first, second = play([[USUAL] * 4, [USUAL, short, USUAL, USUAL]])
    assert first.said_in_step == second.said_in_step == [len(USUAL) + 2, 2, 2, 2]
    assert kinds(first) == kinds(second) == 4 * USUAL
    left_out = [(kind, unit) for kind, unit, mine in second.log if not mine]
    assert left_out == [("gather", 1), ("reduce", 2)]


def test_a_rank_without_a_batch_serves_the_others() -> None:
    first, second = play([[USUAL] * 3, [USUAL, [], USUAL]])
    assert first.error is second.error is None
    assert [event for event in kinds(first) if event[0] == "reduce"] == 3 * reduces(3, 2, 1, 0)
    assert kinds(first) == kinds(second)
    assert first.alone == [0, 1, 2, 3]


def test_what_only_one_rank_needs_does_not_move_it_in_the_list() -> None:
    other = [*gathers(0, 1, 4, 2, 3), *reduces(3, 2, 1, 0)]
    first, second = play([[USUAL] * 4, [USUAL, other, other, USUAL]])
    assert second.alone == [4, 4]
    assert first.said_in_step == second.said_in_step == [len(USUAL) + 2, 2, 2, 2]
    assert kinds(first) == kinds(second) == 4 * USUAL


def test_a_gradient_that_only_one_rank_has_is_reduced_when_the_others_have_come_to_the_end() -> None:
    other = [*gathers(0, 1, 2, 3), *reduces(4, 3, 2, 1, 0)]
    first, second = play([[USUAL] * 2, [USUAL, other]])
    assert first.error is second.error is None
    assert kinds(first) == kinds(second)
    assert [unit for kind, unit, mine in second.log if mine and kind == "reduce"][4:] == [4, 3, 2, 1, 0]
    assert [unit for kind, unit, mine in first.log if mine and kind == "reduce"][4:] == [3, 2, 1, 0]


def test_what_ranks_do_jointly_in_a_step_is_never_passed_over() -> None:
    step = [*gathers(0, 1), ("read", 0), *gathers(2), *reduces(2, 1, 0)]
    for rank in play([[step] * 3] * 2):
        assert rank.error is None
        assert rank.said_in_step == [len(step) + 2, 3, 3]
    without = [event for event in step if event[0] != "read"]
    for rank in play([[step] * 2, [step, without]]):
        assert isinstance(rank.error, UsageError)
        assert "Ranks are at different points" in str(rank.error)


def test_a_rank_that_evaluates_alone_is_served_and_then_all_follow_the_list() -> None:
    evaluation: list[Event] = [("evaluate", unit) for unit in (0, 1, 2, 3)] * 2
    first, second = play([[USUAL] * 3, [USUAL, [*evaluation, *USUAL], USUAL]])
    assert first.error is second.error is None
    assert kinds(first) == kinds(second) == 3 * USUAL
    assert second.alone == [0, 1, 2, 3] * 2
    assert first.said_in_step[2] == second.said_in_step[2] == 2


def test_ranks_that_evaluate_together_gather_together() -> None:
    evaluation: list[Event] = [("evaluate", unit) for unit in (0, 1, 2, 3)]
    for rank in play([[USUAL, [*evaluation, *USUAL]]] * 2):
        assert rank.error is None
        assert not rank.alone


@st.composite
def worlds(draw: st.DrawFn) -> list[list[list[Event]]]:
    """Steps of each rank: mostly the usual one, else one with events left out, in another order, or twice."""
    ranks, steps = draw(st.integers(2, 4)), draw(st.integers(1, 6))
    any_event = st.tuples(st.sampled_from(["gather", "reduce", "evaluate"]), st.integers(0, UNITS - 1))
    step = st.one_of(
        st.just(USUAL), st.just(USUAL), st.just(USUAL), st.just([]), st.just(2 * USUAL), st.lists(any_event, max_size=8)
    )
    return [[draw(step) for _ in range(steps)] for _ in range(ranks)]


@settings(deadline=None, max_examples=40)
@given(worlds())
def test_ranks_out_of_step_never_hang_and_reduce_each_gradient_once(world: list[list[list[Event]]]) -> None:
    ranks = play(world)
    assert [rank.error for rank in ranks] == [None] * len(ranks)
    assert len({tuple(kinds(rank)) for rank in ranks}) == 1
    for rank, steps in zip(ranks, world, strict=True):
        mine = [unit for kind, unit, mine in rank.log if mine and kind == "reduce"]
        assert mine == [unit for events in steps for kind, unit in events if kind == "reduce"]
        gathered = [unit for kind, unit, mine in rank.log if mine and kind == "gather"]
        wanted = [unit for events in steps for kind, unit in events if kind != "reduce"]
        assert sorted(gathered + rank.alone) == sorted(wanted)


@pytest.mark.parametrize("kind", ["gather", "reduce"])
def test_a_rank_that_fails_takes_part_to_the_end_of_the_list_and_stops_the_others(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = threading.Event()
    original = Collectives.submit

    def failing(self: Collectives, call: Call, work: Any, after: Any, *more: Any) -> Any:
        if fails.is_set() and self.transport.rank == 1 and call.kind.name.lower() == kind and call.about == 2:
            after = [Handle("ssd_read")]
            after[0].finish(OSError("the drive is gone"))
        if call.kind is CollectiveKind.REDUCE and call.about == 0:
            fails.set()  # from the second step on
        return original(self, call, work, after, *more)

    monkeypatch.setattr(Collectives, "submit", failing)
    first, second = play([[USUAL] * 3] * 2)
    assert isinstance(second.error, OSError)
    assert isinstance(first.error, RankError)
    assert "Rank 1 has failed" in str(first.error)


def test_a_failed_update_of_weights_that_all_share_stops_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    shared: list[int] = []

    def share(self: Rank) -> None:
        self._collectives.serve(CollectiveKind.SHARE, lambda unit, _: self._meet("share", unit.index, mine=False))
        updated = Handle("ssd_write")
        updated.finish(OSError("the drive is gone") if self.transport.rank == 1 else None)
        work = lambda _: (self._meet("share", 0, mine=True), shared.append(self.transport.rank))  # noqa: E731
        self._collectives.submit(Call(CollectiveKind.SHARE, 0), work, (updated,), alike=True).wait()

    step = Rank._step
    monkeypatch.setattr(Rank, "_step", lambda self, events: (step(self, events), share(self)))
    first, second = play([[USUAL] * 2] * 2)
    assert shared == [0]
    assert isinstance(second.error, OSError)
    assert isinstance(first.error, RankError)
    assert "Rank 1 has failed" in str(first.error)


def entry(kind: CollectiveKind, about: int, due: int = 0) -> Entry:
    return Entry(kind, about, 0, due)


def follow(entries: Sequence[Entry]) -> Foreseen:
    """A list of a step that has just begun."""
    foreseen = Foreseen()
    foreseen.hashes("trace", 0)
    foreseen.follow(None)
    for each in entries:
        assert foreseen.claim(each) is None
    foreseen.end(whole=True)
    foreseen.follow(0)
    return foreseen


def test_what_is_not_due_yet_is_not_claimed() -> None:
    foreseen = follow(
        [entry(CollectiveKind.GATHER, 5, 1), entry(CollectiveKind.GATHER, 6, 2), entry(CollectiveKind.GATHER, 7, 9)]
    )
    assert foreseen.claim(entry(CollectiveKind.GATHER, 7, 3)) is None
    assert foreseen.claim(entry(CollectiveKind.GATHER, 6, 3)) == (entry(CollectiveKind.GATHER, 5),)
    assert foreseen.rest() == (entry(CollectiveKind.GATHER, 7),)


def test_weights_after_an_update_are_not_those_before() -> None:
    foreseen = follow([entry(CollectiveKind.GATHER, 5)])
    assert foreseen.claim(Entry(CollectiveKind.GATHER, 5, 1, 0)) is None
    assert foreseen.claim(entry(CollectiveKind.GATHER, 5)) == ()


def test_lists_of_another_trace_are_forgotten_and_other_updates_make_another_list() -> None:
    foreseen = follow([entry(CollectiveKind.GATHER, 5)])
    first, _ = foreseen.hashes("trace", 0)
    assert first != 0
    assert foreseen.hashes("trace", 1)[0] not in (0, first)
    assert foreseen.hashes("another trace", 0) == [0, 0]


def test_a_rank_that_departs_once_still_has_the_list_that_all_had() -> None:
    foreseen = follow([entry(CollectiveKind.GATHER, 5)])
    of_all = foreseen.hashes("trace", 0)[0]
    foreseen.claim(entry(CollectiveKind.GATHER, 6))
    foreseen.end(whole=True)
    departed, known = foreseen.hashes("trace", 0)
    assert departed != of_all
    assert known == of_all
