"""Places in the grids: who shares what."""

import pytest

from pagoda.errors import ConfigError
from pagoda.parallel.mesh import Mesh
from pagoda.parallel.world import World, launched
from pagoda.plan.ranks import Ranks


def mesh(rank: int, size: int, **settings: int) -> Mesh:
    return Mesh(World(rank, size, rank, size), Ranks(size, size, **settings))


def test_without_torchrun_the_world_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert launched() == World(0, 1, 0, 1)


def test_replicas_are_consecutive_ranks_and_copies_are_apart() -> None:
    for rank in range(8):
        place = mesh(rank, 8, replicas=2)
        assert place.sharers() == (tuple(range(4)) if rank < 4 else tuple(range(4, 8)))
        assert place.copies() == (rank % 4, rank % 4 + 4)


def test_every_slice_of_every_copy_is_held_by_exactly_one_rank() -> None:
    for replicas in (1, 2, 3, 6):
        places = [(mesh(r, 6, replicas=replicas).sharers(), mesh(r, 6, replicas=replicas).copies()) for r in range(6)]
        for rank, (sharers, copies) in enumerate(places):
            assert set(sharers) & set(copies) == {rank}
            assert len(sharers) * len(copies) == 6


def test_ranks_with_the_same_experts_are_as_far_apart_as_there_are_parts() -> None:
    for rank in range(8):
        place = mesh(rank, 8, expert_parallel=4)
        assert place.expert_index == rank % 4
        assert place.sharers(expert=True) == (rank % 4, rank % 4 + 4)
        assert place.sharers() == tuple(range(8))


@pytest.mark.parametrize("settings", [{"replicas": 3}, {"replicas": 0}, {"replicas": 2, "expert_parallel": 2}])
def test_uneven_replicas_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        Ranks(4, 4, 3, **settings)
