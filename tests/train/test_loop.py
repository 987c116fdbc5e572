"""What one call of `run` returns, and what it follows from."""

from dataclasses import replace
from pathlib import Path

import pytest

from pagoda.errors import ConfigError, NonFiniteGradientError
from pagoda.optimizer import PagedOptimizer
from pagoda.train.evaluate import Evaluation, Evaluator
from pagoda.train.metrics import read_metrics
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


def test_a_prompt_that_cannot_be_continued_is_refused_before_the_first_step(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, sample_every=4, prompt="")
    with pytest.raises(ConfigError, match="--prompt is empty"):
        trained(config)
    assert not config.output_dir.exists()


def test_samples_are_kept_once_for_each_step(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, max_steps=3, sample_every=1, sample_tokens=4, save_steps=2, save_at_end=False)
    trained(config)
    trained(replace(config, resume_from_checkpoint="last", max_steps=4))
    lines = read_metrics(config.output_dir / "samples.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]


def test_what_an_evaluation_waits_for_is_not_a_wait_of_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = Evaluator.measure

    def waiting(evaluator: Evaluator, passes: Passes, step: int) -> Evaluation:
        passes.optimizer._engine._meter.stall_s["update"] += 1000.0
        return measure(evaluator, passes, step)

    monkeypatch.setattr(Evaluator, "measure", waiting)
    config = tiny_run(
        tmp_path, max_steps=2, eval_share=0.2, max_eval_samples=4, eval_steps=1, plan="usual", save_at_end=False
    )
    trained(config)
    for line in read_metrics(config.output_dir / "metrics.jsonl"):
        assert sum(line["stall_s"].values()) <= line["step_s"]
