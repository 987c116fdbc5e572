"""Ranks agree on what comes next, with nothing said of what all foresee. Those that are out of step neither hang nor
meet in the wrong collective."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from pagoda.errors import RankError, UsageError
from pagoda.ranks.order import FIRST, Call, CollectiveKind, CollectiveOrder, ProgramPart, Section

from .wire import FakeWire, Table

Event = tuple[str, Any]
"""What compute does: "gather", "reduce" or "evaluate" a unit, "read" something together, "end" a forward or backward
(its number, and of how many ends of that forward), "drop" gradients (True: it has made some), "fail" at what the event
is about, "leave"."""
UNITS = 5
KINDS = {kind.name.lower(): kind for kind in CollectiveKind}


class Rank(threading.Thread):
    """A rank, whose collectives meet those of all others and say what they are about. A unit is due at its own place in
    the trace, forward and then backward."""

    def __init__(self, rank: int, said: Table, met: Table, steps: Sequence[Sequence[Event]], listed: bool) -> None:
        super().__init__(daemon=True)
        self.wire, self.met = FakeWire(said, rank), FakeWire(met, rank)
        self.steps = steps
        self.log: list[tuple[str, int, bool]] = []
        """(kind, unit, whether this rank had a use for it) of each collective."""
        self.alone: list[int] = []
        """Units that it got by itself."""
        self.said_in_step: list[int] = []
        self.error: BaseException | None = None
        transport: Any = self.wire
        everyone = range(len(said.rows))

        def take_part(kind: CollectiveKind, unit: int, _: int | None) -> None:
            if kind is CollectiveKind.DROP:
                self.log.append(("drop", 0, False))
            else:
                self.meet(kind.name.lower(), unit, mine=False)

        self.order = CollectiveOrder(transport, take_part, lambda _: everyone, lambda _: everyone, listed)

    def run(self) -> None:
        try:
            for events in self.steps:
                before = self.wire.said
                self.step(events)
                self.said_in_step.append(self.wire.said - before)
            self.order.close()
        except BaseException as error:
            self.error = error

    def step(self, events: Sequence[Event]) -> None:
        part, position, section = ProgramPart(0, "trace", (0,) * UNITS), 0, FIRST
        for kind, about in events:
            fails = kind == "fail"
            kind, about = about if fails else (kind, about)
            if kind == "leave":
                raise SystemExit(self.order.close())
            if kind == "read":
                self.order.come_together(together(f"reading {about}", position), part, False)
                continue
            if kind == "drop":
                self.order.drop(Call(KINDS[kind], section=section)) if about else self.order.leave(whole=False)
                section = Section(section.drops + 1)
                part = ProgramPart(0, "trace", (0,) * UNITS)
                if about:
                    self.log.append((kind, 0, True))
                continue
            if kind == "end":
                section = Section(section.drops, *about)
                part = replace(part, section=section)
                self.order.begin(part)
                continue
            wanted = None if kind == "evaluate" else 1
            if part.number not in (1, wanted):
                part = ProgramPart(wanted, "trace", (0,) * UNITS, section)
            if kind in ("gather", "reduce"):
                position = max(position, about if kind == "gather" else 2 * UNITS - about)
            call = Call(KINDS.get(kind, CollectiveKind.GATHER), about, position=position, section=section)
            if fails:
                self.order.fail(call, part, alike=False)
                raise OSError("the drive is gone")
            if self.order.come_to(call, part) or kind == "reduce":
                self.meet(call.kind.name.lower(), about, mine=True)
            else:
                self.alone.append(about)
        self.order.come_together(together("optimizer.step()"), part, True)

    def meet(self, kind: str, unit: int, mine: bool) -> None:
        assert {*self.met.announce((kind, unit))} == {(kind, unit)}, "others have met in something else"
        self.log.append((kind, unit, mine))

    @property
    def kinds(self) -> list[Event]:
        return [(kind, unit) for kind, unit, _ in self.log]


def together(what: str, position: int = 0) -> Call:
    return Call(CollectiveKind.ON_ALL_RANKS, what=what, position=position)


def play(by_rank: Sequence[Sequence[Sequence[Event]]], listed: bool = True) -> list[Rank]:
    """What each rank took part in; `by_rank` has the events of each step."""
    said, met = Table(len(by_rank)), Table(len(by_rank))
    ranks = [Rank(rank, said, met, steps, listed) for rank, steps in enumerate(by_rank)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(30)
        assert not rank.is_alive(), "a rank hangs"
    return ranks


def gathers(*units: int) -> list[Event]:
    return [("gather", unit) for unit in units]


def reduces(*units: int) -> list[Event]:
    return [("reduce", unit) for unit in units]


USUAL = [*gathers(0, 1, 2, 3), *reduces(3, 2, 1, 0)]


# --- with a list --------------------------------------------------------------------------------------------


def test_once_all_ranks_have_had_the_same_step_its_beginning_and_its_end_are_said() -> None:
    for rank in play([[USUAL] * 3] * 3):
        assert rank.error is None
        assert rank.said_in_step == [len(USUAL) + 2, 2, 2]
        assert rank.kinds == 3 * USUAL
        assert not rank.alone


def test_a_rank_that_leaves_units_out_takes_part_with_nothing_said_and_the_others_go_on() -> None:
    short = [*gathers(0, 2, 3), *reduces(3, 1, 0)]
    first, second = play([[USUAL] * 4, [USUAL, short, USUAL, USUAL]])
    assert first.said_in_step == second.said_in_step == [len(USUAL) + 2, 2, 2, 2]
    assert first.kinds == second.kinds == 4 * USUAL
    assert [(kind, unit) for kind, unit, mine in second.log if not mine] == [("gather", 1), ("reduce", 2)]


EVALUATION: list[Event] = [("evaluate", unit) for unit in (0, 1, 2, 3)]
DEPARTURES: dict[str, tuple[list[list[Event]], list[int], list[int]]] = {
    "it has no batch": ([USUAL, [], USUAL], [0, 1, 2, 3], []),
    "it has another batch": ([USUAL, 2 * USUAL], [], [0, 1, 2, 3]),
    "it alone needs a unit": ([USUAL, *[[*gathers(0, 1, 4, 2, 3), *reduces(3, 2, 1, 0)]] * 2, USUAL], [], [4, 4]),
    "it evaluates alone": ([USUAL, [*EVALUATION * 2, *USUAL], USUAL], [], [0, 1, 2, 3] * 2),
}
"""What a rank does -> its steps, and what the other rank, and it, get by themselves."""


@pytest.mark.parametrize("how", DEPARTURES)
def test_a_rank_that_departs_is_served_or_serves_and_then_all_follow_the_list(how: str) -> None:
    steps, firsts, seconds = DEPARTURES[how]
    first, second = play([[USUAL] * len(steps), steps])
    assert first.error is second.error is None
    assert first.kinds == second.kinds
    assert (first.alone, second.alone) == (firsts, seconds)
    assert second.order.served == len(firsts)
    if "batch" not in how:
        assert first.kinds == len(steps) * USUAL
        assert first.said_in_step[-1] == second.said_in_step[-1] == 2


@pytest.mark.parametrize("listed", [True, False])
def test_gradients_of_a_backward_do_not_meet_those_of_the_next(listed: bool) -> None:
    """Also if a rank does nothing in a pass, and has begun the next."""
    passes = [
        [*gathers(0, 1), ("end", (number, 1)), *reduces(1, 0), ("end", (number, 2)), ("evaluate", 2)]
        for number in (1, 2)
    ]
    idle: list[Event] = [("end", (1, 1)), ("end", (1, 2))]
    first, second = play([[[*passes[0], *passes[1]]] * 3, [[*idle, *passes[1]]] * 3], listed)
    assert first.error is second.error is None
    assert first.kinds == second.kinds
    assert [mine for kind, _, mine in first.log if kind == "reduce"] == 3 * [True, True, True, True]
    assert [mine for kind, _, mine in second.log if kind == "reduce"] == 3 * [False, False, True, True]


def test_what_ranks_do_jointly_in_a_step_is_never_passed_over() -> None:
    step = [*gathers(0, 1), ("read", 0), *gathers(2), *reduces(2, 1, 0)]
    for rank in play([[step] * 3] * 2):
        assert rank.error is None
        assert rank.said_in_step == [len(step) + 2, 3, 3]
    without = [event for event in step if event[0] != "read"]
    for rank in play([[step] * 2, [step, without]]):
        assert isinstance(rank.error, UsageError)
        assert "Ranks are at different points" in str(rank.error)


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("others", [[], [("drop", False)], [*gathers(0, 1), ("drop", False)]])
def test_gradients_that_some_ranks_have_made_are_dropped_before_the_next_ones_of_all(
    others: list[Event], listed: bool
) -> None:
    """Also if the others have said nothing, because their forwards have failed, and have gone on."""
    dropping = [*gathers(0, 1, 2, 3), *reduces(3, 2), ("drop", True), *USUAL]
    steps = [[USUAL, dropping, USUAL], [USUAL, [*(others or dropping[: -len(USUAL)]), *USUAL], USUAL]]
    first, second = play(steps, listed)
    assert first.error is second.error is None
    assert first.kinds == second.kinds
    gradients = [kind for kind in first.kinds if kind[0] != "gather"]
    assert ("drop", 0) in gradients[4:-8]
    assert gradients[-8:] == 2 * reduces(3, 2, 1, 0)


def test_ranks_of_which_one_drops_gradients_that_the_other_steps_with_are_told() -> None:
    for rank in play([[[*reduces(1), ("drop", True)]], [reduces(1)]]):
        assert isinstance(rank.error, UsageError)
        assert "rank 0 is at optimizer.zero_grad() with gradients" in str(rank.error)


def test_ranks_that_evaluate_together_gather_together() -> None:
    for rank in play([[USUAL, [*EVALUATION, *USUAL]]] * 2):
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


@settings(deadline=None, max_examples=25)
@given(worlds(), st.booleans())
def test_ranks_out_of_step_never_hang_and_reduce_each_gradient_once(
    world: list[list[list[Event]]], listed: bool
) -> None:
    ranks = play(world, listed)
    assert [rank.error for rank in ranks] == [None] * len(ranks)
    assert len({tuple(rank.kinds) for rank in ranks}) == 1
    for rank, steps in zip(ranks, world, strict=True):
        mine = [unit for kind, unit, mine in rank.log if mine and kind == "reduce"]
        assert mine == [unit for events in steps for kind, unit in events if kind == "reduce"]
        gathered = [unit for kind, unit, mine in rank.log if mine and kind == "gather"]
        wanted = [unit for events in steps for kind, unit in events if kind != "reduce"]
        assert sorted(gathered + rank.alone) == sorted(wanted)


def followed(*entries: Call) -> CollectiveOrder:
    """The order of one rank, which has had a step with these collectives."""
    wire: Any = FakeWire(Table(1))
    order = CollectiveOrder(wire, lambda *_: None, lambda _: (0,), lambda _: (0,))
    step_of(order, *entries)
    return order


def step_of(order: CollectiveOrder, *entries: Call, trace: str = "trace") -> list[bool]:
    """Whether the rank came to each of these collectives with the others, and how often it said something."""
    part = ProgramPart(1, trace, (0,) * UNITS)
    found = [order.come_to(entry, part) for entry in entries]
    order.come_together(together("optimizer.step()"), part, True)
    return found


def weights(unit: int, position: int = 0, version: int = 0) -> Call:
    return Call(CollectiveKind.GATHER, unit, version=version, position=position)


def test_what_is_not_due_yet_is_not_come_to() -> None:
    order = followed(weights(1, 1), weights(2, 2), weights(3, 9))
    assert step_of(order, weights(3, 3), weights(2, 3)) == [False, True]
    assert order.asked == 1
    assert order.served == 2  # the first on the way, the last at the end


def test_gradients_are_those_of_the_list_wherever_compute_counts_itself_in_the_trace() -> None:
    """In a step whose first pass looks like the second one of the trace, a second pass comes at an earlier place."""

    def reductions(first: int, second: int) -> list[Call]:
        return [Call(CollectiveKind.REDUCE, 1, position=position) for position in (first, second)]

    order = followed(*reductions(6, 14))
    step_of(order, *reductions(14, 6))
    assert order.served == 0


def test_a_list_of_another_trace_or_after_another_number_of_updates_is_not_followed() -> None:
    order = followed(weights(1), weights(2))
    wire: Any = order._transport
    for said, trace in ((2, "trace"), (4, "another"), (2, "another")):
        before = wire.said
        step_of(order, weights(1), weights(2), trace=trace)
        assert wire.said - before == said


def test_a_rank_that_departs_once_still_has_the_list_that_all_had() -> None:
    order = followed(weights(1))
    assert step_of(order, weights(1)) == [True]
    assert step_of(order, weights(2), weights(1)) == [False, True]
    assert step_of(order, weights(1)) == [True]
    assert order.asked == 1


# --- without one --------------------------------------------------------------------------------------------


def test_ranks_that_want_the_same_do_not_serve_each_other() -> None:
    for rank in play([[[*gathers(3), *reduces(3)]]] * 3, listed=False):
        assert rank.log == [("gather", 3, True), ("reduce", 3, True)]


def test_ranks_that_want_weights_get_them_before_others_reduce_and_none_serves_them() -> None:
    first, second = play([[reduces(0)], [[*gathers(1, 2), *reduces(0)]]], listed=False)
    assert first.error is second.error is None
    assert first.log == second.log == [("reduce", 0, True)]
    assert second.alone == [1, 2]


def test_ranks_at_two_points_that_need_all_of_them_are_told_who_is_where() -> None:
    for rank in play([[[("read", "weight")]], [[]]]):
        assert isinstance(rank.error, UsageError)
        assert "rank 0 is at reading weight, rank 1 is at optimizer.step()" in str(rank.error)


def test_ranks_that_ask_for_weights_after_other_numbers_of_updates_are_told() -> None:
    first, second = (Rank(rank, *tables, [USUAL], False) for tables in [(Table(2), Table(2))] for rank in range(2))
    ask = second.order.come_to
    second.order.come_to = lambda call, part: ask(weights(call.about, version=1), part)
    for rank in (first, second):
        rank.start()
    for rank in (first, second):
        rank.join(30)
        assert isinstance(rank.error, RankError)
        assert "after different numbers of updates" in str(rank.error)


# --- the end ------------------------------------------------------------------------------------------------


def test_a_rank_that_leaves_stops_the_others() -> None:
    first, second, third = play([[USUAL] * 2, [USUAL, [("leave", 0)]], [USUAL] * 2])
    assert isinstance(second.error, SystemExit)
    for rank in (first, third):
        assert isinstance(rank.error, RankError)
        assert "Rank 1 has closed its optimizer, but rank" in str(rank.error)


@pytest.mark.parametrize("at", [1, 5])
@pytest.mark.parametrize("step", [0, 2])
def test_a_rank_that_fails_takes_part_to_the_end_of_the_list_and_stops_the_others(step: int, at: int) -> None:
    failing = [*USUAL[:at], ("fail", USUAL[at])]
    first, second = play([[USUAL] * 3, [*[USUAL] * step, failing]])
    assert isinstance(second.error, OSError)
    assert isinstance(first.error, RankError)
    assert "Rank 1 has failed" in str(first.error)
    assert first.kinds == second.kinds
    if step > 0:
        assert first.kinds == (step + 1) * USUAL
