from dataclasses import replace
from pathlib import Path

import pytest

from pagoda.errors import NonFiniteGradientError
from pagoda.optimizer import PagedOptimizer
from pagoda.train import TrainConfig
from pagoda.train.metrics import read_metrics
from tests.tiny import tiny_run, trained


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    return tiny_run(tmp_path)


def test_the_result_says_what_was_run(config: TrainConfig) -> None:
    result, _ = trained(replace(config, checkpoint_every=3))
    assert result is not None
    lines = read_metrics(config.out / "metrics.jsonl")
    assert (result.first_step, result.last_step, result.stopped_by) == (1, 4, None)
    assert (result.first_loss, result.final_loss) == (lines[0]["loss"], lines[-1]["loss"])
    assert result.checkpoint == config.out / "checkpoints" / "step-000004"
    assert result.tokens_per_s > 0
    assert result.plan.parameters == 26_784


def test_a_user_error_in_the_first_step_leaves_no_run_directory(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise NonFiniteGradientError("the gradient of embed_tokens.weight is NaN")

    monkeypatch.setattr(PagedOptimizer, "step", refuse)
    with pytest.raises(NonFiniteGradientError):
        trained(config)
    assert not config.out.exists()


def test_the_run_follows_from_its_seed_alone(config: TrainConfig) -> None:
    def losses(name: str, seed: int) -> list[float]:
        out = config.out / name
        trained(replace(config, out=out, seed=seed))
        return [line["loss"] for line in read_metrics(out / "metrics.jsonl")]

    assert losses("a", 0) == losses("b", 0) != losses("c", 1)
