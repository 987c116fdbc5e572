"""The mesh: arranges ranks in a grid, and says which ranks share something."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pagoda.errors import ConfigError
from pagoda.mesh.world import World, computes_on, join, launched
from pagoda.plan.ranks import Ranks, Stage

REPLICATE, SHARD = "replicate", "shard"
"""Dimensions of the mesh of dense weights: complete copies of the state, and the slices of one copy."""
TENSOR = "tensor"
"""The third dimension: the tensor-parallel parts of parameters."""
PIPELINE = "pipeline"
"""The first dimension of the whole mesh: the stages of a pipeline, each with its own layers."""
_DIMENSIONS = {
    **dict.fromkeys((PIPELINE, "pp"), PIPELINE),
    **dict.fromkeys((REPLICATE, "dp_replicate"), REPLICATE),
    **dict.fromkeys((SHARD, "dp_shard", "dp"), SHARD),
    **dict.fromkeys((TENSOR, "tp"), TENSOR),
}
"""The names that a torch mesh may use for the dimensions."""
EXPERT_SHARD, EXPERT = "expert_shard", "expert"
"""Dimensions of the mesh of experts: ranks with the same experts, and ranks with different ones."""


OnAllRanks = Callable[[str, Callable[[], None]], None]
"""Runs a collective that every rank runs at the same point of its program. The text describes it, for errors."""


class Mesh:
    """The ranks of a run as a grid of replicas x S slices x T parts of tensors: rank r is at (r // ST, r // T % S, r %
    T).

    The ranks that divide a tensor are consecutive, and so are the ranks of a replica. So each of these groups is within
    a node if the node has enough ranks. Along the slices, E consecutive ranks have different experts. Ranks at a
    distance of E have the same experts and share their state.

    Each stage of a pipeline has such a grid of consecutive processes, and counts its ranks from 0.
    """

    def __init__(self, world: World, ranks: Ranks) -> None:
        """`world`: all processes."""
        self.pipeline_stage, place = divmod(world.rank, ranks.count)
        """The pipeline stage of this rank, from 0."""
        self.everyone = world
        self.world = replace(world, rank=place, size=ranks.count, first=world.rank - place)
        """The ranks of this stage."""
        self.peers = replace(
            world, rank=self.pipeline_stage, size=ranks.pipeline_parallel, first=place, apart=ranks.count
        )
        """The ranks with the same index in their stage as this one, one in every stage."""
        self.ranks = ranks
        self.lane: OnAllRanks | None = None
        """Orders all collectives while a model is wrapped."""

    def on_all_ranks(self, what: str, work: Callable[[], None]) -> None:
        """Run one of compute's own collectives, such as sending tokens to experts. Returns when it has ended.

        While a model is wrapped, the collective runs on the lane that orders all collectives, so it cannot conflict
        with a gather for which another rank waits.
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
    def whole(self) -> DeviceMesh:
        """The grid (PIPELINE, REPLICATE, SHARD, TENSOR). Every rank must access it at the same point."""
        ranks, names = self.ranks, (PIPELINE, REPLICATE, SHARD, TENSOR)
        shape = (ranks.pipeline_parallel, ranks.replicas, ranks.sharers(expert=False), ranks.tensor_parallel)
        return init_device_mesh(computes_on(self.everyone), shape, mesh_dim_names=names)

    @property
    def tensor(self) -> DeviceMesh:
        """The ranks that have the parts of this rank's parameters, for torch's `parallelize_module`."""
        return self.whole[TENSOR]

    @property
    def pipeline(self) -> dist.ProcessGroup:
        """One rank of each stage, including this one, for torch's `PipelineStage`."""
        return self.whole.get_group(PIPELINE)

    @property
    def tensor_index(self) -> int:
        """Which part of each parameter this rank has, from 0."""
        return self.rank % self.ranks.tensor_parallel

    @property
    def batch_index(self) -> int:
        """Number of this rank's group among those that have batches of their own, from 0."""
        return self.rank // self.ranks.tensor_parallel

    @property
    def tensor_ranks(self) -> tuple[int, ...]:
        """The global ranks of those that have the parts of this rank's parameters, in order."""
        first = self.rank - self.tensor_index
        return tuple(self.world.global_rank(first + part) for part in range(self.ranks.tensor_parallel))

    @cached_property
    def experts(self) -> DeviceMesh:
        """The grid (EXPERT_SHARD, EXPERT) of the ranks that have the same parts of tensors. Every rank must access it
        at the same point."""
        each = self.ranks.expert_parallel
        shape = (self.ranks.pipeline_parallel, self.ranks.data_parallel // each, each, self.ranks.tensor_parallel)
        names = (PIPELINE, EXPERT_SHARD, EXPERT, TENSOR)
        return init_device_mesh("cpu", shape, mesh_dim_names=names)[EXPERT_SHARD, EXPERT]

    @property
    def expert_index(self) -> int:
        """Which part of the experts this rank has, from 0."""
        return self.ranks.expert_part(self.rank)

    def sharers(self, expert: bool = False, rank: int | None = None) -> tuple[int, ...]:
        """The ranks that hold the slices of the copy of a unit's state to which a rank (by default this one) belongs,
        in the order of slices. `expert`: the unit is one of experts."""
        rank = self.rank if rank is None else rank
        first = rank // self._replica * self._replica
        return tuple(other for other in self.family(expert, rank) if first <= other < first + self._replica)

    def copies(self, rank: int | None = None) -> tuple[int, ...]:
        """The ranks that hold the same slices of units' states as a rank (by default this one), one in each replica."""
        rank = self.rank if rank is None else rank
        return tuple(range(rank % self._replica, self.size, self._replica))

    def family(self, expert: bool = False, rank: int | None = None) -> tuple[int, ...]:
        """Like `sharers`, but for all replicas."""
        apart = self.ranks.tensor_parallel * (self.ranks.expert_parallel if expert else 1)
        return tuple(range((self.rank if rank is None else rank) % apart, self.size, apart))

    @property
    def _replica(self) -> int:
        """The number of consecutive ranks that have one copy of the state."""
        return self.ranks.count // self.ranks.replicas


def open_mesh(
    stage: Stage = 3,
    replicas: int = 1,
    expert_parallel: int = 1,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    ordered_sums: bool = False,
) -> Mesh:
    """The mesh of the processes that torchrun started, for `wrap(mesh=...)`. Without torchrun, the mesh of one process.

    Every rank must call this with the same arguments.

    Args:
        stage: Stage of ZeRO: ranks divide the optimizer's state (1), gradients too (2), weights too (3).
        replicas: Number of complete copies of the state (hybrid sharding).
        expert_parallel: Number of ranks over which the experts of a layer are divided.
        tensor_parallel: Number of consecutive ranks that divide each parameter, as in torch's
            `parallelize_module(model, mesh.tensor, ...)`. They get the same batches. Ranks with the same part divide
            the state of this part.
        pipeline_parallel: Number of pipeline stages. Each stage has the same number of consecutive ranks, which wrap
            its layers and divide their state.
        ordered_sums: Add each rank's gradient of a micro-batch by itself, in the order of ranks, so that sums do not
            depend on the number of ranks (stages 2 and 3, one replica). It takes more time.

    Raises ConfigError if the ranks cannot be divided like that.
    """
    world = launched()
    if pipeline_parallel < 1 or world.size % pipeline_parallel:
        raise ConfigError(f"pipeline_parallel={pipeline_parallel} does not divide {world.size} ranks")
    count = world.size // pipeline_parallel
    if tensor_parallel < 1 or count % tensor_parallel:
        raise ConfigError(f"tensor_parallel={tensor_parallel} does not divide {count} ranks")
    divided = (expert_parallel, replicas, tensor_parallel, pipeline_parallel)
    ranks = Ranks(count // tensor_parallel, world.local_size, stage, *divided, ordered_sums)
    join(world)
    return Mesh(world, ranks)


def as_mesh(mesh: Mesh | DeviceMesh) -> Mesh:
    """The given mesh, or the mesh for a torch mesh whose dimensions are a subset of `_DIMENSIONS` in this order.

    Raises ConfigError for any other torch mesh. Every rank must call it.
    """
    if isinstance(mesh, Mesh):
        return mesh
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"mesh is {mesh!r}; give what pagoda.open_mesh returns, or a DeviceMesh of torch.")
    kinds = [_DIMENSIONS.get(name) for name in mesh.mesh_dim_names or ()]
    ordered = [kind for kind in (PIPELINE, REPLICATE, SHARD, TENSOR) if kind in kinds]
    if kinds != ordered or mesh.mesh.flatten().tolist() != list(range(launched().size)):
        raise ConfigError(
            f"wrap cannot use {mesh}: it takes a mesh of all ranks in order, whose dimensions are some of pipeline (or "
            "pp), replicate, shard (or dp) and tensor (or tp), in this order. pagoda.open_mesh makes one."
        )
    sizes = dict(zip(ordered, mesh.shape, strict=True))
    return open_mesh(
        replicas=sizes.get(REPLICATE, 1),
        tensor_parallel=sizes.get(TENSOR, 1),
        pipeline_parallel=sizes.get(PIPELINE, 1),
    )
