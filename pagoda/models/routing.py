"""Routing: which experts each token of a batch goes to, and what keeps their load even.

The unit of routing is one sequence (a "group" of GShard, arXiv 2006.16668): capacity and balance are those of its own
tokens. So a sequence's result depends neither on the others of its batch nor on how many ranks share the batch out.

Shapes: B sequences, S tokens in each, E experts, k choices of each token. An *entry* is one choice of one token;
entries are numbered sequence by sequence, in it by choice, in it by token.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """Where the tokens of a batch go."""

    entries: Tensor
    """int64 [M]: the entries that an expert takes, by expert, then in their own order."""
    gates: Tensor
    """fp32 [M]: what the expert's result for each is multiplied by."""
    counts: Tensor
    """int64 [E]: how many of them each expert takes."""
    balance: Tensor
    """fp32 []: the load-balancing loss; 1 where every expert is as likely as any other and chosen as often."""
    dropped: Tensor
    """fp32 []: share of the entries that no expert had room for."""


def capacity(tokens: int, experts: int, top_k: int, factor: float) -> int:
    """Entries of a sequence of `tokens` tokens that an expert has room for: Switch's formula (arXiv 2101.03961, eq. 3),
    times `top_k` as in GShard."""
    return math.ceil(factor * top_k * tokens / experts)


def route(logits: Tensor, top_k: int, room: int | None) -> Routing:
    """Send each token to its `top_k` likeliest experts, as far as they have room.

    With one expert a token, its result is multiplied by the router's probability, as in Switch Transformer; with more,
    by the probabilities of the chosen ones, scaled to sum to one, as in GShard. In each sequence all first choices go
    before all second ones, each in the order of the tokens, as there. The balance loss is Switch's (eq. 4), of first
    choices, by sequence and averaged.

    Args:
        logits: [B, S, E], what the router says of each token; worked on in fp32.
        top_k: experts of a token, k.
        room: entries of one sequence that one expert takes; None for no limit.
    """
    sequences, tokens, experts = logits.shape
    probabilities = logits.float().softmax(-1)
    gates, choices = probabilities.topk(top_k, dim=-1)
    if top_k > 1:
        gates = gates / gates.sum(-1, keepdim=True)
    expert_of = choices.transpose(1, 2).reshape(sequences, top_k * tokens)
    sequence = torch.arange(sequences, device=logits.device)[:, None]
    pair = (expert_of * sequences + sequence).flatten()
    sizes = torch.bincount(pair, minlength=experts * sequences)
    order = pair.argsort(stable=True)
    taken = sizes
    if room is not None:
        first = (sizes.cumsum(0) - sizes)[pair[order]]
        place = torch.arange(len(order), device=logits.device) - first
        order = order[place < room]
        taken = sizes.clamp(max=room)
    likely = probabilities.mean(1)
    firsts = torch.bincount((sequence * experts + choices[..., 0]).flatten(), minlength=sequences * experts)
    chosen = firsts.view(sequences, experts) / tokens
    return Routing(
        entries=order,
        gates=gates.transpose(1, 2).flatten().index_select(0, order),
        counts=taken.view(experts, sequences).sum(1),
        balance=experts * (chosen * likely).sum(-1).mean(),
        dropped=1 - taken.sum() / pair.numel(),
    )
