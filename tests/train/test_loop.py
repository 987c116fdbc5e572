"""What one call of `run` returns, and what it follows from."""

from pathlib import Path

import pytest

from pagoda.errors import NonFiniteGradientError
from pagoda.optimizer import PagedOptimizer
from pagoda.train.metrics import read_metrics
from tests.tiny import tiny_run, trained


def test_the_result_says_what_was_run(tmp_path: Path) -> None:
    config = tiny_run(tmp_path)
    result, _ = trained(config)
    lines = read_metrics(config.out / "metrics.jsonl")
    assert lines[0]["aux_loss"] is None, "there are no experts to balance"
    assert (result.first_step, result.last_step, result.stopped_by) == (1, 4, None)
    assert (result.first_loss, result.final_loss) == (lines[0]["loss"], lines[-1]["loss"])
    assert result.checkpoint == config.out / "checkpoints" / "step-000004"
    assert result.tokens_per_s > 0
    assert result.plan.parameters == 26_784


def test_a_user_error_in_the_first_step_leaves_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise NonFiniteGradientError("the gradient of embed_tokens.weight is NaN")

    monkeypatch.setattr(PagedOptimizer, "step", refuse)
    config = tiny_run(tmp_path)
    with pytest.raises(NonFiniteGradientError):
        trained(config)
    assert not config.out.exists()
