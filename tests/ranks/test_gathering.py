"""A rank that is asked for weights it has not updated yet: the others wait for it as long as it can still do so."""

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import pagoda
from pagoda.engine import Engine
from pagoda.errors import RankError
from pagoda.mesh.mesh import Mesh
from pagoda.mesh.world import World
from pagoda.plan.ranks import Ranks
from pagoda.plan.slices import Span
from pagoda.ranks import collective, giving
from pagoda.ranks.collective import Collectives
from pagoda.ranks.gathering import Gathering
from pagoda.ranks.giving import Giving
from pagoda.ranks.order import CollectiveKind
from pagoda.runtime.device import Device
from pagoda.runtime.lanes import Handle

from .wire import FakeWire, Table

NUMEL = 2048


class FakeCollectives:
    """Rank 1 of two, which both have all weights; what it has when they are gathered is kept."""

    def __init__(self) -> None:
        self.awaited = False
        self.updates = 0
        self.order = SimpleNamespace(failed=False)
        self.given: list[torch.Tensor] = []
        self.take_part: dict[CollectiveKind, Callable[..., None]] = {}
        self.mesh = Mesh(World(), Ranks(1, 1, stage=1))
        group = SimpleNamespace(gather=lambda whole, spans: self.given.append(whole[slice(*spans[1])].clone()))
        self.sharers = lambda _: group
        self.edition = lambda _: self.updates
        slices = [Span(0, NUMEL // 2, 0), Span(NUMEL // 2, NUMEL, 0)]
        self.shards = SimpleNamespace(rank=1, trained_slices=lambda _: slices)


@pytest.fixture
def engine() -> Iterator[Engine]:
    """Of a model with one parameter, which counts."""
    memory = pagoda.Memory(host="1MiB", page_size=4096)
    _, optimizer = pagoda.wrap(nn.Linear(NUMEL, 1, bias=False), pagoda.AdamW(), memory=memory, precision="bf16")
    optimizer._engine.store.write(0, "weight", 0, torch.arange(NUMEL).bfloat16())
    yield optimizer._engine
    optimizer.close()


def ask(engine: Engine, collectives: Any, monkeypatch: pytest.MonkeyPatch, on_wait: Callable[[int], None]) -> None:
    """Rank 0 asks rank 1 for its weights after one update; each of the waits of rank 1 takes a second of the clock."""
    newest = engine.store.newest(0, "weight")
    executor: Any = SimpleNamespace(is_to_come=lambda _: False, updated=lambda _: None, newest=lambda _: newest)
    Giving(Gathering(collectives, engine.store, {}), engine.store, engine.units, executor, None)
    waits = 0

    def sleep(_: float) -> None:
        nonlocal waits
        waits += 1
        on_wait(waits)

    monkeypatch.setattr(giving, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: float(waits)))
    collectives.take_part[CollectiveKind.SHARE](engine.units[0], 1)


def test_a_rank_that_takes_a_minute_to_queue_its_update_is_waited_for(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def update(waits: int) -> None:
        collectives.updates = int(waits >= 60)

    collectives = FakeCollectives()
    ask(engine, collectives, monkeypatch, update)
    (given,) = collectives.given
    assert torch.equal(given, torch.arange(NUMEL // 2, NUMEL).bfloat16())


def test_a_rank_that_waits_for_what_comes_later_has_not_made_the_update(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reach_the_end_of_the_step(waits: int) -> None:
        assert waits <= 3, "it will never be updated"
        collectives.awaited = waits == 3

    collectives = FakeCollectives()
    with pytest.raises(RankError, match="after 1 updates, and rank 1 has made 0"):
        ask(engine, collectives, monkeypatch, reach_the_end_of_the_step)
    assert not collectives.given


def collectives_of(table: Table, rank: int) -> Collectives:
    """Those of a rank that is a thread, with one unit that all share."""
    size = len(table.rows)
    everyone = tuple(range(size))
    transport: Any = FakeWire(table, rank)
    shards: Any = SimpleNamespace(family=lambda _: everyone, sharers=lambda _: everyone)
    units: Any = [SimpleNamespace(index=0, spec=SimpleNamespace(name="unit"))]
    plan, weights = SimpleNamespace(units=(), during_backward=False), SimpleNamespace(edition=0)
    scheduler: Any = SimpleNamespace(position=0, trace=None, plan=plan, weights=lambda _: weights)
    mesh = Mesh(World(rank, size), Ranks(size, size))
    return Collectives(mesh, transport, shards, Device(), units, scheduler, lambda *_: None)


def test_collectives_know_that_compute_waits_for_them() -> None:
    collectives = collectives_of(Table(1), 0)
    seen: list[bool] = []
    collectives.on_all_ranks("optimizer.step()", lambda: seen.append(collectives.awaited))
    assert seen == [True]
    assert not collectives.awaited
    collectives.close()


def test_a_failed_update_of_weights_that_all_share_stops_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective, "Group", lambda *_: SimpleNamespace(ranks=()))
    table, met = Table(2), threading.Barrier(2, timeout=20)
    errors: list[BaseException | None] = [None, None]
    shared: list[int] = []

    def rank(me: int) -> None:
        collectives = collectives_of(table, me)
        collectives.take_part[CollectiveKind.SHARE] = lambda *_: met.wait()
        updated = Handle("ssd_write")
        updated.finish(OSError("the drive is gone") if me == 1 else None)
        work = lambda _: (met.wait(), shared.append(me))  # noqa: E731
        try:
            collectives.submit(CollectiveKind.SHARE, collectives._units[0], work, (updated,), alike=True).wait()
            collectives.on_all_ranks("optimizer.step()", lambda: None)
        except (OSError, RankError) as error:
            errors[me] = error
        collectives.close()

    threads = [threading.Thread(target=rank, args=(me,)) for me in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert shared == [0]
    assert isinstance(errors[1], OSError)
    assert "Rank 1 has failed" in str(errors[0])


def test_ranks_are_not_waited_for_longer_than_the_timeout(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGODA_RANK_TIMEOUT", "70")
    waited: list[int] = []
    with pytest.raises(RankError, match="has made 0"):
        ask(engine, FakeCollectives(), monkeypatch, waited.append)
    assert waited[-1] == 70
