"""What one call of `run` returns, and what it follows from."""

from pathlib import Path

import pytest

from pagoda.errors import NonFiniteGradientError
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
