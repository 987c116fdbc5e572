"""What one call of `run` returns, and what it follows from."""

from pathlib import Path

import pytest

from pagoda.errors import ConfigError, NonFiniteGradientError
from pagoda.optimizer import PagedOptimizer
from tests.tiny import tiny_run, trained


def test_a_user_error_in_the_first_step_leaves_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise NonFiniteGradientError("the gradient of embed_tokens.weight is NaN")

    monkeypatch.setattr(PagedOptimizer, "step", refuse)
    config = tiny_run(tmp_path)
    with pytest.raises(NonFiniteGradientError):
        trained(config)
    assert not config.out.exists()


def test_a_prompt_that_cannot_be_continued_is_refused_before_the_first_step(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, sample_every=4, prompt="")
    with pytest.raises(ConfigError, match="--prompt is empty"):
        trained(config)
    assert not config.out.exists()
