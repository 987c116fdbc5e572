"""Expert parallelism: sends tokens to the ranks that have their experts, and results back (GShard, arXiv 2006.16668).

Each rank's loss is the mean over its own tokens, and the losses of all ranks are averaged. An expert's gradient on one
rank includes the contributions of all ranks that send it tokens. So its mean is the sum over the ranks that have the
expert, divided by the number of all ranks.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pagoda.mesh.mesh import EXPERT, Mesh


class ExpertExchange:
    """Sends tokens to experts on other ranks of a group, and results back.

    Every rank must call every method equally often and in the same order, whatever its tokens are.
    """

    def __init__(self, mesh: Mesh) -> None:
        """Use the ranks of a mesh that divide the experts of a layer into equal parts, in the order of their numbers.
        Every rank must create it at the same point."""
        self._mesh = mesh
        self._group = mesh.experts.get_group(EXPERT)
        self.ranks = self._group.size()
        self.rank = self._group.rank()

    def to_experts(self, tokens: Tensor, counts: Sequence[int]) -> tuple[Tensor, list[list[int]]]:
        """Send tokens to the ranks that have their experts, and receive tokens for the experts of this rank.

        `tokens` [n, H] is sorted by expert. `counts`: number of tokens for each expert of all ranks. Returns tokens
        sorted by sending rank, then by expert, and the number of tokens that each rank sends to each expert of this
        rank.
        """
        mine = torch.tensor(counts, dtype=torch.int64).view(self.ranks, -1)
        here = torch.empty_like(mine)
        self._all_to_all("numbers of tokens", here, mine)
        if torch.is_grad_enabled() and not tokens.requires_grad:
            tokens = tokens.detach().requires_grad_()  # every rank must run its backward, even if all is frozen
        rows: Tensor = _Exchanged.apply(tokens, mine.sum(1).tolist(), here.sum(1).tolist(), self)  # type: ignore[no-untyped-call]
        return rows, here.tolist()

    def from_experts(self, results: Tensor, sent: Sequence[int], counts: Sequence[Sequence[int]]) -> Tensor:
        """Send results back to the ranks of their tokens, and receive the results for this rank's tokens.

        Both are in the order of the tokens. `sent` is the `counts` argument of `to_experts`, and `counts` is its second
        result.
        """
        back = torch.tensor(sent).view(self.ranks, -1).sum(1).tolist()
        rows: Tensor = _Exchanged.apply(results, [sum(row) for row in counts], back, self)  # type: ignore[no-untyped-call]
        return rows

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send rows [n, H] to the ranks in order, `sent` rows to each. Returns the `received` rows from each rank."""
        out = rows.new_empty(sum(received), rows.shape[1])
        # Sent as bytes, so that it does not depend on the dtypes that a backend supports.
        taken, given = out.view(torch.uint8), rows.contiguous().view(torch.uint8)
        through_ram = rows.is_cuda and dist.get_backend(self._group) == dist.Backend.GLOO
        landing, given = (taken.cpu(), given.cpu()) if through_ram else (taken, given)
        self._all_to_all("tokens of experts", landing, given, list(received), list(sent))
        if through_ram:
            taken.copy_(landing)
        return out

    def _all_to_all(self, what: str, taken: Tensor, given: Tensor, *sizes: list[int]) -> None:
        self._mesh.on_all_ranks(what, lambda: dist.all_to_all_single(taken, given, *sizes, group=self._group))  # type: ignore[arg-type, misc]


class _Exchanged(torch.autograd.Function):
    """Rows that are exchanged between ranks. Gradients return by the same path."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], exchange: ExpertExchange) -> Tensor:
        ctx.sent, ctx.received, ctx.exchange = sent, received, exchange
        return exchange.exchange(rows, sent, received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (grad,) = grads
        return ctx.exchange.exchange(grad, ctx.received, ctx.sent), None, None, None
