"""Runs that tests of ranks share."""

import json
from collections.abc import Callable
from functools import cache
from typing import Any

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


@pytest.fixture(scope="session")
def once(ranks: RankServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    """As `ranks.run`, for what tests compare others with: it runs once, however many of them ask for it."""

    @cache
    def run(said: str) -> list[Any]:
        scenario, count, arguments = json.loads(said)
        return ranks.run(scenario, count, tmp_path_factory.mktemp("once"), **arguments)

    return lambda scenario, count, **arguments: run(json.dumps([scenario, count, arguments], sort_keys=True))
