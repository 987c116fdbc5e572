"""A checkpoint of some ranks is one of any number of them."""

from pathlib import Path
from typing import Any

import pytest
from zoo import assert_equal

from .ranks import RankServer

SLOW = pytest.mark.slow


def assert_same_state(first: dict[str, Any], second: dict[str, Any]) -> None:
    for of in "weights", "states":
        assert_equal(first[of], second[of])


READERS: dict[int, dict[str, Any]] = {1: {"kind": "ssd"}, 2: {"kind": "arena"}, 4: {"stage": 1}}


@pytest.mark.parametrize(
    ("writers", "written", "rule", "readers"),
    [
        pytest.param(2, {"kind": "ssd"}, "muon", (1,), id="two ranks on ssd, muon"),
        pytest.param(4, {"stage": 1}, "adafactor", (1, 2, 4), marks=SLOW, id="four ranks, stage 1, adafactor"),
        pytest.param(2, {"stage": 2, "kind": "ssd"}, "adagrad", (1, 2, 4), marks=SLOW, id="stage 2, a class of torch"),
        pytest.param(4, {"stage": 2}, None, (1, 2, 4), marks=SLOW, id="four ranks, stage 2"),
        pytest.param(1, {}, None, (1, 2, 4), marks=SLOW, id="one rank"),
        pytest.param(2, {"kind": "ssd", "late": True}, None, (2,), id="two ranks on ssd, a step late"),
        pytest.param(2, {"stage": 1, "late": True}, None, (1, 2), marks=SLOW, id="stage 1, a step late"),
        pytest.param(2, {"late": True, "predict": True}, None, (1, 2), marks=SLOW, id="two ranks, predicted, late"),
    ],
)
def test_a_checkpoint_resumes_on_other_ranks_with_the_same_bits(
    writers: int, written: dict[str, Any], rule: str | None, readers: tuple[int, ...], ranks: RankServer, tmp_path: Path
) -> None:
    written = dict(written)
    shared = {"name": "llama", "tensor": 1, "precision": "fp32", "max_grad_norm": 0.5, "rule": rule}
    shared |= {"directory": str(tmp_path / "step-2")}
    shared |= {name: written.pop(name) for name in ("late", "predict") if name in written}
    saved = ranks.run("save_divided", writers, tmp_path / "save", parts=writers, **shared, **written)
    for count in readers:
        out = tmp_path / f"resume-{count}"
        results = ranks.run("resume_divided", count, out, parts=count, **shared, **READERS[count])
        for result in results:
            assert_same_state(saved[0], result)
        if count == writers:  # the same batches: the run goes on as if nothing had been
            assert [result["losses"] for result in results] == [result["losses"] for result in saved]
