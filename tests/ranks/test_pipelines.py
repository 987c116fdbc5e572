"""Pipelines of torch's schedules train in pages with the bits that they have in RAM, and one rank has."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from zoo import assert_equal

from tests.tiny import write_mixture

from .pipelines import BLOCKS, joined
from .ranks import RankServer
from .test_experts_on_ranks import in_full

Result = dict[str, Any]
CLIP = 0.05
"""It bites: the norm is about 1."""


def assert_same_bits(results: list[Result], expected: list[Result]) -> None:
    assert [each["losses"] for each in results if each["losses"]] == [e["losses"] for e in expected if e["losses"]]
    for result in results:
        assert result["norms"] == expected[0]["norms"]
        assert result.get("peak", {}).keys() <= result.get("plan_peak", {}).keys()
        assert all(peak <= result["plan_peak"][tier] for tier, peak in result.get("peak", {}).items())
    for of in "weights", "states":
        assert_equal(joined(results, of), joined(expected, of))


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    # name: schedule, settings
    "1f1b, fp16, of a mesh of torch's": (
        "1f1b",
        {"kind": "arena-ssd", "max_grad_norm": CLIP, "precision": "fp16", "by_torch": True},
    ),
    "gpipe, values of gradients": ("gpipe", {"kind": "ssd", "changes": True, "precision": "fp32"}),
    "gpipe, updates during backward": ("gpipe", {"kind": "ssd", "gradient_accumulation_steps": 4}),
    "1f1b, inputs of blocks on ssd": (
        "1f1b",
        {"kind": "ssd", "max_grad_norm": CLIP, "gradient_accumulation_steps": 4, "activations": "recompute+offload"},
    ),
    "interleaved, activations in ram": (
        "interleaved",
        {"kind": "arena", "max_grad_norm": CLIP, "activations": "offload"},
    ),
    "1f1b, activations as there is room": (
        "1f1b",
        {"kind": "arena", "gradient_accumulation_steps": 4, "activations": "auto"},
    ),
    "interleaved, recomputed during speculation": (
        "interleaved",
        {
            "kind": "ssd",
            "max_grad_norm": CLIP,
            "gradient_accumulation_steps": 4,
            "activations": "recompute",
            "guess": True,
        },
    ),
}
SLOW = {"gpipe, updates during backward", "1f1b, activations as there is room", "interleaved, activations in ram"}
FEATURES: dict[str, dict[str, Any]] = {
    "adafactor": {"rule": "adafactor", "kind": "ssd"},
    "muon": {"rule": "muon", "kind": "ssd"},
    "moments in 8 bits": {"rule": "adamw-8bit", "kind": "ssd"},
    "gradients in fp32": {"precision": "bf16+fp32", "kind": "ssd"},
    "updates a step late": {"late": True, "kind": "ssd"},
    "layers in tiles": {"tiles": {"tile_limit": "8KiB"}, "kind": "ssd"},
    "batches in tiles": {"tiles": {"batch_tiles": 2}, "kind": "arena"},
    "updated on the device": {"kind": "updated-on-device"},
    "at home on the device": {"kind": "home-on-device"},
}
CASES |= {name: ("1f1b", {"max_grad_norm": CLIP, **settings}) for name, settings in FEATURES.items()}
SLOW |= FEATURES.keys()
OF_ARITHMETIC = ("changes", "max_grad_norm", "precision", "rule", "tiles", "late")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in CASES])
def test_two_stages_have_the_bits_of_one_rank(name: str, ranks: RankServer, once: Any, tmp_path: Path) -> None:
    schedule, settings = CASES[name]
    results = ranks.run("train_pipeline", 2, tmp_path, schedule=schedule, divided={"pipeline_parallel": 2}, **settings)
    shared = {key: value for key, value in settings.items() if key in OF_ARITHMETIC}
    assert_same_bits(results, once("train_alone", 1, **shared))
    if "max_grad_norm" in settings:
        assert all(norm > 2 * CLIP for norm in results[0]["norms"])
    if settings["kind"] == "ssd":
        assert all("weight" in result["lines"]["ssd"] for result in results)


def close(results: list[Result], expected: Result) -> None:
    """Sums in another order make another rounding, which each later step sees."""
    assert results[0]["norms"] == pytest.approx(expected["norms"], rel=1e-3)
    weights = joined(results, "weights")
    for name, value in joined([expected], "weights").items():
        assert (weights[name] - value).abs().mean() < 1e-5, name


@pytest.mark.parametrize(
    ("count", "schedule", "divided", "experts"),
    [
        (4, "1f1b", {"tensor_parallel": 2}, 0),
        pytest.param(4, "interleaved", {}, 0, marks=pytest.mark.slow),
        pytest.param(4, "interleaved", {"tensor_parallel": 2}, 0, marks=pytest.mark.slow),
        pytest.param(4, "1f1b", {"stage": 2}, 0, marks=pytest.mark.slow),
        pytest.param(4, "gpipe", {"replicas": 2}, 0, marks=pytest.mark.slow),
        pytest.param(8, "1f1b", {"tensor_parallel": 2}, 0, marks=pytest.mark.slow),
        pytest.param(4, "1f1b", {"tensor_parallel": 2}, 4, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_several_ranks_of_a_stage_divide_its_state(
    count: int, schedule: str, divided: dict[str, Any], experts: int, ranks: RankServer, once: Any, tmp_path: Path
) -> None:
    groups = count // 2 // divided.get("tensor_parallel", 1)
    shared = {"precision": "fp32", "max_grad_norm": CLIP, "experts": experts, "steps": 2}
    settings = {"schedule": schedule, "divided": {"pipeline_parallel": 2, **divided}, **shared}
    kind = "ssd" if divided.get("stage", 3) == 3 else "arena"
    by_torch = divided == {}
    in_ram = ranks.run("train_pipeline", count, tmp_path / "ram", by_torch=by_torch, **settings)
    on_ssd = ranks.run("train_pipeline", count, tmp_path / "ssd", kind=kind, scale_grads=False, **settings)
    assert_same_bits(on_ssd, in_ram)
    if kind == "ssd":
        assert all({"weight", "exp_avg"} <= result["lines"]["ssd"].keys() for result in on_ssd)
    assert all(norm > 2 * CLIP for norm in in_ram[0]["norms"])
    close(in_ram, once("train_alone", 1, groups=groups, **shared)[0])


@pytest.mark.slow
def test_activations_that_ranks_of_a_stage_divide_change_no_bit(ranks: RankServer, tmp_path: Path) -> None:
    divided = {"pipeline_parallel": 2, "tensor_parallel": 2}
    settings = {"divided": divided, "max_grad_norm": CLIP, "activations": "recompute"}
    whole = ranks.run("train_pipeline", 4, tmp_path / "whole", **settings)
    partitioned = ranks.run("train_pipeline", 4, tmp_path / "divided", partition=True, **settings)
    assert_same_bits(partitioned, whole)


def test_gradients_that_the_schedule_scales_are_those_of_a_divided_loss(
    ranks: RankServer, once: Any, tmp_path: Path
) -> None:
    """Up to the rounding of the limit's small constant. The norm that is reported is of gradients as they came."""
    shared = {"precision": "fp32", "max_grad_norm": CLIP}
    settings = {"divided": {"pipeline_parallel": 2}, "scale_grads": True, **shared}
    (expected,) = once("train_alone", 1, **shared)
    norms = [4 * norm for norm in expected["norms"]]
    close(ranks.run("train_pipeline", 2, tmp_path, **settings), {**expected, "norms": norms})


@pytest.mark.parametrize(
    ("schedule", "count", "way"),
    [
        ("1f1b", 2, "checkpoint"),
        pytest.param("interleaved", 2, "checkpoint", marks=pytest.mark.slow),
        pytest.param("1f1b", 4, "checkpoint", marks=pytest.mark.slow),
        pytest.param("1f1b", 2, "dcp", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_of_a_pipeline_resumes_with_the_same_bits(
    schedule: str, count: int, way: str, ranks: RankServer, tmp_path: Path
) -> None:
    shared = {
        "way": way,
        "directory": str(tmp_path / "step-2"),
        "divided": {"pipeline_parallel": 2},
        "max_grad_norm": CLIP,
    }
    saved = ranks.run("save_pipeline", count, tmp_path / "save", schedule=schedule, kind="ssd", **shared)
    for place, kind in (("save", "ssd"), ("ram", "ram")):
        resumed = ranks.run("resume_pipeline", count, tmp_path / place, schedule=schedule, kind=kind, **shared)
        assert_same_bits(resumed, saved)
        for result, expected in zip(resumed, saved, strict=True):
            calls = {name: value for name, value in expected["weights"].items() if name.endswith("calls")}
            assert len(calls) == 4
            assert all(torch.equal(result["weights"][name], value) for name, value in calls.items())
    if schedule == "1f1b":  # its stages have the names of the whole model
        (alone,) = ranks.run("resume_pipeline", 1, tmp_path / "alone", **{**shared, "divided": {}})
        assert_same_bits([{**alone, "losses": [], "norms": saved[0]["norms"]}], [{**s, "losses": []} for s in saved])


def test_no_stage_changes_a_weight_where_a_gradient_of_another_is_not_finite(ranks: RankServer, tmp_path: Path) -> None:
    for error in ranks.run("stage_not_finite", 2, tmp_path):
        assert "'blocks.7.up.weight' is not finite" in error


def test_what_stages_cannot_do_is_refused_on_each_of_them(ranks: RankServer, tmp_path: Path) -> None:
    for stage, said in enumerate(ranks.run("refuse_pipelines", 2, tmp_path)):
        assert "ConfigError" in said["names"]
        assert f"Stages {stage} and {1 - stage} both have 'weight'" in said["names"]
        assert "Stages have different optimizer: stage 1 differs from stage 0" in said["settings"]
        assert "BudgetError" in said["memory"]
        assert stage == 1 or "Stage 1 cannot hold its share" in said["memory"]
        assert "Stages have multiplied their gradients by different numbers" in said["clipping"]
        assert "stage 0 is at optimizer.step(), stage 1 is at the buffers of a checkpoint" in said["points"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "settings"),
    [
        ("1f1b", {"kind": "arena"}),
        ("1f1b", {"kind": "arena", "activations": "auto"}),
        ("interleaved", {"kind": "arena"}),
        ("gpipe", {"kind": "ram", "activations": "recompute"}),
        ("1f1b", {"kind": "arena", "gradient_accumulation_steps": 4, "guess": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("stage", [2, 1])
def test_the_ranks_of_a_stage_divide_its_experts(
    schedule: str, settings: dict[str, Any], stage: int, ranks: RankServer, tmp_path: Path
) -> None:
    """With the bits that they have without a pipeline."""
    shared = {"experts": 4, "max_grad_norm": CLIP}
    divided = {"expert_parallel": 2, "stage": stage}
    expected = ranks.run("train_alone", 2, tmp_path / "alone", groups=2, divided=divided, **shared)
    divided |= {"pipeline_parallel": 2}
    results = ranks.run(
        "train_pipeline", 4, tmp_path / "stages", schedule=schedule, divided=divided, **shared, **settings
    )
    assert_same_bits(results, expected)
    assert len({name for name in joined(results, "weights") if ".mixture.experts." in name}) > 4 * BLOCKS


@pytest.mark.slow
def test_a_checkpoint_of_stages_with_divided_experts_resumes_with_the_same_bits(
    ranks: RankServer, tmp_path: Path
) -> None:
    divided = {"pipeline_parallel": 2, "expert_parallel": 2, "stage": 2}
    shared = {"directory": str(tmp_path / "step-2"), "experts": 4, "max_grad_norm": CLIP}
    saved = ranks.run("save_pipeline", 4, tmp_path / "save", divided=divided, kind="arena", **shared)
    assert_same_bits(ranks.run("resume_pipeline", 4, tmp_path / "again", divided=divided, **shared), saved)
    (alone,) = ranks.run("resume_pipeline", 1, tmp_path / "alone", divided={}, **shared)
    weights, expected = alone["weights"], joined(saved, "weights")
    assert {name for name in expected if ".mixture.experts.tiles." in name}
    assert not [name for name, value in expected.items() if not torch.equal(in_full(weights, name), value)]


def test_what_ranks_of_a_stage_would_need_of_each_other_is_refused(ranks: RankServer, tmp_path: Path) -> None:
    name = write_mixture("mixtral-15m", tmp_path / "model")
    for errors in ranks.run("share_experts", 4, tmp_path, name=name):
        assert all("expert_parallel=2 and stage=2" in error for error in errors)


@pytest.mark.slow
def test_the_example_learns_and_resumes(ranks: RankServer, tmp_path: Path) -> None:
    def losses(*words: str) -> list[float]:
        printed = ranks.run("run_example", 2, tmp_path, name="pipeline", words=words)
        assert not printed[0], "the first stage has no loss"
        return [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed[1])]

    first = losses("20")
    assert first[-1] < 0.8 * first[0]
    assert len(losses("21")) == 1
