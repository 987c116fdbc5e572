"""Ranks agree on what comes next, whatever each of them asks for, and never wait for ever."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from pagoda.distributed.agreement import Agreement, Call, CollectiveKind
from pagoda.distributed.exact import exact_parts
from pagoda.errors import PagodaError, RankError, UsageError


class Table:
    """Where the announcements of ranks that are threads meet."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=20)
        self.rows: list[Sequence[int]] = [()] * size


class FakeWire:
    """A transport between threads."""

    def __init__(self, table: Table, rank: int) -> None:
        self.table, self.rank, self.size = table, rank, len(table.rows)

    def announce(self, numbers: Sequence[int]) -> list[list[int]]:
        self.table.rows[self.rank] = numbers
        self.table.barrier.wait()
        rows = [list(row) for row in self.table.rows]
        self.table.barrier.wait()
        return rows

    def announce_bytes(self, data: bytes) -> list[bytes]:
        return [bytes(row) for row in self.announce(list(data))]


def play(wishes: Sequence[Sequence[Call | str]]) -> tuple[list[list[tuple[str, int]]], list[BaseException | None]]:
    """What each rank took part in, as (own or served, unit), and how it ended; a text is a joint wish."""
    table = Table(len(wishes))
    logs: list[list[tuple[str, int]]] = [[] for _ in wishes]
    errors: list[BaseException | None] = [None] * len(wishes)

    def rank(me: int) -> None:
        transport: Any = FakeWire(table, me)
        agreement = Agreement(transport, lambda call, _: logs[me].append(("served", call.about)))
        try:
            for wish in wishes[me]:
                call = agreement.joint(wish) if isinstance(wish, str) else wish
                agreement.settle(call)
                logs[me].append(("own", call.about))
        except PagodaError as error:
            errors[me] = error

    threads = [threading.Thread(target=rank, args=(me,)) for me in range(len(wishes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return logs, errors


_REDUCED = 10
"""From this number on, units are reduced, here."""
calls = st.lists(
    st.one_of(
        st.integers(0, 5).map(lambda unit: Call(CollectiveKind.GATHER, unit)),
        st.integers(0, 5).map(lambda unit: Call(CollectiveKind.REDUCE, _REDUCED + unit)),
    ),
    max_size=6,
)


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 3).flatmap(
        lambda steps: st.lists(st.lists(calls, min_size=steps, max_size=steps), min_size=2, max_size=4)
    )
)
def test_all_ranks_take_part_in_the_same_reductions_and_each_gets_its_wishes_in_order(
    steps: list[list[list[Call]]],
) -> None:
    wishes = [[wish for step in mine for wish in (*step, "optimizer.step()")] for mine in steps]
    logs, errors = play(wishes)
    assert errors == [None] * len(wishes)
    assert len({tuple(about for _, about in log if about >= _REDUCED) for log in logs}) == 1
    for mine, log in zip(wishes, logs, strict=True):
        joint = {about for how, about in log if about > 2 * _REDUCED}
        assert len(joint) == 1
        wanted = [next(iter(joint)) if isinstance(wish, str) else wish.about for wish in mine]
        assert [about for how, about in log if how == "own"] == wanted


def test_ranks_that_want_the_same_do_not_serve_each_other() -> None:
    wishes = [[Call(CollectiveKind.GATHER, 3), Call(CollectiveKind.REDUCE, 3), "optimizer.step()"]] * 3
    logs, _ = play(wishes)
    assert all(how == "own" for log in logs for how, _ in log)


def test_ranks_that_want_weights_get_them_before_others_reduce_and_none_serves_them() -> None:
    behind = [Call(CollectiveKind.GATHER, 1), Call(CollectiveKind.GATHER, 2), Call(CollectiveKind.REDUCE, _REDUCED)]
    logs, errors = play([[Call(CollectiveKind.REDUCE, _REDUCED)], behind])
    assert errors == [None, None]
    assert logs == [[("own", _REDUCED)], [("own", 1), ("own", 2), ("own", _REDUCED)]]


def test_ranks_at_two_points_that_need_all_of_them_are_told_who_is_where() -> None:
    _, errors = play([["optimizer.step()"], ["reading weight"]])
    for error in errors:
        assert isinstance(error, UsageError)
        assert "rank 0 is at optimizer.step(), rank 1 is at reading weight" in str(error)


@pytest.mark.parametrize(
    ("kind", "said"), [(CollectiveKind.LEAVE, "Rank 1 has closed"), (CollectiveKind.FAIL, "Rank 1 has failed")]
)
def test_a_rank_that_ends_stops_the_others(kind: CollectiveKind, said: str) -> None:
    _, errors = play([[Call(CollectiveKind.GATHER, 1)], [Call(kind)], [Call(CollectiveKind.GATHER, 1)]])
    assert errors[1] is None
    for error in (errors[0], errors[2]):
        assert isinstance(error, RankError)
        assert said in str(error)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, max_value=1e200, min_value=-1e200)))
def test_exact_parts_lose_nothing(values: list[float]) -> None:
    from fractions import Fraction

    parts = exact_parts(values)
    assert sum(map(Fraction, parts)) == sum(map(Fraction, values))
    assert len(parts) <= max(1, len(values))
