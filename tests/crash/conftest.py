"""One server for all tests of crashes: it imports everything once and forks for each command."""

from collections.abc import Iterator

import pytest

from tests.crash.world import Server, compiler


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    found = compiler()
    if found is None:
        pytest.skip("recording what a process writes needs Linux and a C compiler")
    server = Server(tmp_path_factory.mktemp("server"), found)
    yield server
    server.close()
