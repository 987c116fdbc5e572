"""Ranks: several processes that train one model, and the part of its state that each of them holds."""

from dataclasses import dataclass
from typing import Literal

from pagoda.errors import ConfigError

Stage = Literal[1, 2, 3]


@dataclass(frozen=True, slots=True)
class Ranks:
    """Data-parallel ranks that divide the training state as ZeRO does (arXiv 1910.02054).

    Stage 1 divides the states that only the update needs, stage 2 also gradients, stage 3 also weights. Each rank has a
    slice of every divided extent (`Slices`). So every rank's link to RAM and its part of the drives carry about the
    same load (bandwidth-centric partitioning of ZeRO-Infinity, arXiv 2104.07857).
    """

    data_parallel: int
    """Number of ranks, or groups of tensor-parallel ranks, that compute on sequences of their own."""
    per_node: int
    """Number of ranks on one node. They have consecutive numbers and share its RAM, links and drives."""
    stage: Stage = 3
    expert_parallel: int = 1
    """Number of consecutive ranks of a replica over which the experts of a block are divided. Each expert's state is
    divided over the ranks of the replica that have this expert."""
    replicas: int = 1
    """Number of whole copies of the state (hybrid sharding). Each copy is divided over data_parallel / replicas
    consecutive ranks. So gathers stay among these, and only reduced gradients go between copies."""
    tensor_parallel: int = 1
    """Number of consecutive ranks that compute on the same sequences, each with its part of the parameters. The state
    of a rank's parts is divided over the ranks of other groups that have the same parts."""
    pipeline_parallel: int = 1
    """Number of pipeline stages. Each has `count` consecutive ranks and layers of its own. All other fields describe
    one stage."""
    ordered_sums: bool = False
    """Whether each rank's gradient of a micro-batch is added by itself, in the order of ranks. The sums are then those
    of one rank that takes the same micro-batches in turn. Otherwise ranks' gradients are added up first."""

    nodes_per_domain: int = 1
    """Number of consecutive nodes whose ranks send to each other as fast as within a node. Ranks on these nodes are a
    domain, and the network is between domains."""
    rails: int = 1
    """Number of networks to which a node's adapters connect. A node's rank i uses network i, counted around."""

    def __post_init__(self) -> None:
        degrees = (self.expert_parallel, self.replicas, self.tensor_parallel, self.pipeline_parallel)
        if min(self.data_parallel, self.per_node, self.nodes_per_domain, self.rails, *degrees) < 1:
            raise ConfigError(
                "data_parallel, per_node, nodes_per_domain, rails, expert_parallel, replicas, tensor_parallel and "
                "pipeline_parallel must be at least 1"
            )
        if self.stage not in (1, 2, 3):
            raise ConfigError(f"there is no ZeRO stage {self.stage}; the stages are 1, 2 and 3")
        if self.count > self.per_node and self.count % self.per_node:
            raise ConfigError(f"{self.count} ranks are not whole nodes of {self.per_node}")
        if self.data_parallel % self.replicas:
            raise ConfigError(f"{self.data_parallel} ranks cannot be divided into {self.replicas} equal replicas")
        if self.ordered_sums and (self.stage == 1 or self.replicas > 1):
            raise ConfigError(
                "ordered_sums adds each rank's gradient to a slice of its own, and with stage 1 or several replicas "
                "ranks add up whole gradients: use stage 2 or 3 and one replica"
            )
        if (each := self.sharers(expert=False)) % self.expert_parallel:
            raise ConfigError(
                f"expert_parallel={self.expert_parallel} does not divide the {each} data-parallel ranks of a replica"
            )

    @property
    def count(self) -> int:
        """Number of ranks of a stage. Without a pipeline, all ranks."""
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
        """Number of ranks that share one copy of a unit's state. `expert`: for a unit of experts."""
        return self.data_parallel // self.replicas // (self.expert_parallel if expert else 1)

    def place(self, rank: int, expert: bool) -> int:
        """A rank's place among the ranks that share one copy of a unit's state."""
        return rank // self.tensor_parallel % self.sharers(False) // (self.expert_parallel if expert else 1)

    def expert_part(self, rank: int) -> int:
        """Number of the part of the experts that a rank has, from 0."""
        return rank // self.tensor_parallel % self.expert_parallel

    @property
    def per_domain(self) -> int:
        """Number of ranks of a domain."""
        return self.per_node * self.nodes_per_domain

    def members_per_domain(self, group: int) -> int:
        """Number of ranks in one domain among `group` ranks that share an extent. Ranks that share experts are
        `expert_parallel * tensor_parallel` apart, others `tensor_parallel`."""
        return max(1, min(group, self.per_domain * group * self.replicas // self.count))

    @property
    def copies_per_domain(self) -> int:
        """Number of ranks in one domain among the ranks with the same slices, one per replica."""
        return max(1, min(self.replicas, self.per_domain * self.replicas // self.count))


ALONE = Ranks(1, 1)
"""One rank, which has everything."""


def ring_bytes(nbytes: int, group: int) -> int:
    """Bytes that each of `group` ranks sends in an all-gather or a reduce-scatter of `nbytes`."""
    return nbytes * (group - 1) // group
