"""What runs the command lines of all tests of crashes."""

import pytest
from ranks.ranks import RankServer, compiler

from tests.crash.world import Commands


@pytest.fixture(scope="session")
def commands(ranks: RankServer, tmp_path_factory: pytest.TempPathFactory) -> Commands:
    if compiler() is None:
        pytest.skip("recording what a process writes needs Linux and a C compiler")
    return Commands(ranks, tmp_path_factory.mktemp("commands"))
