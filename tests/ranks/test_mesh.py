"""Places in the grids: who shares what, and which elements each has."""

import pytest

from pagoda.errors import ConfigError
from pagoda.mesh.mesh import Mesh
from pagoda.mesh.shards import Shards
from pagoda.mesh.world import World
from pagoda.optim import AdamW
from pagoda.plan.collective import reduce_buffers
from pagoda.plan.layout import GRAD, WEIGHT, Layout
from pagoda.plan.ranks import Ranks
from pagoda.plan.units import ModuleSpec, ParamSpec, UnitSpec, discover


def mesh(rank: int, size: int, **settings: int) -> Mesh:
    return Mesh(World(rank, size, rank, size), Ranks(size, size, **settings))


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("experts", [1, 2])
@pytest.mark.parametrize("tensor", [1, 2])
def test_replicas_experts_and_tensors_are_divided_in_one_grid(replicas: int, experts: int, tensor: int) -> None:
    ranks = Ranks(8 // tensor, 8, 3, experts, replicas, tensor)
    grid = [Mesh(World(rank, 8, rank, 8), ranks) for rank in range(8)]
    for rank, place in enumerate(grid):
        for expert in (False, True):
            sharers = place.sharers(expert)
            assert sharers.index(rank) == ranks.place(rank, expert)
            assert len(sharers) == ranks.sharers(expert)
            family = {other for copy in place.copies() for other in grid[copy].sharers(expert)}
            assert family == {*place.family(expert)}
            parts = {(grid[other].tensor_index, expert and grid[other].expert_index) for other in family}
            assert parts == {(place.tensor_index, expert and place.expert_index)}


@pytest.mark.parametrize(
    "settings", [{"replicas": 3}, {"replicas": 0}, {"replicas": 2, "expert_parallel": 4}, {"pipeline_parallel": 0}]
)
def test_uneven_replicas_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        Ranks(4, 4, 3, **settings)


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_stage_is_a_grid_of_consecutive_ranks_that_count_from_0(tensor: int) -> None:
    ranks = Ranks(4 // tensor, 12, tensor_parallel=tensor, pipeline_parallel=3)
    grid = [Mesh(World(rank, 12, rank, 12), ranks) for rank in range(12)]
    for rank, place in enumerate(grid):
        alike = Mesh(World(rank % 4, 4, rank % 4, 4), Ranks(4 // tensor, 4, tensor_parallel=tensor))
        assert (place.pipeline_stage, place.rank, place.size) == (rank // 4, rank % 4, 4)
        assert (place.sharers(), place.copies(), place.family()) == (alike.sharers(), alike.copies(), alike.family())
        assert place.world.global_rank(place.rank) == place.peers.global_rank(place.pipeline_stage) == rank
        assert [place.peers.global_rank(stage) for stage in range(3)] == [rank % 4, rank % 4 + 4, rank % 4 + 8]
        assert place.tensor_ranks == tuple(4 * place.pipeline_stage + part for part in alike.tensor_ranks)


def layout_of(stage: int, ranks: int, frozen: int) -> tuple[Layout, UnitSpec]:
    """Ten parameters of a unit, the last `frozen` of which train nothing."""
    params = tuple(ParamSpec(f"p{i}", (2000 + 37 * i,), trainable=i < 10 - frozen) for i in range(10))
    units = discover(ModuleSpec("", params), 1 << 30, 2)
    states = AdamW().states("bf16")
    return Layout(units, states, 4096, ranks=Ranks(ranks, ranks, stage)), units[0]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("count", [3, 8])
@pytest.mark.parametrize("frozen", [0, 4])
def test_slices_hold_every_element_once_and_fit_their_extents(stage: int, count: int, frozen: int) -> None:
    layout, unit = layout_of(stage, count, frozen)
    shards = [Shards(layout, Mesh(World(rank, count, rank, count), layout.ranks)) for rank in range(count)]
    for state, numel in ((WEIGHT, unit.numel), ("exp_avg", unit.trainable_numel), (GRAD, unit.trainable_numel)):
        cut = shards[0].is_sliced(unit, state)
        assert cut == ((state, stage) not in ((WEIGHT, 1), (WEIGHT, 2), (GRAD, 1)))
        seen = [
            element
            for one in (shards if cut else shards[:1])
            for span in one.spans(unit, state)
            for element in range(span.start, span.stop)
        ]
        assert sorted(seen) == list(range(numel))
        for one in shards:
            for span in one.spans(unit, state):
                assert span.at + len(span) <= layout.elements(unit, state)
    written = [e for one in shards for span in one.responsible(unit, WEIGHT) for e in range(span.start, span.stop)]
    assert sorted(written) == list(range(unit.numel))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_frozen_model_give_buffers_that_are_not_empty(stage: int) -> None:
    """`Buffers.open` takes each from memory, which gives no empty ones."""
    layout, _ = layout_of(stage, 4, frozen=10)
    assert reduce_buffers(layout).piece > 0


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_whoever_updates_an_element_has_all_states_of_it(stage: int) -> None:
    layout, unit = layout_of(stage, 4, frozen=3)
    for rank in range(4):
        shards = Shards(layout, Mesh(World(rank, 4, rank, 4), layout.ranks))
        updated = shards.updated(unit)
        for state in (WEIGHT, "weight_low", "exp_avg", GRAD):
            begins = shards.origin(unit, state)
            holding = next(span for span in shards.spans(unit, state) if span.start <= updated.start < span.stop)
            assert holding.at + updated.start - holding.start == begins
            assert holding.stop >= updated.stop
