"""Ranks train as one rank would that takes their batches in turn: the same bits, where sums have the same order.

In fp32, a mean over ranks is the sum that accumulating over micro-batches gives. In bf16 that holds for two ranks: of
more, the mean is rounded once, and the accumulated sum at every micro-batch.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from zoo import assert_equal

from pagoda.errors import ConfigError
from pagoda.plan.ranks import Ranks

from .ranks import RankServer
from .scenarios import USED_ALONE

SLOW = pytest.mark.slow
Case = tuple[int, dict[str, Any], dict[str, Any]]
"""Ranks, recipe, placement."""
HELD = {"model": "llama", "precision": "bf16", "clip": 0.5}
"""The tests check what ranks of each stage hold in these cases."""
CASES: dict[str, Case] = {
    **{f"2 ranks, stage {stage}": (2, HELD, {"stage": stage}) for stage in (1, 3)},
    "muon, stage 1, on ssd": (2, {"rule": "muon", "clip": None, "announced": True}, {"stage": 1, "kind": "ssd"}),
    "at home on the device, stage 3": (2, {"precision": "bf16", "clip": 0.5}, {"stage": 3, "kind": "both-on-device"}),
    "adafactor, half of it on the device": (2, {"rule": "adafactor"}, {"kind": "half-on-device"}),
    "mixed dtypes, stage 1, on ssd": (2, {"model": "mixed", "precision": "own"}, {"stage": 1, "kind": "ssd"}),
    "stage 3, on ssd, late": (2, {"steps": 5, "late": True}, {"kind": "ssd"}),
}
"""test_matrix_on_ranks shows that ranks have the same bits in every placement, at every stage."""
SLOW_CASES: dict[str, Case] = {
    "2 ranks, stage 2": (2, HELD, {"stage": 2}),
    "other experts on each of four ranks": (4, {"model": "mixtral", "precision": "fp32", "steps": 3}, {}),
    "frozen and checkpointed, on ssd": (2, {"frozen": True, "checkpointing": True}, {"kind": "ssd"}),
    "muon, stage 1, four ranks, on the device": (
        4,
        {"rule": "muon", "precision": "fp32"},
        {"stage": 1, "kind": "updated-on-device"},
    ),
    "a small part of each layer is trained, and lives on the device": (
        2,
        {"frozen": "matrices", "layers": 12},
        {"kind": "small-device"},
    ),
    "mixed dtypes": (2, {"model": "mixed", "precision": "own", "clip": 0.5}, {}),
    "mixed dtypes, muon, on ssd": (2, {"model": "mixed", "precision": "own", "rule": "muon"}, {"kind": "ssd"}),
    "a class of torch, stage 1": (2, {"rule": "adagrad"}, {"stage": 1}),
    "muon, frozen, on ssd": (2, {"rule": "muon", "frozen": True}, {"kind": "ssd"}),
    "t5, 8-bit moments": (2, {"model": "t5", "moments": "8bit"}, {}),
    "conv, bf16 moments, on ssd": (2, {"model": "conv", "moments": "bf16"}, {"kind": "ssd"}),
    "muon, four ranks": (4, {"rule": "muon", "precision": "fp32"}, {}),
    "adafactor, four ranks, stage 2, on ssd": (
        4,
        {"rule": "adafactor", "precision": "fp32"},
        {"stage": 2, "kind": "ssd"},
    ),
    "four ranks, stage 3, late": (4, {"precision": "fp32", "steps": 7, "late": True}, {}),
    "frozen and checkpointed, on ssd, 2 late": (
        2,
        {"frozen": True, "checkpointing": True, "steps": 6, "late": True},
        {"kind": "ssd"},
    ),
}


def alone(once: Any, parts: int, recipe: dict[str, Any], **departures: Any) -> dict[str, Any]:
    """What one rank gives that takes so many micro-batches a step."""
    recipe = {**recipe, "accumulation": parts} if recipe.get("announced") else recipe
    return once("train", 1, recipe=recipe, parts=parts, **departures)[0]


def assert_held(result: dict[str, Any], stage: int, count: int) -> None:
    """12 bytes a parameter and 2 of gradient: 2 of weights, 2 of gradients, 10 of the rest, each divided or not."""
    held = {line: nbytes / result["parameters"] for line, nbytes in result["lines"]["host"].items()}
    weights, grads = 2 / count if stage == 3 else 2, 2 / count if stage >= 2 else 2
    assert held["weight"] == pytest.approx(weights, rel=0.15)  # whole pages of small units
    assert held["grad"] == pytest.approx(grads, rel=0.15)
    rest = held["weight_low"] + held["exp_avg"] + held["exp_avg_sq"]
    assert rest == pytest.approx(10 / count, rel=0.15)


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=SLOW) for name in SLOW_CASES)])
def test_ranks_give_the_bits_of_one_rank(name: str, ranks: RankServer, once: Any, tmp_path: Path) -> None:
    count, recipe, placement = (CASES | SLOW_CASES)[name]
    recipe = {"model": "llama", "steps": 3, **recipe}
    expected = alone(once, count, recipe)
    results = ranks.run("train", count, tmp_path, recipe=recipe, **placement)
    for step, losses in enumerate(expected["losses"]):
        assert [result["losses"][step] for result in results] == [[loss] for loss in losses]
    for result in results:
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-12)
        assert_equal(result["weights"], expected["weights"])
        assert_equal(result["states"], expected["states"])
        assert all(peak <= result["plan_peak"][tier] for tier, peak in result["peak"].items())
        kind = placement.get("kind", "ram")
        on_ssd = {*result["lines"].get("ssd", {})} - {"grad"}
        assert bool(on_ssd - {"weight"}) == ("ssd" in kind)
        assert ("weight" in on_ssd) == (kind in ("ssd", "arena-ssd"))
        if kind == "both-on-device":
            assert {"weight", "grad", "update_ring"} <= {line for line, n in result["lines"]["device"].items() if n}
        elif kind == "small-device":
            assert min(result["lines"]["device"].get(line, 0) for line in ("weight", "exp_avg", "leases")) > 0
        elif recipe.items() >= HELD.items():
            assert_held(result, placement["stage"], count)


ORDERED: dict[str, tuple[int, dict[str, Any]]] = {
    "4 ranks, updates during backward": (4, {"recipe": {"clip": None, "announced": True}}),
    "2 ranks, stage 2, a device of its own": (2, {"recipe": {"clip": 0.5}, "stage": 2, "kind": "both-on-device"}),
    "2 ranks, stage 2, a mixture on ssd": (2, {"recipe": {"model": "mixtral", "layers": 1}, "stage": 2, "kind": "ssd"}),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[SLOW] if "mixture" in name else []) for name in ORDERED])
def test_with_ordered_sums_bits_do_not_depend_on_how_many_ranks_take_the_micro_batches(
    name: str, ranks: RankServer, once: Any, tmp_path: Path
) -> None:
    """In bf16, in which the sum of several ranks has other bits than theirs in turn."""
    count, given = ORDERED[name]
    given["recipe"] = {"model": "llama", "precision": "bf16", "steps": 3, **given["recipe"]}
    expected = alone(once, 4, given["recipe"])
    if given["recipe"].get("announced"):
        given["recipe"] |= {"accumulation": 4 // count}
    for result in ranks.run("train", count, tmp_path, parts=4, ordered=True, **given):
        assert_equal(result["weights"], expected["weights"])
        assert_equal(result["states"], expected["states"])


@pytest.mark.parametrize("given", [{"stage": 1}, {"stage": 3, "replicas": 2}])
def test_ordered_sums_of_whole_gradients_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"ordered_sums.*use stage 2 or 3 and one replica"):
        Ranks(4, 4, ordered_sums=True, **given)


DEPARTURES: dict[str, dict[str, Any]] = {
    "a rank has no batch": {"left_out": [[1, 1], [3, 0]]},
    "ranks have sequences of different lengths": {"lengths": {"1": 7}},
    "a rank evaluates alone": {"evaluated": [[1, 1, "before"], [4, 0, "before"], [5, 1, "in"], [6, 0, "in"]]},
}


@pytest.mark.parametrize("stage", [pytest.param(1, marks=SLOW), 3])
@pytest.mark.parametrize("name", DEPARTURES)
def test_ranks_that_do_different_things_take_part_in_what_others_need(
    name: str, stage: int, ranks: RankServer, once: Any, tmp_path: Path
) -> None:
    evaluated = "evaluated" in DEPARTURES[name]
    recipe = {"model": "llama", **({"steps": 7} if evaluated else {})}
    expected = alone(once, 2, recipe, **({} if evaluated else DEPARTURES[name]))
    kind = "arena" if evaluated else "ram"  # where not all weights find room at once
    results = ranks.run("train", 2, tmp_path, recipe=recipe, stage=stage, kind=kind, **DEPARTURES[name])
    for step, losses in enumerate(expected["losses"]):
        assert [loss for result in results for loss in result["losses"][step]] == losses
    for result in results:
        assert_equal(result["weights"], expected["weights"])
    if evaluated:
        assert any(result["asked"] for result in results) == (stage == 3)
    else:
        assert any(result["served"] for result in results) == ("left_out" in DEPARTURES[name])


@pytest.mark.parametrize(("passes", "steady"), [pytest.param(1, True, marks=SLOW), (3, False)])
def test_ranks_of_which_one_uses_a_tower_meet_in_collectives_of_the_program(
    passes: int, steady: bool, ranks: RankServer, tmp_path: Path
) -> None:
    """As those of trainers do that add up metrics within a step. One rank needs the other's weights, if these are
    divided, and the other's part in the mean of its gradients, while the other's compute waits for it."""
    plain, *paged = (
        ranks.run("metrics_in_steps", 2, tmp_path / str(stage), stage=stage, passes=passes, steady=steady)
        for stage in (None, 2, 3)
    )
    for weights in (*paged[0], *paged[1]):
        torch.testing.assert_close(weights, plain[0], rtol=0 if passes == 1 else 1e-5, atol=0)
        assert_equal(weights, paged[0][0])


@pytest.mark.parametrize("how", ["load", "drain"])
def test_ranks_change_weights_between_steps_that_the_step_before_left_as_they_were(
    how: str, ranks: RankServer, tmp_path: Path
) -> None:
    (alone,) = ranks.run("change_between_steps", 1, tmp_path / "alone", how=how)
    for weights in ranks.run("change_between_steps", 2, tmp_path / "together", how=how):
        assert_equal(weights, alone)


@pytest.mark.parametrize(("stage", "ssd"), [pytest.param(3, False, marks=SLOW), (3, True), (1, False)])
def test_ranks_use_weights_outside_forwards_alike_or_alone(
    stage: int, ssd: bool, ranks: RankServer, tmp_path: Path
) -> None:
    (alone,) = ranks.run("use_weights_anywhere", 1, tmp_path / "alone", stage=stage, ssd=ssd)
    for result in ranks.run("use_weights_anywhere", 2, tmp_path / "together", stage=stage, ssd=ssd):
        assert_equal(result["weights"], alone["weights"])
        assert_equal(result["average"], alone["average"])
        assert result["penalties"] == alone["penalties"]


@pytest.mark.parametrize("what", [*USED_ALONE])
def test_what_a_rank_does_alone_is_an_error_on_all(what: str, ranks: RankServer, tmp_path: Path) -> None:
    for error in ranks.run("use_alone", 2, tmp_path, what=what):
        assert "at different points" in error
        assert "first.weight" in error or "gradient" not in what


def test_hybrid_sharding_differs_by_the_order_of_sums_only(ranks: RankServer, once: Any, tmp_path: Path) -> None:
    recipe = {"model": "llama", "precision": "fp32", "clip": None, "steps": 2}
    expected = alone(once, 4, recipe)
    results = ranks.run("train", 4, tmp_path, recipe=recipe, replicas=2)
    first = results[0]
    for result in results[1:]:
        assert_equal(result["weights"], first["weights"])
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(first["weights"][name], weight, rtol=0, atol=1e-3)
    assert first["norms"] == pytest.approx(expected["norms"], rel=1e-3)
