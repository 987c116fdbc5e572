"""Ranks update during backward before the norm is known: the bits of one rank that waits for it, all state in RAM."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from .ranks import RankServer

SLOW = pytest.mark.slow
FACTORS = {"x": 30.0, ".": 1e-3, "o": 1e9}
"""By what a step's losses are multiplied: its gradients are then clipped, are not, or overflow in fp16."""
CASES: tuple[tuple[int, str, dict[str, Any]], ...] = (
    (2, "..x.xx.", {"stage": 3, "kind": "ssd"}),
    (2, "..x.xx.", {"stage": 2, "kind": "moments-ssd"}),
    (2, "..x.", {"stage": 1, "kind": "arena"}),
)
SLOW_CASES: tuple[tuple[int, str, dict[str, Any]], ...] = (
    (4, ".x..", {"stage": 3, "kind": "ssd"}),
    (2, "..x.", {"stage": 3, "kind": "arena-ssd"}),
    (2, "..x.", {"stage": 1, "kind": "ssd"}),
    (4, ".x..", {"stage": 2, "kind": "ram"}),
    (2, ".x..", {"kind": "ssd", "rule": "muon"}),
    (2, ".x..", {"kind": "ssd", "frozen": True, "moments": "8bit"}),
)


def factors(pattern: str) -> list[float]:
    return [FACTORS[sign] for sign in pattern]


@pytest.fixture(scope="module")
def alone(ranks: RankServer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What one rank gives that takes all micro-batches, updates at the step, and has all state in RAM."""

    @cache
    def train(recipe: str, pattern: str, parts: int, departures: str) -> Any:
        made = {**json.loads(recipe), "accumulation": parts}
        settings = {"factors": factors(pattern), "guesses": False, "parts": parts, **json.loads(departures)}
        return ranks.run("train", 1, tmp_path_factory.mktemp("alone"), recipe=made, **settings)[0]

    return train


def assert_same(results: Sequence[dict[str, Any]], expected: dict[str, Any]) -> None:
    for step, losses in enumerate(expected["losses"]):
        assert [loss for result in results for loss in result["losses"][step]] == losses
    for result in results:
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-12)
        assert_same_states(result, expected)


def assert_same_states(result: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, weight in expected["weights"].items():
        assert torch.equal(weight, result["weights"][name]), name
    for index, states in expected["states"].items():
        assert all(torch.equal(value, result["states"][index][state]) for state, value in states.items()), index
    assert all(peak <= result["plan_peak"][tier] for tier, peak in result["peak"].items())


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
    count: int, pattern: str, settings: dict[str, Any], ranks: RankServer, alone: Any, tmp_path: Path
) -> None:
    placed = {key: settings[key] for key in ("stage", "kind") if key in settings}
    recipe = {"model": "llama", "precision": "bf16" if count == 2 else "fp32"}
    recipe |= {key: value for key, value in settings.items() if key not in placed}
    expected = alone(json.dumps(recipe), pattern, count, "{}")
    results = ranks.run("train", count, tmp_path, recipe=recipe, factors=factors(pattern), guesses=True, **placed)
    assert_same(results, expected)
    for result in results:
        assert ("undo" in result["lines"].get("ssd", {})) == ("ssd" in placed.get("kind", ""))
        assert_guessed(result, pattern)


@pytest.mark.parametrize("kind", ["ssd", pytest.param("arena-ssd", marks=SLOW)])
def test_a_rank_that_needs_old_weights_gets_them_from_ranks_that_have_guessed(
    kind: str, ranks: RankServer, alone: Any, tmp_path: Path
) -> None:
    """It evaluates by itself after its backward, while others wait for the norm, with weights of which none has all."""
    pattern, recipe = "..x....", {"model": "llama", "precision": "bf16"}
    evaluated = [[1, 1, "after"], [4, 0, "after"], [5, 1, "in"], [6, 0, "after"]]
    expected = alone(json.dumps(recipe), pattern, 2, "{}")
    results = ranks.run(
        "train",
        2,
        tmp_path,
        recipe=recipe,
        factors=factors(pattern),
        guesses=True,
        kind=kind,
        evaluated=evaluated,
    )
    assert_same(results, expected)
    assert all(result["asked"] for result in results)
    assert all(undone for result in results for undone in [result["guesses"][1][1], result["guesses"][4][1]])


@pytest.mark.parametrize("kind", [pytest.param("ram", marks=SLOW), "ssd"])
def test_a_rank_that_has_no_batch_lets_others_guess(kind: str, ranks: RankServer, alone: Any, tmp_path: Path) -> None:
    pattern, recipe = "..x..", {"model": "llama", "precision": "bf16"}
    departures = {"left_out": [[1, 1], [3, 0]]}
    expected = alone(json.dumps(recipe), pattern, 2, json.dumps(departures))
    results = ranks.run(
        "train", 2, tmp_path, recipe=recipe, factors=factors(pattern), guesses=True, kind=kind, **departures
    )
    assert_same(results, expected)
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
    pattern, recipe = ".o..o.", {"model": "llama", "precision": "fp16", "clip": clip}
    settings = {"recipe": recipe, "factors": factors(pattern), "stage": stage}
    expected = ranks.run("train", count, tmp_path / "expected", guesses=False, **settings)
    results = ranks.run("train", count, tmp_path / "found", guesses=True, kind=kind, **settings)
    for before, after in zip(expected, results, strict=True):
        assert after["losses"] == before["losses"]
        assert after["norms"] == before["norms"]
        assert_same_states(after, before)
        assert [norm is None for norm in after["norms"]] == [sign == "o" for sign in pattern]
        assert_guessed(after, pattern)


@SLOW
@pytest.mark.parametrize("settings", [{"replicas": 2}, {"parts": 8}], ids=["replicas", "two passes"])
def test_ranks_whose_sums_have_another_order_guess_too(
    settings: dict[str, Any], ranks: RankServer, tmp_path: Path
) -> None:
    pattern, recipe = ".x..", {"model": "llama", "precision": "fp32", "accumulation": settings.get("parts", 4) // 4}
    settings = {"recipe": recipe, "factors": factors(pattern), **settings}
    expected = ranks.run("train", 4, tmp_path / "expected", guesses=False, **settings)
    results = ranks.run("train", 4, tmp_path / "found", guesses=True, kind="ssd", **settings)
    for before, after in zip(expected, results, strict=True):
        assert after["losses"] == before["losses"]
        assert after["norms"] == before["norms"]
        assert_same_states(after, before)
        assert_guessed(after, pattern)
