"""Expert parallelism: tokens travel to the ranks that have their experts, and results back (GShard, arXiv 2006.16668).

Each rank's loss is the mean over its own tokens, and all ranks' losses are averaged. An expert's gradient on one rank
holds what all ranks that send it tokens have for it. So its mean is the sum over the ranks that have the expert, by the
number of all ranks.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pagoda.parallel.mesh import Jointly, Mesh


class ExpertExchange:
    """Sends tokens to experts that other ranks of a group have; what `pagoda.models.experts` asks of several ranks."""

    def __init__(self, group: dist.ProcessGroup, jointly: Jointly) -> None:
        """`group`: the ranks over which experts are divided. `jointly` runs a collective that all ranks run at the same
        point of their programs, and returns when it has ended; the text says what it is."""
        self.ranks = group.size()
        self.rank = group.rank()
        self._group = group
        self._jointly = jointly

    @classmethod
    def over(cls, mesh: Mesh) -> "ExpertExchange":
        """Over the ranks of a mesh that divide experts; every rank has to ask for it at the same point."""
        return cls(mesh.expert_group, lambda what, work: mesh.jointly(what, work))

    def to_experts(self, tokens: Tensor, counts: Sequence[int]) -> tuple[Tensor, list[list[int]]]:
        """Give every rank its experts' tokens, and get one's own; see `TokenExchange`."""
        mine = torch.tensor(counts, dtype=torch.int64).view(self.ranks, -1)
        here = torch.empty_like(mine)
        self._jointly("numbers of tokens", lambda: dist.all_to_all_single(here, mine, group=self._group))
        if torch.is_grad_enabled() and not tokens.requires_grad:
            tokens = tokens.detach().requires_grad_()  # backward of an exchange is every rank's, whatever is frozen
        rows = self._exchanged(tokens, mine.sum(1).tolist(), here.sum(1).tolist())
        return rows, here.tolist()

    def from_experts(self, results: Tensor, sent: Sequence[int], counts: Sequence[Sequence[int]]) -> Tensor:
        """Give every rank the results for its tokens, and get those for one's own; see `TokenExchange`."""
        back = torch.tensor(sent).view(self.ranks, -1).sum(1).tolist()
        return self._exchanged(results, [sum(row) for row in counts], back)

    def _exchanged(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """`exchange`, in a graph: gradients go back the same way."""
        out: Tensor = _Exchanged.apply(rows, sent, received, self)  # type: ignore[no-untyped-call]
        return out

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Rows [n, H] to the ranks in order, `sent` of them to each; returns those that come, `received` from each."""
        out = rows.new_empty(sum(received), rows.shape[1])
        # As bytes: what moves is then independent of the dtypes that a backend knows.
        taken, given = out.view(torch.uint8), rows.contiguous().view(torch.uint8)
        if rows.is_cuda and dist.get_backend(self._group) == dist.Backend.GLOO:
            landing = taken.cpu()
            self._travel(landing, given.cpu(), sent, received)
            taken.copy_(landing)
        else:
            self._travel(taken, given, sent, received)
        return out

    def _travel(self, taken: Tensor, given: Tensor, sent: Sequence[int], received: Sequence[int]) -> None:
        self._jointly(
            "tokens of experts",
            lambda: dist.all_to_all_single(taken, given, list(received), list(sent), group=self._group),
        )


class _Exchanged(torch.autograd.Function):
    """Rows that changed ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], exchange: ExpertExchange) -> Tensor:
        ctx.sent, ctx.received, ctx.exchange = sent, received, exchange
        return exchange.exchange(rows, sent, received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (grad,) = grads
        return ctx.exchange.exchange(grad, ctx.received, ctx.sent), None, None, None
