"""A rank answers others at any time, whatever it does itself, and refuses what it cannot give."""

import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagoda.errors import RankError
from pagoda.parallel.service import Answer, Service
from pagoda.parallel.world import World

from .test_agreement import FakeWire, Table


class WireWithLosses(FakeWire):
    """A wire that says which rank was lost."""

    def lost(self, rank: int, error: Exception) -> RankError:
        return RankError(f"Rank {rank} is lost: {error}")


def two(answer: Answer) -> list[Service]:
    """The services of two ranks; both give the same answers."""
    table, found = Table(2), [SimpleNamespace()] * 2

    def make(rank: int) -> None:
        wire: Any = WireWithLosses(table, rank)
        found[rank] = Service(wire, World(rank, 2, rank, 2), answer)  # type: ignore[call-overload]

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found  # type: ignore[return-value]


def answer(unit: int, version: int) -> Iterator[torch.Tensor]:
    yield torch.full((3,), float(unit))
    if version > 1:
        raise RankError(f"unit {unit} has had one update")
    yield torch.arange(1000, dtype=torch.bfloat16)


@pytest.fixture
def services() -> Iterator[list[Service]]:
    made = two(answer)
    yield made
    for each in made:
        each.close()


def test_messages_arrive_as_they_are(services: list[Service]) -> None:
    for unit in range(3):
        first, second = torch.empty(3), torch.empty(1000, dtype=torch.bfloat16)
        services[0].ask(unit, 1, [(1, [first, second])])
        assert first.tolist() == [unit] * 3
        assert torch.equal(second, torch.arange(1000, dtype=torch.bfloat16))


def test_a_rank_that_refuses_says_why_and_goes_on_answering(services: list[Service]) -> None:
    messages = [torch.empty(3), torch.empty(1000, dtype=torch.bfloat16)]
    with pytest.raises(RankError, match="unit 5 has had one update"):
        services[1].ask(5, 2, [(0, messages)])
    services[1].ask(5, 1, [(0, messages)])
    assert messages[0].tolist() == [5] * 3


def test_a_rank_that_has_closed_is_named(services: list[Service]) -> None:
    messages = [torch.empty(3), torch.empty(1000, dtype=torch.bfloat16)]
    services[0].ask(5, 1, [(1, messages)])
    services[1].close()
    with pytest.raises(RankError, match="Rank 1 is lost"):
        services[0].ask(5, 1, [(1, messages)])


def test_whoever_does_not_know_the_token_is_answered_nothing(services: list[Service]) -> None:
    host, port, _ = services[0]._addresses[1]
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(bytes(16))
        stranger.settimeout(10)
        assert stranger.recv(1) == b""
