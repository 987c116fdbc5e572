"""Exchanges: what compute itself sends to other ranks, and waits for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Self

from pagoda.plan.ranks import Ranks, ring_bytes

TOKENS, SUM, SEND = "tokens", "sum", "send"
"""To experts on other ranks and back; over tensor-parallel ranks; between stages of a pipeline."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """Something that every rank sends and receives at one place of each pass."""

    kind: str
    module: str
    """It comes when compute first uses this module in a forward, and in a backward. "" is the whole model."""
    sent: int
    """Bytes that a rank sends each time."""
    leaving: int = 0
    """Those of them that leave its node."""
    sharing: int = 1
    """Ranks of a node that send so much over its network at once."""
    forward: int = 1
    """How often it comes in each forward."""
    backward: int = 1
    """How often it comes in each backward, without the forward that is repeated there."""
    repeated: bool = True
    """Whether it comes with a forward that backward repeats."""

    def scaled(self, factor: int) -> Self:
        """The exchange of a micro-batch of `factor` times as many sequences."""
        return replace(self, sent=factor * self.sent, leaving=factor * self.leaving)


def of_tokens(sent: Mapping[str, int], ranks: Ranks | None) -> list[Exchange]:
    """Tokens go to the ranks that have other experts, as many to each of them, and come back.

    `sent`: by the module whose children are experts, the bytes that a rank sends.
    """
    if ranks is None:
        return []
    group = ranks.expert_parallel
    elsewhere = (group - min(group, ranks.per_node)) / max(1, group - 1)
    sharing = min(ranks.per_node, ranks.data_parallel)
    return [Exchange(TOKENS, row, n, int(n * elsewhere), sharing, forward=2, backward=2) for row, n in sent.items()]


def of_sums(modules: Sequence[str], nbytes: int, ranks: Ranks | None) -> list[Exchange]:
    """Tensor-parallel ranks add up what these modules give, and the gradient of what their layers are given.

    A ring reduces and gathers `nbytes`. It crosses each network once in each of the two.
    """
    if ranks is None or ranks.tensor_parallel == 1:
        return []
    group, per_node = ranks.tensor_parallel, ranks.per_node
    nodes = 1 if per_node % group == 0 else max(2, ceil(group / per_node))
    sharing = min(per_node, ranks.count)
    leaving = 2 * nbytes * (nodes - 1) // nodes // min(group, per_node)
    return [Exchange(SUM, module, 2 * ring_bytes(nbytes, group), leaving, sharing) for module in modules]


def of_stage(nbytes: int, ranks: Ranks, stage: int) -> list[Exchange]:
    """What a stage of a pipeline hands on for each micro-batch, as torch's 1F1B schedules do it.

    Before a forward, it receives from the stage before and sends that the gradient of an earlier micro-batch. Before a
    backward, it sends to the next stage and receives a gradient. Both directions go at once, and compute waits for
    them. `nbytes` are those of one direction.
    """
    forward, backward = int(stage > 0), int(stage + 1 < ranks.pipeline_parallel)
    found = []
    for border, times in (
        (stage, {"forward": forward, "backward": 0}),
        (stage + 1, {"forward": 0, "backward": backward}),
    ):
        if any(times.values()):
            sharing = _crossing(ranks, border)
            found.append(Exchange(SEND, "", nbytes, nbytes if sharing else 0, max(1, sharing), **times, repeated=False))
    return found


def _crossing(ranks: Ranks, border: int) -> int:
    """How many ranks of a node have the rank at their place in the next stage on another node, at most.

    Stage `border` begins there.
    """
    nodes: dict[int, int] = {}
    for rank in range(border * ranks.count, (border + 1) * ranks.count):
        node = rank // ranks.per_node
        if (rank - ranks.count) // ranks.per_node != node:
            nodes[node] = nodes.get(node, 0) + 1
    return max(nodes.values(), default=0)
