"""What one call of `run` returns, and what it follows from."""

from pathlib import Path

import pytest

from pagoda.errors import NonFiniteGradientError
from pagoda.optimizer import PagedOptimizer
from pagoda.train.evaluate import Evaluator
from pagoda.train.metrics import Line, read_metrics
from pagoda.train.passes import Passes
from tests.tiny import tiny_run, trained


def test_a_user_error_in_the_first_step_leaves_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise NonFiniteGradientError("the gradient of embed_tokens.weight is NaN")

    monkeypatch.setattr(PagedOptimizer, "step", refuse)
    config = tiny_run(tmp_path)
    with pytest.raises(NonFiniteGradientError):
        trained(config)
    assert not config.output_dir.exists()


def test_what_an_evaluation_waits_for_is_not_a_wait_of_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = Evaluator.measure

    def waiting(evaluator: Evaluator, passes: Passes, step: int) -> Line:
        passes.optimizer._engine._meter.stall_s["update"] += 1000.0
        return measure(evaluator, passes, step)

    monkeypatch.setattr(Evaluator, "measure", waiting)
    config = tiny_run(
        tmp_path, max_steps=2, eval_share=0.2, max_eval_samples=4, eval_steps=1, plan="usual", save_at_end=False
    )
    trained(config)
    for line in read_metrics(config.output_dir / "metrics.jsonl"):
        assert sum(line["stall_s"].values()) <= line["step_s"]
