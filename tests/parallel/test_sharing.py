"""A rank that is asked for weights it has not updated yet: the others wait for it as long as it can still do so."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runtime.parts import RESIDENT, Parts, parts

from pagoda.errors import RankError
from pagoda.parallel.agreement import Asks, Call
from pagoda.parallel.mesh import Mesh
from pagoda.parallel.world import World
from pagoda.plan.ranks import Ranks
from pagoda.plan.slices import Span
from pagoda.runtime import collective, sharing
from pagoda.runtime.collective import Collectives
from pagoda.runtime.device import Device
from pagoda.runtime.sharing import Sharing

from .test_agreement import FakeWire, Table

NUMEL = 2048


class FakeCollectives:
    """Rank 1 of two, which both have all weights; what it sends is kept."""

    def __init__(self) -> None:
        self.awaited = False
        self.sent: list[torch.Tensor] = []
        self.servers: dict[Asks, Callable[[Call, Sequence[Call]], None]] = {}
        self.wire = SimpleNamespace(trade=lambda sends, _: self.sent.extend(tensor.clone() for _, tensor in sends))
        self.shards = SimpleNamespace(
            rank=1,
            family=lambda _: {0, 1},
            sharers=lambda _: (0, 1),
            updated=lambda _: Span(NUMEL // 2, NUMEL, 0),
            is_cut=lambda *_: False,
        )

    def serve(self, asks: Asks, server: Callable[[Call, Sequence[Call]], None]) -> None:
        self.servers[asks] = server


@pytest.fixture
def part(tmp_path: Path) -> Iterator[Parts]:
    with parts(tmp_path, [[NUMEL]], placement=RESIDENT) as made:
        made.store.write(0, "weight", 0, torch.arange(NUMEL).to(made.dtype))
        yield made


def ask(part: Parts, collectives: Any, monkeypatch: pytest.MonkeyPatch, on_wait: Callable[[int], None]) -> None:
    """Rank 0 asks rank 1 for its weights after one update; each of the waits of rank 1 takes a second of the clock."""
    Sharing(collectives, part.store, part.units, early=True)
    waits = 0

    def sleep(_: float) -> None:
        nonlocal waits
        waits += 1
        on_wait(waits)

    monkeypatch.setattr(sharing, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: float(waits)))
    asked = Call(Asks.SHARE, 0, version=1)
    collectives.servers[Asks.SHARE](asked, [asked, Call(Asks.JOINTLY)])


def test_a_rank_that_takes_a_minute_to_queue_its_update_is_waited_for(
    part: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def update(waits: int) -> None:
        part.units[0].version = int(waits >= 60)

    collectives = FakeCollectives()
    ask(part, collectives, monkeypatch, update)
    (sent,) = collectives.sent
    assert torch.equal(sent, torch.arange(NUMEL // 2, NUMEL).to(part.dtype))


def test_a_rank_that_waits_for_what_comes_later_has_not_made_the_update(
    part: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reach_the_end_of_the_step(waits: int) -> None:
        assert waits <= 3, "it will never be updated"
        collectives.awaited = waits == 3

    collectives = FakeCollectives()
    with pytest.raises(RankError, match="after 1 updates, and rank 1 has made 0"):
        ask(part, collectives, monkeypatch, reach_the_end_of_the_step)


def test_collectives_know_that_compute_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective, "Group", lambda *_: None)
    mesh = Mesh(World(), Ranks(1, 1))
    wire: Any = FakeWire(Table(1), 0)
    shards: Any = None
    collectives = Collectives(mesh, wire, shards, Device())
    seen: list[bool] = []
    collectives.jointly("optimizer.step()", lambda _: seen.append(collectives.awaited))
    assert seen == [True]
    assert not collectives.awaited
    collectives.close()


def test_ranks_are_not_waited_for_longer_than_the_timeout(part: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGODA_RANK_TIMEOUT", "70")
    waited: list[int] = []
    with pytest.raises(RankError, match="has made 0"):
        ask(part, FakeCollectives(), monkeypatch, waited.append)
    assert waited[-1] == 70
