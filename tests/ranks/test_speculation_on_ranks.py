"""Ranks update during backward before the norm is known: the bits of one rank that waits for it, all state in RAM."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from zoo import assert_equal

from .ranks import RankServer

SLOW = pytest.mark.slow
FACTORS = {"x": 30.0, ".": 1e-3, "o": 1e9}
"""By what a step's losses are multiplied: its gradients are then clipped, are not, or overflow in fp16."""
CASES: tuple[tuple[int, str, dict[str, Any]], ...] = ((2, "..x.xx.", {"stage": 3, "kind": "ssd"}),)
SLOW_CASES: tuple[tuple[int, str, dict[str, Any]], ...] = (
    (2, "..x.xx.", {"stage": 2, "kind": "moments-ssd"}),
    (4, ".x..", {"stage": 3, "kind": "ssd"}),
    (2, "..x.", {"stage": 1, "kind": "arena"}),
    (2, "..x.", {"stage": 1, "kind": "ssd"}),
    (4, ".x..", {"stage": 2, "kind": "ssd"}),
    (2, ".x..", {"kind": "ssd", "rule": "muon"}),
    (2, ".x..", {"kind": "ssd", "frozen": True}),
    (2, ".x..", {"kind": "arena", "frozen": True, "moments": "8bit"}),
)


def factors(pattern: str) -> list[float]:
    return [FACTORS[sign] for sign in pattern]


def alone(once: Any, parts: int, recipe: dict[str, Any], pattern: str, **departures: Any) -> dict[str, Any]:
    """What one rank gives that takes all micro-batches, updates at the step, and has all state in RAM."""
    recipe = {**recipe, "accumulation": parts}
    return once("train", 1, recipe=recipe, factors=factors(pattern), guesses=False, parts=parts, **departures)[0]


def assert_as_alone(results: Sequence[dict[str, Any]], expected: dict[str, Any]) -> None:
    for step, losses in enumerate(expected["losses"]):
        assert [loss for result in results for loss in result["losses"][step]] == losses
    for result in results:
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-12)
        assert_same_states(result, expected)


def assert_same_states(result: dict[str, Any], expected: dict[str, Any]) -> None:
    for of in "weights", "states":
        assert_equal(result[of], expected[of])
    assert all(peak <= result["plan_peak"][tier] for tier, peak in result["peak"].items())


def assert_without_guesses(results: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]], pattern: str) -> None:
    """The same ranks have the same bits where they do not guess."""
    for result, before in zip(results, expected, strict=True):
        assert result["losses"] == before["losses"]
        assert result["norms"] == before["norms"]
        assert_same_states(result, before)
        assert_guessed(result, pattern)


def assert_guessed(result: dict[str, Any], pattern: str) -> None:
    """Guesses stood in steps in which nothing was clipped, and in no other.

    In the first two steps, ranks do not know the others' order: some add to a gradient late, which undoes a guess.
    """
    for step, (sign, (kept, undone)) in enumerate(zip(pattern, result["guesses"], strict=True)):
        right = kept > 0 and (undone == 0 or step < 2) if sign == "." else kept == 0 and undone > 0
        assert right, f"step {step}: {result['guesses']}"


@pytest.mark.parametrize(
    ("count", "pattern", "settings"), [*CASES, *(pytest.param(*case, marks=SLOW) for case in SLOW_CASES)], ids=str
)
def test_no_guess_changes_a_bit_on_ranks(
    count: int, pattern: str, settings: dict[str, Any], ranks: RankServer, once: Any, tmp_path: Path
) -> None:
    placed = {key: settings[key] for key in ("stage", "kind") if key in settings}
    recipe = {"model": "llama", "precision": "bf16" if count == 2 else "fp32"}
    recipe |= {key: value for key, value in settings.items() if key not in placed}
    results = ranks.run("train", count, tmp_path, recipe=recipe, factors=factors(pattern), guesses=True, **placed)
    assert_as_alone(results, alone(once, count, recipe, pattern))
    for result in results:
        assert ("versions" in result["lines"].get("ssd", {})) == ("ssd" in placed.get("kind", ""))
        assert_guessed(result, pattern)


@pytest.mark.parametrize("kind", ["ssd", pytest.param("arena", marks=SLOW)])
def test_a_rank_that_needs_old_weights_gets_them_from_ranks_that_have_guessed(
    kind: str, ranks: RankServer, once: Any, tmp_path: Path
) -> None:
    """It evaluates by itself after its backward, while others wait for the norm, with weights of which none has all."""
    pattern, recipe = "..x....", {"model": "llama", "precision": "bf16"}
    evaluated = [[1, 1, "after"], [4, 0, "after"], [5, 1, "in"], [6, 0, "after"]]
    settings = {"recipe": recipe, "factors": factors(pattern), "guesses": True, "kind": kind}
    results = ranks.run("train", 2, tmp_path, evaluated=evaluated, **settings)
    assert_as_alone(results, alone(once, 2, recipe, pattern))
    assert all(result["asked"] for result in results)
    assert all(undone for result in results for undone in [result["guesses"][1][1], result["guesses"][4][1]])


@pytest.mark.parametrize("kind", [pytest.param("arena", marks=SLOW), "ssd"])
def test_a_rank_that_has_no_batch_lets_others_guess(kind: str, ranks: RankServer, once: Any, tmp_path: Path) -> None:
    pattern, recipe = "..x..", {"model": "llama", "precision": "bf16"}
    left_out = [[1, 1], [3, 0]]
    settings = {"recipe": recipe, "factors": factors(pattern), "guesses": True, "kind": kind}
    results = ranks.run("train", 2, tmp_path, left_out=left_out, **settings)
    assert_as_alone(results, alone(once, 2, recipe, pattern, left_out=left_out))
    assert results[0]["guesses"][1][0] > 1
    assert results[1]["guesses"][3][0] > 1


@pytest.mark.parametrize(
    ("count", "stage", "kind", "clip"),
    [
        (2, 3, "ssd", 0.5),
        pytest.param(2, 2, "moments-ssd", None, marks=SLOW),
        pytest.param(4, 3, "ssd", None, marks=SLOW),
    ],
)
def test_an_overflow_on_ranks_undoes_what_was_guessed(
    count: int, stage: int, kind: str, clip: float | None, ranks: RankServer, tmp_path: Path
) -> None:
    pattern, recipe = ".o..", {"model": "llama", "precision": "fp16", "clip": clip}
    settings = {"recipe": recipe, "factors": factors(pattern), "stage": stage}
    expected = ranks.run("train", count, tmp_path / "expected", guesses=False, **settings)
    results = ranks.run("train", count, tmp_path / "found", guesses=True, kind=kind, **settings)
    assert_without_guesses(results, expected, pattern)
    assert [norm is None for norm in results[0]["norms"]] == [sign == "o" for sign in pattern]


@SLOW
@pytest.mark.parametrize("settings", [{"replicas": 2}, {"parts": 8}], ids=["replicas", "two passes"])
def test_ranks_whose_sums_have_another_order_guess_too(
    settings: dict[str, Any], ranks: RankServer, tmp_path: Path
) -> None:
    pattern, recipe = ".x..", {"model": "llama", "precision": "fp32", "accumulation": settings.get("parts", 4) // 4}
    settings = {"recipe": recipe, "factors": factors(pattern), **settings}
    expected = ranks.run("train", 4, tmp_path / "expected", guesses=False, **settings)
    results = ranks.run("train", 4, tmp_path / "found", guesses=True, kind="ssd", **settings)
    assert_without_guesses(results, expected, pattern)
