"""Ranks that divide sequences train as one rank does, except for rounding."""

from pathlib import Path
from typing import Any

import pytest
import torch
from zoo import llama

import pagoda
from pagoda.errors import ConfigError, UsageError
from pagoda.prepare.sequence_parallel import SequenceRanks

from .ranks import RankServer

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "two ranks, packed documents, recomputed": (2, {"packed": True, "kv_heads": 2, "activations": "recompute"}),
    "two ranks, fewer heads of keys than ranks": (2, {"packed": False, "kv_heads": 1}),
    "four ranks, two for each sequence": (4, {"packed": True, "kv_heads": 2}),
}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in CASES if "four" in name]


@pytest.mark.parametrize("name", [*(name for name in CASES if "four" not in name), *SLOW])
def test_ranks_that_divide_sequences_train_as_one_rank_does(name: str, ranks: RankServer, tmp_path: Path) -> None:
    count, settings = CASES[name]
    (alone,) = ranks.run("divide_sequences", 1, tmp_path / "1", divided=1, **settings)
    results = ranks.run("divide_sequences", count, tmp_path / "n", divided=2, **settings)
    for step, expected in enumerate(alone["losses"]):
        assert sum(result["losses"][step] for result in results) / count == pytest.approx(expected, rel=1e-5)
    for result in results:
        assert result["norms"] == pytest.approx(alone["norms"], rel=1e-5)
    for weight, expected in alone["weights"].items():
        torch.testing.assert_close(results[0]["weights"][weight], expected, rtol=1e-3, atol=2e-4)


@pytest.mark.slow
def test_the_example_learns(ranks: RankServer, tmp_path: Path) -> None:
    printed = ranks.run("run_example", 2, tmp_path, name="long_context", words=["6"])
    losses = [float(line.split()[-1]) for line in printed[0].splitlines()]
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 0.5


@pytest.fixture
def world_of_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": 8, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 8}.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.usefixtures("world_of_eight")
@pytest.mark.parametrize(
    ("ranks", "message"),
    [(3, "3 ranks do not divide 8 ranks"), (8, "8 ranks cannot .* 8 does not divide its 4 attention heads")],
)
def test_what_ranks_cannot_divide_is_refused(ranks: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pagoda.divide_sequences(llama(), ranks)


def test_batches_that_cannot_be_cut_are_refused() -> None:
    ids = torch.zeros(1, 9, dtype=torch.long)
    two = SequenceRanks(2, 0, None)
    with pytest.raises(UsageError, match="2 ranks cannot divide 9 tokens equally"):
        two.part({"input_ids": ids, "labels": ids})
    with pytest.raises(UsageError, match="this is 'attention_mask'"):
        two.part({"input_ids": ids, "labels": ids, "attention_mask": ids})
