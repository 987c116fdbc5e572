"""Models that torch's parallelize_module has divided train in pages with the bits they have without them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from zoo import LAYERS, assert_equal

from tests.tiny import write_mixture

from .ranks import RankServer
from .test_checkpoints_of_ranks import assert_same_state

SLOW = pytest.mark.slow
Case = tuple[int, dict[str, Any], dict[str, Any]]
"""Ranks, what is trained, placement."""
CASES: dict[str, Case] = {
    "two ranks, of a mesh of torch's": (2, {"name": "llama", "parts": 1}, {"by_torch": True}),
    "two ranks, along the sequence, in an arena": (2, {"name": "mixer", "parts": 1}, {"kind": "arena"}),
}
SLOW_CASES: dict[str, Case] = {
    "two ranks, Adafactor": (2, {"name": "llama", "parts": 1, "rule": "adafactor", "precision": "fp32"}, {}),
    "four ranks, Muon, on ssd": (
        4,
        {"name": "mixer", "parts": 2, "rule": "muon", "precision": "fp32"},
        {"kind": "ssd"},
    ),
    "four ranks, 8-bit moments, on ssd": (4, {"name": "llama", "parts": 2, "rule": "adamw-8bit"}, {"kind": "ssd"}),
    "four ranks, on ssd": (4, {"name": "llama", "parts": 2}, {"kind": "ssd"}),
    "four ranks, along the sequence, fp32": (4, {"name": "mixer", "parts": 2, "precision": "fp32"}, {}),
    "two ranks, a class of torch's": (2, {"name": "mixer", "parts": 1, "rule": "adagrad", "precision": "fp32"}, {}),
    "four ranks, stage 2": (4, {"name": "llama", "parts": 2}, {"stage": 2}),
    "four ranks, two replicas": (4, {"name": "mixer", "parts": 2}, {"replicas": 2}),
}


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=SLOW) for name in SLOW_CASES)])
def test_a_divided_model_has_the_bits_that_it_has_without_pages(
    name: str, ranks: RankServer, once: Any, tmp_path: Path
) -> None:
    count, model, placement = (CASES | SLOW_CASES)[name]
    expected = once("train_plain", 2, tensor=2, **model)
    results = ranks.run("train_divided", count, tmp_path, tensor=2, **model, **placement)
    for rank, result in enumerate(results):
        group = rank // 2
        assert result["losses"] == expected[rank % 2]["losses"][group :: count // 2]
        assert_equal(result["parts"], expected[rank % 2]["parts"])
        assert all(peak <= result["plan_peak"][tier] for tier, peak in result["peak"].items())
        assert result["norms"] == results[0]["norms"]
    if placement.get("kind") == "ssd":
        moment = {"adamw-8bit": "exp_avg_fp8", "muon": "momentum_buffer"}.get(model.get("rule"), "exp_avg")
        assert all({"weight", moment} <= result["lines"]["ssd"].keys() for result in results)


@pytest.mark.parametrize(("count", "parts"), [(2, 1), pytest.param(4, 2, marks=SLOW)])
@pytest.mark.parametrize("name", [pytest.param("llama", marks=SLOW), "mixer"])
def test_a_divided_model_differs_from_an_undivided_one_by_the_order_of_sums_only(
    name: str, count: int, parts: int, ranks: RankServer, tmp_path: Path
) -> None:
    """In fp32: a layer's sums are cut in two, and each later step sees the difference."""
    shared = {"name": name, "parts": parts, "precision": "fp32", "max_grad_norm": 0.5}
    alone = ranks.run("train_divided", 1, tmp_path / "alone", tensor=1, **shared)[0]
    for result in ranks.run("train_divided", count, tmp_path / "divided", tensor=2, **shared):
        if parts == 1:
            assert result["losses"] == pytest.approx(alone["losses"], rel=1e-3)
        assert result["norms"] == pytest.approx(alone["norms"], rel=1e-3)
        assert result["weights"].keys() == alone["weights"].keys()
        for param, weight in alone["weights"].items():
            apart = (result["weights"][param] - weight).abs()
            assert apart.mean() < 1e-5, param
            assert apart.max() < 1e-2, param


@SLOW
def test_tensor_parallel_ranks_divide_experts_with_others(ranks: RankServer, tmp_path: Path) -> None:
    """Attention over pairs of ranks, experts over pairs of those, against one rank: sums in another order."""
    model = write_mixture("mixtral-15m", tmp_path / "model")
    shared = {"name": model, "parts": 2, "precision": "fp32", "steps": 2, "max_grad_norm": 0.5}
    alone = ranks.run("train_divided", 1, tmp_path / "alone", tensor=1, **shared)[0]
    on_ssd = {"tensor": 2, "expert_parallel": 2, "kind": "ssd", "activations": "keep"}
    for rank, result in enumerate(ranks.run("train_divided", 4, tmp_path / "divided", **on_ssd, **shared)):
        assert result["losses"] == pytest.approx(alone["losses"][rank // 2 :: 2], rel=1e-3)
        assert result["norms"] == pytest.approx(alone["norms"], rel=1e-3)
        assert {"weight", "exp_avg"} <= result["lines"]["ssd"].keys()
        assert result["full"].keys() == alone["full"].keys()
        for param, weight in alone["full"].items():
            assert (result["full"][param] - weight).abs().mean() < 1e-5, param


"""The mean difference is a thousandth of a step; an element whose gradient is rounding noise may step the other way."""


@pytest.mark.parametrize("way", [pytest.param("checkpoint", marks=SLOW), "dcp"])
@pytest.mark.parametrize("rule", ["adamw", *(pytest.param(rule, marks=SLOW) for rule in ("muon", "adafactor"))])
def test_a_checkpoint_of_divided_tensors_resumes_however_they_are_divided(
    way: str, rule: str, ranks: RankServer, tmp_path: Path
) -> None:
    shared = {"name": "mixer", "directory": str(tmp_path / "step-2"), "way": way, "rule": rule}
    saved = ranks.run("save_divided", 2, tmp_path / "save", tensor=2, **shared)
    for result in ranks.run("resume_divided", 2, tmp_path / "same", tensor=2, kind="ssd", **shared):
        assert_same_state(saved[0], result)
        assert result["losses"] == saved[0]["losses"]
    assert_same_state(saved[0], ranks.run("resume_divided", 1, tmp_path / "alone", tensor=1, **shared)[0])


@pytest.mark.parametrize("way", ["checkpoint", pytest.param("dcp", marks=SLOW)])
def test_8bit_moments_resume_however_tensors_are_divided(way: str, ranks: RankServer, tmp_path: Path) -> None:
    """With every bit where they were divided alike; else moments that are small in their new block may change."""
    shared = {"name": "mixer", "way": way, "rule": "adamw-8bit"}
    for tensor, other in ((2, 1), (1, 2)) if way == "dcp" else ((2, 1),):
        directory = str(tmp_path / f"of-{tensor}")
        out = tmp_path / f"from-{tensor}"
        saved = ranks.run("save_divided", tensor, out / "save", tensor=tensor, directory=directory, **shared)
        alike = ranks.run(
            "resume_divided", tensor, out / "alike", tensor=tensor, kind="ssd", directory=directory, **shared
        )
        for result in alike:
            assert_same_state(saved[0], result)
            assert result["losses"] == saved[0]["losses"]
        for result in ranks.run("resume_divided", other, out / "other", tensor=other, directory=directory, **shared):
            assert_equal(result["weights"], saved[0]["weights"])
            assert result["losses"] == pytest.approx(saved[0]["losses"], rel=5e-3)
            for index, states in saved[0]["states"].items():
                assert result["states"][index]["step"] == states["step"]
                for moment, bound in (("exp_avg", 0.0112), ("exp_avg_sq", 0.0040)):
                    before, after = states[moment], result["states"][index][moment]
                    assert (after - before).abs().max() <= bound * before.abs().max()


@SLOW
def test_layers_that_are_not_divided_are_computed_in_tiles(ranks: RankServer, tmp_path: Path) -> None:
    """In fp32 with the results of one rank, but for the order of sums; and what they save is what whole layers load."""
    whole = {"name": "llama", "precision": "fp32"}
    shared = {**whole, "tiles": {"tile_limit": "8KiB"}}
    alone = ranks.run("train_divided", 1, tmp_path / "alone", tensor=1, parts=1, **shared)[0]
    for result in ranks.run("train_divided", 2, tmp_path / "divided", tensor=2, parts=1, **shared):
        assert result["losses"] == pytest.approx(alone["losses"], rel=1e-3)
        assert result["weights"].keys() == alone["weights"].keys()
        assert all((result["weights"][name] - weight).abs().mean() < 1e-5 for name, weight in alone["weights"].items())
        tiled = {module.partition(".tiles.")[0] for module in result["modules"] if ".tiles." in module}
        assert tiled == {"model.embed_tokens"}  # which the head shares
    directory = str(tmp_path / "step-2")
    saved = ranks.run("save_divided", 2, tmp_path / "save", tensor=2, directory=directory, kind="ssd", **shared)[0]
    loaded = ranks.run("resume_divided", 1, tmp_path / "whole", tensor=1, directory=directory, **whole)[0]
    assert_equal(loaded["weights"], saved["weights"])


@pytest.mark.parametrize("rule", [pytest.param("adamw", marks=SLOW), "muon"])
def test_divided_parameters_are_read_changed_and_loaded_as_wholes(rule: str, ranks: RankServer, tmp_path: Path) -> None:
    """Those that Muon takes whole are stored whole, others in parts."""
    results = ranks.run("change_divided", 2, tmp_path, name="mixer", rule=rule)
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert_equal(exported, results[0]["full"])
    for rank, result in enumerate(results):
        before = result["before"]
        assert_equal(result["full"], before if rank == 0 else {})
        assert torch.equal(result["shown"], before["head.weight"])
        assert torch.equal(result["doubled"]["head.weight"], 2 * before["head.weight"])
        assert_equal(result["after"], before)
        first, twice, ones = result["moments"]
        assert torch.equal(first, results[0]["moments"][0])
        assert first.any()
        assert torch.equal(twice, 2 * first)
        assert torch.equal(ones, torch.ones_like(first))
        assert "It is a copy" in result["refused"]


def test_methods_of_divided_parameters_read_their_values(ranks: RankServer, tmp_path: Path) -> None:
    """A DTensor's own methods reach its rank's part without a function of torch."""
    assert ranks.run("read_divided", 2, tmp_path) == [[], []]


def test_weights_drawn_on_meta_do_not_depend_on_how_tensors_are_divided(ranks: RankServer, tmp_path: Path) -> None:
    alone = ranks.run("drawn", 1, tmp_path / "alone", tensor=1)[0]
    for result in ranks.run("drawn", 2, tmp_path / "divided", tensor=2):
        assert_equal(result, alone)


def test_what_tensor_parallelism_cannot_do_is_refused(ranks: RankServer, tmp_path: Path) -> None:
    for said in ranks.run("refuse", 2, tmp_path):
        assert "no parameter is a DTensor" in said["not divided"]
        assert "tensor_parallel of the mesh is 1" in said["other mesh"]
        assert "cannot be divided in 2 equal parts" in said["uneven"]


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("llama", "recompute+offload"),
        pytest.param("llama", "recompute", marks=SLOW),
        pytest.param("mixer", "recompute", marks=SLOW),
    ],
)
def test_partitioned_activations_change_no_bit(name: str, policy: str, ranks: RankServer, tmp_path: Path) -> None:
    shared = {"name": name, "tensor": 2, "parts": 1, "activations": policy, "kind": "arena", "larger": 16}
    whole = ranks.run("train_divided", 2, tmp_path / "whole", **shared)
    divided = ranks.run("train_divided", 2, tmp_path / "divided", partition=True, **shared)
    for before, after in zip(whole, divided, strict=True):
        assert after["losses"] == before["losses"]
        assert_equal(after["parts"], before["parts"])
        halves = LAYERS * after["hidden"] // 2 if name == "llama" else 0
        """Of the inputs of all blocks; those of the other model are divided along the sequence already."""
        small = 16 << 10
        if policy == "recompute":
            assert halves <= before["kept"] - after["kept"] <= halves + small
        else:
            moved = [step["d2h"] - other["d2h"] for step, other in zip(before["moved"], after["moved"], strict=True)]
            assert all(halves <= saved <= halves + small for saved in moved)
