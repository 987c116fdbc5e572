"""The mixture of experts that stands where a block of a transformer has its MLP."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from pagoda.models.layers import Linear, norm_of, recomputed
from pagoda.models.mixture_shapes import RoutingConfig
from pagoda.models.papers import PaperShape
from pagoda.models.routing import capacity, route


class TokenExchange(Protocol):
    """What experts need of several ranks; `pagoda.parallel` has it.

    Every rank calls every method as often and in the same order, whatever its tokens.
    """

    ranks: int
    """Ranks over which the experts of a block are divided, in equal parts and in the order of their numbers."""
    rank: int
    """This one's number among them."""

    def to_experts(self, tokens: Tensor, counts: Sequence[int]) -> tuple[Tensor, list[list[int]]]:
        """Give every rank its experts' tokens, and get one's own.

        `tokens` is [n, H], by expert; `counts` says how many each expert of all ranks gets. Returns tokens by sending
        rank, then by expert, and how many of them each rank sends for each expert here.
        """
        ...

    def from_experts(self, results: Tensor, sent: Sequence[int], counts: Sequence[Sequence[int]]) -> Tensor:
        """Give every rank the results for its tokens, in the order in which they came, and get those for one's own in
        the order in which they went; `sent` and `counts` are what `to_experts` took and gave."""
        ...


class Router(Linear):
    """Says how likely each expert is for a token. Its product is in fp32, as in Switch Transformer: routing is unstable
    in 16 bits."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] to logits [B, S, E] in fp32."""
        return functional.linear(x.float(), self.weight.float())


class Expert(nn.Module):
    """An MLP: GELU in a GPT, ReLU in a T5."""

    def __init__(self, shape: PaperShape) -> None:
        super().__init__()
        gpt = shape.family == "gpt"
        blocks = shape.layers + shape.decoder_layers
        self.up = Linear(shape.hidden, shape.ffn, bias=gpt, std=0.02 if gpt else shape.hidden**-0.5)
        self.down = Linear(
            shape.ffn, shape.hidden, bias=gpt, std=0.02 / (2 * blocks) ** 0.5 if gpt else shape.ffn**-0.5
        )
        self._gelu = gpt

    def forward(self, x: Tensor) -> Tensor:
        """[n, H] to [n, H]; n may be 0."""
        inner = self.up(x)
        return self.down(functional.gelu(inner, approximate="tanh") if self._gelu else functional.relu(inner))  # type: ignore[no-any-return]


class Experts(nn.ModuleDict):
    """Modules of which each forward uses some: those that the router chose. Keys are their numbers in the block, also
    where a rank has only some of them.

    Whoever keeps their weights elsewhere sets `coming`, and is told which of them are about to run, in that order.
    With `checkpointing`, each is recomputed in backward by itself: only its own weights are in use then.
    """

    def __init__(
        self, experts: Iterable[tuple[int, nn.Module]], *, checkpointing: bool = False, ranks: int = 1
    ) -> None:
        super().__init__({str(number): expert for number, expert in experts})
        self.ranks = ranks
        """Ranks over which the experts of the block are divided, this one's part being here."""
        self.coming: Callable[[Sequence[nn.Module]], None] | None = None
        self._checkpointing = checkpointing

    def forward(self, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        """Run each expert that has tokens. `tokens` is [n, H], by expert; `counts` how many each expert here has."""
        parts = zip(self.values(), torch.split(tokens, list(counts)), strict=True)
        runs = [(expert, part) for expert, part in parts if len(part)]
        if not runs:
            return tokens  # still part of the graph, as the exchange's backward is every rank's
        if self.coming is not None:
            self.coming([expert for expert, _ in runs])
        return torch.cat([recomputed(*run) if self._checkpointing else run[0](run[1]) for run in runs])


class Mixture(nn.Module):
    """A norm, a router and experts, with the residual around them."""

    def __init__(
        self,
        shape: PaperShape,
        config: RoutingConfig,
        *,
        checkpointing: bool = False,
        exchange: TokenExchange | None = None,
    ) -> None:
        super().__init__()
        std = 0.02 if shape.family == "gpt" else shape.hidden**-0.5
        self.norm = norm_of(shape)
        self.router = Router(shape.hidden, shape.experts, bias=False, std=std)
        ranks, rank = (exchange.ranks, exchange.rank) if exchange is not None else (1, 0)
        local = shape.experts // ranks
        here = range(rank * local, (rank + 1) * local)
        self.experts = Experts(((number, Expert(shape)) for number in here), checkpointing=checkpointing, ranks=ranks)
        self._exchange = exchange
        self._number = shape.experts
        self._top_k = config.top_k or shape.top_k
        self._capacity_factor = config.capacity_factor

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, S, H] to the same, with the balance loss and the share of entries that were dropped.

        In evaluation experts take every token, so that no token's result depends on those that follow it.
        """
        sequences, tokens, width = hidden.shape
        x = self.norm(hidden)
        room = capacity(tokens, self._number, self._top_k, self._capacity_factor) if self.training else None
        routing = route(self.router(x), self._top_k, room)
        # One row for each entry, so that no row is taken twice and gradients are added up in one order.
        rows = x[:, None].expand(-1, self._top_k, -1, -1).reshape(-1, width)
        results = self._through_experts(rows.index_select(0, routing.entries), routing.counts.tolist())
        weighted = results * routing.gates[:, None].to(results.dtype)
        combined = torch.zeros_like(rows).index_copy(0, routing.entries, weighted)
        combined = combined.view(sequences, self._top_k, tokens, width).sum(1)
        return hidden + combined, routing.balance, routing.dropped

    def _through_experts(self, sent: Tensor, counts: list[int]) -> Tensor:
        """The results, [n, H], for the tokens [n, H] of all experts, by expert."""
        if self._exchange is None:
            return self.experts(sent, counts)  # type: ignore[no-any-return]
        received, by_rank = self._exchange.to_experts(sent, counts)
        here = [sum(column) for column in zip(*by_rank, strict=True)]
        order = _by_expert(by_rank, received.device)
        results = self.experts(received.index_select(0, order), here)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return self._exchange.from_experts(results.index_select(0, back), counts, by_rank)


def _by_expert(by_rank: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """int64 [n]: the order that brings rows that lie by rank, then by expert, to lie by expert, then by rank."""
    counts = torch.tensor(by_rank, dtype=torch.int64)
    experts = torch.arange(counts.shape[1]).repeat(counts.shape[0])
    return experts.repeat_interleave(counts.flatten()).argsort(stable=True).to(device)
