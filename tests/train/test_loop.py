"""What one call of `run` returns, and what it follows from."""

from dataclasses import replace
from pathlib import Path

import pytest

from pagoda.errors import NonFiniteGradientError
from pagoda.optimizer import PagedOptimizer
from pagoda.train.metrics import read_metrics
from tests.tiny import tiny_run, trained


def test_the_result_says_what_was_run_and_follows_from_the_seed_alone(tmp_path: Path) -> None:
    config = tiny_run(tmp_path)
    seeds = {"a": 0, "b": 0, "c": 1}
    results = [trained(replace(config, out=tmp_path / name, seed=seed))[0] for name, seed in seeds.items()]
    lines = [read_metrics(tmp_path / name / "metrics.jsonl") for name in seeds]
    curves = [[line["loss"] for line in of_run] for of_run in lines]
    assert curves[0] == curves[1] != curves[2]
    assert lines[0][0]["aux_loss"] is None, "there are no experts to balance"
    result = results[0]
    assert (result.first_step, result.last_step, result.stopped_by) == (1, 4, None)
    assert (result.first_loss, result.final_loss) == (curves[0][0], curves[0][-1])
    assert result.checkpoint == tmp_path / "a" / "checkpoints" / "step-000004"
    assert result.tokens_per_s > 0
    assert result.plan.parameters == 26_784


def test_a_user_error_in_the_first_step_leaves_no_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise NonFiniteGradientError("the gradient of embed_tokens.weight is NaN")

    monkeypatch.setattr(PagedOptimizer, "step", refuse)
    config = tiny_run(tmp_path)
    with pytest.raises(NonFiniteGradientError):
        trained(config)
    assert not config.out.exists()
