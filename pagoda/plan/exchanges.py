"""Exchanges: communication within compute, between ranks or with the CPU, for which compute waits."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Self

from pagoda.plan.ranks import Ranks, ring_bytes

TOKENS, SUM, GRADIENTS, SEND, HEADS, ROWS = "tokens", "sum", "gradients", "send", "heads", "rows"
"""Tokens to experts on other ranks and back; sums over tensor-parallel ranks; gradients that these gather; sends
between pipeline stages; heads of attention for tokens, between ranks that divide sequences; rows of an embedding that
the CPU looks up, to the device, and their gradients back."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """What every rank sends and receives at one point of each pass."""

    kind: str
    module: str
    """The exchange happens when compute first uses this module in a forward or a backward. "" is the whole model."""
    sent: int
    """Bytes that a rank sends each time."""
    over_network: int = 0
    """How many of these bytes go to another domain."""
    to_other_rails: int = 0
    """How many of those go to a rank on another rail."""
    senders_at_once: int = 1
    """Number of ranks of a domain that send this much over the network at the same time."""
    forward: int = 1
    """How often it happens in each forward."""
    backward: int = 1
    """How often it happens in each backward, without recomputed forwards."""
    repeated: bool = True
    """Whether it also happens when backward recomputes a forward."""

    def scaled(self, factor: int) -> Self:
        """The exchange of a micro-batch with `factor` times as many sequences."""
        if self.kind == GRADIENTS:
            return self
        parts = {part: factor * getattr(self, part) for part in ("sent", "over_network", "to_other_rails")}
        return replace(self, **parts)


def of_tokens(sent: Mapping[str, int], ranks: Ranks) -> list[Exchange]:
    """Tokens go to the ranks with other experts, equally many to each, and come back.

    `sent`: module whose children are experts -> bytes that a rank sends.
    """
    group = ranks.expert_parallel
    elsewhere = (group - min(group, ranks.per_domain)) / max(1, group - 1)
    senders = min(ranks.per_domain, ranks.data_parallel)
    found = []
    for module, nbytes in sent.items():
        over_network = int(nbytes * elsewhere)
        to_other_rails = _to_other_rails(over_network, group, ranks)
        found.append(Exchange(TOKENS, module, nbytes, over_network, to_other_rails, senders, forward=2, backward=2))
    return found


def of_sums(modules: Sequence[str], nbytes: int, ranks: Ranks) -> list[Exchange]:
    """Tensor-parallel ranks add up the outputs of these modules, and in backward the input gradients of their layers.

    A ring reduces and gathers `nbytes`. Each of the two crosses every network once.
    """
    if ranks.tensor_parallel == 1:
        return []
    return [_around_ring(SUM, module, 2 * nbytes, ranks) for module in modules]


def of_heads(layers: Sequence[str], nbytes: int, ranks: Ranks, group: int) -> list[Exchange]:
    """`group` ranks that divide sequences exchange tokens for heads before and after the attention of each layer.
    `nbytes`: queries, keys, values and results of a rank's tokens, of which each rank gets an equal part."""
    if group == 1:
        return []
    inside = min(group, ranks.per_domain)
    sent, over_network = ring_bytes(nbytes, group), nbytes * (group - inside) // group
    to_other_rails, senders = _to_other_rails(over_network, group, ranks), min(ranks.per_domain, ranks.count)
    return [Exchange(HEADS, layer, sent, over_network, to_other_rails, senders) for layer in layers]


def of_rows(nbytes: Mapping[str, int]) -> list[Exchange]:
    """Rows that the CPU looks up. `nbytes`: embedding -> bytes of the rows of a micro-batch."""
    return [Exchange(ROWS, module, n, repeated=False) for module, n in nbytes.items()]


def of_gradients(nbytes: Mapping[str, int], ranks: Ranks) -> list[Exchange]:
    """Tensor-parallel ranks gather the gradients of parameters that each of them stores whole.

    `nbytes`: module -> bytes of these gradients.
    """
    if ranks.tensor_parallel == 1:
        return []
    found = [_around_ring(GRADIENTS, module, n, ranks) for module, n in nbytes.items()]
    return [replace(exchange, forward=0, repeated=False) for exchange in found]


def _around_ring(kind: str, module: str, nbytes: int, ranks: Ranks) -> Exchange:
    """`nbytes` go around a ring of tensor-parallel ranks, in each forward and in each backward. A ring leaves a domain
    on the rail on which it enters the next one."""
    group, joined = ranks.tensor_parallel, ranks.per_domain
    domains = 1 if joined % group == 0 else max(2, ceil(group / joined))
    over_network = nbytes * (domains - 1) // domains // min(group, joined)
    return Exchange(kind, module, ring_bytes(nbytes, group), over_network, senders_at_once=min(joined, ranks.count))


def of_stage(nbytes: int, ranks: Ranks, stage: int) -> list[Exchange]:
    """What a pipeline stage exchanges for each micro-batch, as in torch's 1F1B schedules.

    Before a forward, it receives from the previous stage and sends it the gradient of an earlier micro-batch. Before a
    backward, it sends to the next stage and receives a gradient. Both directions run at once, and compute waits for
    them. `nbytes` is the size of one direction.
    """
    found = []
    for border, forward in ((stage, 1), (stage + 1, 0)):
        if 0 < border < ranks.pipeline_parallel:
            senders = _crossing(ranks, border)
            over_network = nbytes if senders else 0
            to_other_rails = over_network if ranks.count % ranks.per_node % ranks.rails else 0
            crossing = over_network, to_other_rails, max(1, senders)
            found.append(Exchange(SEND, "", nbytes, *crossing, forward, 1 - forward, repeated=False))
    return found


def _to_other_rails(over_network: int, group: int, ranks: Ranks) -> int:
    """How many of the bytes for other domains go to other rails, if each rank sends equally many to every rank of
    its group, which are neighbours."""
    rails = min(group, ranks.per_node, ranks.rails)
    return over_network * (rails - 1) // rails


def _crossing(ranks: Ranks, border: int) -> int:
    """Most ranks of stage `border` in one domain whose counterparts in the stage before it are in another domain."""
    crossing: Counter[int] = Counter()
    for rank in range(border * ranks.count, (border + 1) * ranks.count):
        domain = rank // ranks.per_domain
        crossing[domain] += (rank - ranks.count) // ranks.per_domain != domain
    return max(crossing.values(), default=0)
