"""A run that tests of ranks share."""

import pytest

from pagoda.train import TrainConfig

from .ranks import RankServer
from .tiny_runs import started, tiny_config


@pytest.fixture(scope="session")
def whole(ranks: RankServer, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run of two ranks that nothing has happened to and that has ended: to be copied, not changed."""
    folder = tmp_path_factory.mktemp("whole")
    config = tiny_config(folder)
    assert started(ranks, 2, folder / "ranks", config) == [0, 0]
    return config
