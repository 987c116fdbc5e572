import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from pagoda.config.memory import Memory
from pagoda.errors import NonFiniteGradientError
from pagoda.optimizer import PagedOptimizer
from pagoda.train import TrainConfig, run
from pagoda.train.metrics import read_metrics
from tests.tiny import write_model, write_text


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    return TrainConfig(
        model=write_model(tmp_path / "model", hidden_size=32, intermediate_size=64, num_hidden_layers=2),
        data=write_text(tmp_path / "text"),
        steps=4,
        batch_size=2,
        seq_len=16,
        memory=Memory(host="64MiB"),
        out=tmp_path / "run",
    )


def quiet() -> Console:
    return Console(file=io.StringIO())


def test_the_result_says_what_was_run(config: TrainConfig) -> None:
    result = run(replace(config, checkpoint_every=3), quiet())
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
        run(config, quiet())
    assert not config.out.exists()


def test_the_run_follows_from_its_seed_alone(config: TrainConfig) -> None:
    def losses(name: str, seed: int) -> list[float]:
        out = config.out / name
        run(replace(config, out=out, seed=seed), quiet())
        return [line["loss"] for line in read_metrics(out / "metrics.jsonl")]

    assert losses("a", 0) == losses("b", 0) != losses("c", 1)


def test_accumulated_passes_average_to_the_loss_of_one_large_batch(config: TrainConfig) -> None:
    whole = replace(config, steps=1, batch_size=4, precision="fp32", out=config.out / "whole")
    parts = replace(whole, batch_size=2, accumulation_steps=2, out=config.out / "parts")
    assert run(parts, quiet()).first_loss == pytest.approx(run(whole, quiet()).first_loss, rel=1e-5)
