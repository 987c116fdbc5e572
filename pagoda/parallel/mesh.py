"""The mesh: every rank as a place in a grid, and the ranks that hold the parts of one thing."""

from collections.abc import Callable
from functools import cached_property

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pagoda.parallel.world import World, join, launched
from pagoda.plan.ranks import Ranks, Stage

REPLICATE, SHARD = "replicate", "shard"
"""Dimensions of the mesh of dense weights: whole copies of the state, and the slices of one copy."""
EXPERT_SHARD, EXPERT = "expert_shard", "expert"
"""Dimensions of the mesh of experts: ranks that share the same experts, and ranks that have different ones."""


Jointly = Callable[[str, Callable[[], None]], None]
"""Runs a collective that every rank runs at the same point of its program; the text says what it is, for errors."""


class Mesh:
    """The ranks of a run as two grids over the same processes.

    Dense weights: rank r is at (r // S, r % S) of replicas x S slices; a replica's ranks are consecutive, so that it
    lies inside a node where a node has as many. Experts: rank r is at (r // E, r % E); ranks of the same second
    coordinate have the same experts and share out their state, consecutive ones have different experts.
    """

    def __init__(self, world: World, ranks: Ranks) -> None:
        self.world = world
        self.ranks = ranks
        self.lane: Jointly | None = None
        """What orders all collectives, while a model is wrapped."""

    def jointly(self, what: str, work: Callable[[], None]) -> None:
        """Run a collective of compute's own, such as sending tokens to experts; returns when it has ended.

        While a model is wrapped it goes over the lane that orders all collectives, where it cannot meet a gather that
        another rank is waiting for.
        """
        if self.lane is None:
            work()
        else:
            self.lane(what, work)

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def size(self) -> int:
        return self.world.size

    @cached_property
    def dense(self) -> DeviceMesh:
        """The grid (REPLICATE, SHARD); every rank has to ask for it at the same point."""
        slices = self.ranks.data_parallel // self.ranks.replicas
        return init_device_mesh("cpu", (self.ranks.replicas, slices), mesh_dim_names=(REPLICATE, SHARD))

    @cached_property
    def experts(self) -> DeviceMesh:
        """The grid (EXPERT_SHARD, EXPERT); every rank has to ask for it at the same point."""
        each = self.ranks.expert_parallel
        shape = (self.ranks.data_parallel // each, each)
        return init_device_mesh("cpu", shape, mesh_dim_names=(EXPERT_SHARD, EXPERT))

    @property
    def expert_group(self) -> dist.ProcessGroup:
        """The ranks among which tokens travel to their experts: one of each part of the experts."""
        return self.experts.get_group(EXPERT)

    @property
    def expert_index(self) -> int:
        """Which part of the experts this rank has, from 0."""
        return self.rank % self.ranks.expert_parallel

    def sharers(self, expert: bool = False) -> tuple[int, ...]:
        """Ranks that hold the slices of one copy of a unit's state, in the order of the slices; `expert` for a unit of
        experts."""
        if expert:
            return tuple(range(self.expert_index, self.size, self.ranks.expert_parallel))
        slices = self.ranks.data_parallel // self.ranks.replicas
        first = self.rank // slices * slices
        return tuple(range(first, first + slices))

    def copies(self, expert: bool = False) -> tuple[int, ...]:
        """Ranks that hold the same slice of a dense unit's state as this one, one a replica; `expert` for a unit of
        experts, whose state has no replicas."""
        if expert:
            return (self.rank,)
        slices = self.ranks.data_parallel // self.ranks.replicas
        return tuple(range(self.rank % slices, self.size, slices))


def open_mesh(stage: Stage = 3, replicas: int = 1, expert_parallel: int = 1) -> Mesh:
    """The mesh of the processes that torchrun started, for `wrap(mesh=...)`; of one process without torchrun.

    `stage` is ZeRO's: what is divided over the ranks. `replicas` is the number of whole copies of the state (hybrid
    sharding), `expert_parallel` the number of ranks over which experts are divided. Every rank calls it, equally.

    Raises ConfigError where the ranks cannot be divided like that.
    """
    world = launched()
    ranks = Ranks(world.size, world.local_size, stage, expert_parallel, replicas)
    join(world)
    return Mesh(world, ranks)
