"""A checkpoint of some ranks is one of any number of them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from .ranks import RankServer

RECIPE = {"model": "llama", "precision": "fp32", "steps": 4}
AFTER = 2


def assert_same_state(first: dict[str, Any], second: dict[str, Any]) -> None:
    for name, weight in first["weights"].items():
        assert torch.equal(weight, second["weights"][name]), name
    for index, states in first["states"].items():
        for name, value in states.items():
            assert torch.equal(value, second["states"][index][name]), (index, name)


@pytest.mark.parametrize(
    ("writers", "written"),
    [
        (2, {"stage": 3, "kind": "ssd"}),
        (2, {"stage": 3, "rule": "muon"}),
        pytest.param(4, {"stage": 1, "rule": "adafactor"}, marks=pytest.mark.slow),
        pytest.param(2, {"stage": 2, "rule": "adagrad", "kind": "moments-ssd"}, marks=pytest.mark.slow),
        pytest.param(2, {"stage": 1}, marks=pytest.mark.slow),
        pytest.param(4, {"stage": 2}, marks=pytest.mark.slow),
        pytest.param(1, {}, marks=pytest.mark.slow),
    ],
    ids=[
        "two ranks on ssd",
        "two ranks, muon",
        "four ranks, stage 1, adafactor",
        "two ranks, stage 2, a class of torch",
        "two ranks, stage 1",
        "four ranks, stage 2",
        "one rank",
    ],
)
def test_a_checkpoint_resumes_on_other_ranks_with_the_same_bits(
    writers: int, written: dict[str, Any], ranks: RankServer, tmp_path: Path
) -> None:
    directory = str(tmp_path / "step-2")
    recipe = {**RECIPE, **{key: written[key] for key in ("rule",) if key in written}}
    written = {key: value for key, value in written.items() if key != "rule"}
    shared = {"recipe": recipe, "directory": directory, "saved_after": AFTER}
    saved = ranks.run("save_and_go_on", writers, tmp_path / "save", **shared, **written)
    resumed: dict[int, dict[str, Any]] = {1: {"kind": "ssd"}, 2: {"stage": 3, "kind": "arena"}, 4: {"stage": 3}}
    if written.get("kind") == "ssd" or recipe.get("rule") == "muon":  # the cases that every run of the tests has
        del resumed[4]
    for readers, placement in resumed.items():
        if readers == 4 and writers == 4:
            placement = {"stage": 1}
        out = tmp_path / f"resume-{readers}"
        for result in ranks.run("resume", readers, out, **shared, **placement):
            assert result["extra"] == {"step": AFTER}
            assert_same_state(saved[0], result)
        if readers == writers:  # the same batches: the run goes on as if nothing had been
            results = [torch.load(out / f"rank-{rank}.pt") for rank in range(readers)]
            assert [result["losses"] for result in results] == [result["losses"][AFTER:] for result in saved]
