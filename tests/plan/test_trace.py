"""A trace is one step; the cursor follows it, and finds its way back after any departure."""

from itertools import groupby
from math import inf

import pytest
from hypothesis import given, strategies as st

from pagoda.plan.trace import STEP, Access, Cursor, NextUse, Phase, Recorder, Trace, gradients_of

from .strategies import traces

UNITS = 5
accesses = st.builds(Access, st.integers(0, UNITS - 1), st.sampled_from([Phase.FORWARD, Phase.BACKWARD]))


@pytest.mark.parametrize(
    "wrong", [(), (Access(0, Phase.FORWARD),), (STEP, Access(0, Phase.FORWARD)), (STEP, Access(0, Phase.FORWARD), STEP)]
)
def test_a_trace_without_exactly_one_step_at_its_end_is_refused(wrong: tuple[Access, ...]) -> None:
    with pytest.raises(ValueError, match="one STEP, at its end"):
        Trace(wrong)


@given(st.lists(st.lists(accesses, max_size=20), min_size=1, max_size=3))
def test_a_recorder_writes_each_step_down_with_repeats_in_a_row_counted_once(steps: list[list[Access]]) -> None:
    recorder = Recorder()
    for step in steps:
        for access in step:
            recorder.note(access)
        assert recorder.finish() == Trace((*(access for access, _ in groupby(step)), STEP))


@given(traces(UNITS), st.lists(accesses | st.just(STEP), max_size=30))
def test_a_cursor_stands_only_where_the_trace_has_what_happened(trace: Trace, live: list[Access]) -> None:
    cursor = Cursor(trace)
    for access in live:
        before = cursor.position
        tick = cursor.advance(access)
        if access in trace.accesses:
            assert trace.accesses[tick] == access
            assert cursor.position == tick
        else:
            assert tick is None
            assert cursor.position == before


@given(traces(UNITS), st.data())
def test_a_cursor_that_skips_accesses_jumps_to_the_nearest_use_ahead(trace: Trace, data: st.DataObject) -> None:
    cursor = Cursor(trace)
    for access in trace.accesses[: data.draw(st.integers(1, len(trace.accesses)), label="accesses that came")]:
        cursor.advance(access)
    position = cursor.position
    ahead = [
        tick for tick in range(position + 1, len(trace.accesses)) if trace.accesses[tick] != trace.accesses[position]
    ]
    if ahead:
        target = trace.accesses[data.draw(st.sampled_from(ahead))]
        assert cursor.advance(target) == trace.accesses.index(target, position + 1)


# --- gradients ------------------------------------------------------------------------------------------------


@given(st.data())
def test_each_pass_makes_one_gradient_of_each_trained_unit_that_it_uses(data: st.DataObject) -> None:
    units = data.draw(st.integers(1, 6))
    trace = data.draw(traces(units))
    trained = frozenset(data.draw(st.sets(st.integers(0, units - 1))))
    gradients = gradients_of(trace, trained)
    assert [g.tick for g in gradients] == sorted(g.tick for g in gradients)
    passes = [key for key, _ in groupby(access.phase for access in trace.accesses)].count(Phase.BACKWARD)
    body = trace.accesses[:-1]
    first = 0
    for _ in range(passes):
        backward = next(tick for tick in range(first, len(body)) if body[tick].phase is Phase.BACKWARD)
        end = next((tick for tick in range(backward, len(body)) if body[tick].phase is Phase.FORWARD), len(body))
        of_pass = [g for g in gradients if first <= g.tick < end]
        assert sorted(g.unit for g in of_pass) == sorted(trained & {access.unit for access in body[first:end]})
        for gradient in of_pass:
            assert gradient.tick == max(tick for tick in range(first, end) if body[tick].unit == gradient.unit)
        first = end
    assert {g.unit: g.tick for g in gradients} == {g.unit: g.tick for g in gradients if g.last}


def test_a_unit_that_backward_never_reads_has_its_gradient_at_the_end_of_the_pass() -> None:
    one_pass = (Access(0, Phase.FORWARD), Access(1, Phase.FORWARD), Access(1, Phase.BACKWARD))
    gradients = gradients_of(Trace((*one_pass, *one_pass, STEP)), frozenset({0, 1}))
    assert [(g.tick, g.last) for g in gradients if g.unit == 0] == [(2, False), (5, True)]


def test_an_embedding_that_is_the_head_too_has_its_gradient_at_the_end_of_the_pass() -> None:
    """Backward reads it for the head, first of all; what the look-up adds comes last, and reads nothing."""
    uses = [Access(unit, Phase.FORWARD) for unit in (0, 1, 0)] + [Access(unit, Phase.BACKWARD) for unit in (0, 1)]
    assert [(g.unit, g.tick) for g in gradients_of(Trace((*uses, STEP)), frozenset({0, 1}))] == [(1, 4), (0, 4)]


@given(traces(4), st.integers(0, 4), st.data())
def test_the_next_use_is_the_nearest_one_around_the_cycle(trace: Trace, unit: int, data: st.DataObject) -> None:
    tick = data.draw(st.integers(0, len(trace.accesses) - 1))
    twice = [access.unit for access in trace.accesses * 2]
    found = NextUse(trace).after(unit, tick)
    assert found == (twice.index(unit, tick + 1) - tick if unit in twice else inf)
