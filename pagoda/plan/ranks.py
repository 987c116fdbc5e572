"""Ranks: several processes that train one model, and what of its state each of them holds."""

from dataclasses import dataclass
from typing import Literal

from pagoda.errors import ConfigError

Stage = Literal[1, 2, 3]


@dataclass(frozen=True, slots=True)
class Ranks:
    """Data-parallel ranks that share out the training state as ZeRO does (arXiv 1910.02054).

    Stage 1 divides what only the update needs, stage 2 gradients too, stage 3 weights too. Every extent that is
    divided is cut in equal slices, one a rank, so that every rank's link to host RAM and every rank's part of the
    drives carry the same (bandwidth-centric partitioning of ZeRO-Infinity, arXiv 2104.07857).
    """

    data_parallel: int
    """Ranks, or groups of tensor-parallel ranks, that compute on sequences of their own."""
    per_node: int
    """Ranks on one node: of consecutive numbers, sharing its RAM, links and drives."""
    stage: Stage = 3
    expert_parallel: int = 1
    """Consecutive ranks of a replica over which the experts of a block are divided; each expert's state is divided over
    those ranks of the replica that have it."""
    replicas: int = 1
    """Whole copies of the state (hybrid sharding): each is divided over data_parallel / replicas consecutive ranks, so
    that gathers stay among those, and only reduced gradients go between copies."""
    tensor_parallel: int = 1
    """Consecutive ranks that compute on the same sequences, each with its part of the parameters. A rank shares out
    the state of its parts with those ranks of other groups that have the same ones."""
    pipeline_parallel: int = 1
    """Stages, each of `count` consecutive ranks with layers of its own. All else here is about one of them."""

    def __post_init__(self) -> None:
        degrees = (self.expert_parallel, self.replicas, self.tensor_parallel, self.pipeline_parallel)
        if min(self.data_parallel, self.per_node, *degrees) < 1:
            raise ConfigError(
                "data_parallel, per_node, expert_parallel, replicas, tensor_parallel and pipeline_parallel must be at "
                "least 1"
            )
        if self.stage not in (1, 2, 3):
            raise ConfigError(f"there is no ZeRO stage {self.stage}; the stages are 1, 2 and 3")
        if self.count > self.per_node and self.count % self.per_node:
            raise ConfigError(f"{self.count} ranks are not whole nodes of {self.per_node}")
        if self.data_parallel % self.replicas:
            raise ConfigError(f"{self.data_parallel} ranks cannot be divided into {self.replicas} equal replicas")
        if (each := self.sharers(expert=False)) % self.expert_parallel:
            raise ConfigError(
                f"expert_parallel={self.expert_parallel} does not divide the {each} data-parallel ranks of a replica"
            )

    @property
    def count(self) -> int:
        """Ranks of a stage, which are all where there is no pipeline."""
        return self.data_parallel * self.tensor_parallel

    @property
    def shards_weights(self) -> bool:
        """Whether a weight must be gathered before use."""
        return self.stage == 3 and self.data_parallel > 1

    @property
    def shards_gradients(self) -> bool:
        """Whether a rank keeps only its slice of a gradient."""
        return self.stage >= 2 and self.data_parallel > 1

    @property
    def shares_experts(self) -> bool:
        """Whether several ranks have the same experts."""
        return self.data_parallel > self.expert_parallel

    def sharers(self, expert: bool) -> int:
        """Ranks that share one copy of a unit's state; `expert` for a unit of experts."""
        return self.data_parallel // self.replicas // (self.expert_parallel if expert else 1)

    def place(self, rank: int, expert: bool) -> int:
        """A rank's place among those that share one copy of a unit's state."""
        return rank // self.tensor_parallel % self.sharers(False) // (self.expert_parallel if expert else 1)

    def expert_part(self, rank: int) -> int:
        """Which part of the experts a rank has, from 0."""
        return rank // self.tensor_parallel % self.expert_parallel

    def members_per_node(self, group: int) -> int:
        """How many of `group` ranks that share an extent are on one node: those that share experts are
        `expert_parallel * tensor_parallel` apart, others `tensor_parallel`."""
        return max(1, min(group, self.per_node * group * self.replicas // self.count))

    @property
    def copies_per_node(self) -> int:
        """How many of the ranks that have the same slices, one a replica, are on one node."""
        return max(1, min(self.replicas, self.per_node * self.replicas // self.count))


def ring_bytes(nbytes: int, group: int) -> int:
    """What each of `group` ranks sends in an all-gather or a reduce-scatter of `nbytes`."""
    return nbytes * (group - 1) // group
