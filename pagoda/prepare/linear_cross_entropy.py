"""Cross-entropy of a linear layer's output that is never whole in memory.

Logits are computed in blocks of tokens and vocabulary, reduced to a few numbers per token, dropped, and computed again
in backward (as in "Cut Your Losses in Large-Vocabulary Language Models", arXiv 2411.09009).

Shapes: N tokens, H hidden, V rows of the weight.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable

BLOCK_LOGITS = {"cpu": 1 << 19, "cuda": 1 << 22}
"""Device type -> logits that exist at once. On the CPU, a block and its intermediate results stay in the CPU's
caches."""
KEPT_BYTES = {"cpu": 48 << 20}
"""Device type -> most bytes of blocks that forward keeps for backward. Backward computes all others again."""
BLOCK_TOKENS = 2048
"""Most tokens of a block. Its other dimension is vocabulary. Matrix products are fast if both are long."""

Map = Callable[[torch.Tensor], torch.Tensor]
"""An element-wise function of logits before the loss, such as a soft cap. It keeps the shape."""


class Reduced(NamedTuple):
    """What the loss needs from the logits of some rows of the vocabulary: fp32, [N] each."""

    logsumexp: torch.Tensor
    target: torch.Tensor
    """The target's logit, or 0 if the target is not in these rows."""
    total: torch.Tensor | None
    """Sum of the logits, if it was requested."""


def reduce_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    maps: Sequence[Map] = (),
    *,
    label_smoothing: float = 0.0,
) -> Reduced:
    """Reduce the logits `maps(hidden @ weight.T + bias)` of every token. Differentiable in the first three arguments.

    Shapes: `hidden` [N, H], `weight` [V, H], `bias` [V], `target` [N]. A target outside [0, V) is not in these rows. A
    loss with `label_smoothing` also needs the sum of the logits.
    """
    parts = _Reduce.apply(hidden, weight, bias, target, tuple(maps), label_smoothing != 0)  # type: ignore[no-untyped-call]
    return Reduced(*parts)


def cross_entropy(
    parts: Sequence[Reduced],
    target: torch.Tensor,
    vocabulary: int,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """`torch.nn.functional.cross_entropy` of fp32 logits from the reduced parts of the vocabulary. `target` [N]; the
    parts must have been reduced with the same `label_smoothing`."""
    counted = target != ignore_index
    torch._assert_async(
        (((target >= 0) & (target < vocabulary)) | ~counted).all(), f"A target is not in [0, {vocabulary})."
    )
    logsumexp = torch.stack([part.logsumexp for part in parts]).logsumexp(0)
    losses = logsumexp - torch.stack([part.target for part in parts]).sum(0)
    if label_smoothing:
        total = torch.stack([part.total for part in parts if part.total is not None]).sum(0)
        losses = (1 - label_smoothing) * losses + label_smoothing * (logsumexp - total / vocabulary)
    losses = losses.where(counted, 0.0)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counted.sum()


class _Reduce(torch.autograd.Function):
    """The outer loop is over rows of the weight, the inner one over tokens. So a row's gradient is added up in fp32 and
    rounded once.

    From each block, backward needs exp(logits - the token's largest logit), in the logits' dtype. Forward keeps the
    first blocks, and backward computes the others again, with the same bits. Factors of tokens are applied to `hidden`,
    which has fewer elements than the logits. Targets are handled separately, in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        maps: tuple[Map, ...],
        wants_total: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        count = len(hidden)
        logsumexp = hidden.new_full((count,), -torch.inf, dtype=torch.float32)
        picked = torch.zeros_like(logsumexp)
        total = torch.zeros_like(logsumexp) if wants_total else None
        room = (
            KEPT_BYTES.get(hidden.device.type, 0) if any(ctx.needs_input_grad) and not maps and not wants_total else 0
        )
        kept: list[torch.Tensor] = []
        for rows in _blocks(len(weight), _rows_at_once(hidden)):
            for tokens in _blocks(count, BLOCK_TOKENS):
                logits = _mapped(_logits(hidden[tokens], weight[rows], bias, rows), maps)
                column, inside = _column(target[tokens], rows)
                picked[tokens] += logits.gather(1, column)[:, 0].where(inside, 0.0)
                if total is not None:
                    total[tokens] += logits.sum(1)
                powers, largest = _powers(logits)
                logsumexp[tokens] = torch.logaddexp(logsumexp[tokens], powers.sum(1).log_().add_(largest))
                room -= powers.numel() * hidden.element_size()
                if room >= 0:
                    kept += [powers.scatter_(1, column, _without(powers, column, inside)).to(hidden.dtype), largest]
        ctx.save_for_backward(hidden, weight, bias, target, logsumexp, picked, *kept)
        ctx.maps = maps
        return logsumexp, picked, total

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logsumexp: torch.Tensor, grad_picked: torch.Tensor, grad_total: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, target, logsumexp, picked, *kept = ctx.saved_tensors
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if for_hidden else None
        grad_weight = torch.empty_like(weight) if for_weight else None
        grad_bias = torch.empty_like(bias) if for_bias else None
        at_target = (picked - logsumexp).exp_().mul_(grad_logsumexp).add_(grad_picked)
        if grad_total is not None:
            at_target += grad_total
        blocks = list(_blocks(len(weight), _rows_at_once(hidden)))
        by_target = target.argsort(stable=True)
        starts = target.new_tensor([rows.start for rows in blocks] + [len(weight)])
        bounds = torch.searchsorted(target[by_target], starts).tolist()
        remade = iter(kept)
        for rows, first, last in zip(blocks, bounds, bounds[1:], strict=False):
            of_weight = weight.new_zeros(len(weight[rows]), weight.shape[1], dtype=torch.float32)
            of_bias = weight.new_zeros(len(weight[rows]), dtype=torch.float32)
            for tokens in _blocks(len(hidden), BLOCK_TOKENS):
                powers = next(remade, None)
                if powers is not None:
                    largest = next(remade)
                    factor = (largest - logsumexp[tokens]).exp_().mul_(grad_logsumexp[tokens])[:, None]
                else:
                    made = _logits(hidden[tokens], weight[rows], bias, rows)
                    with torch.enable_grad():
                        logits = _mapped(made.requires_grad_(bool(ctx.maps)), ctx.maps)
                    column, inside = _column(target[tokens], rows)
                    powers, largest = _powers(logits.detach())
                    factor = (largest - logsumexp[tokens]).exp_().mul_(grad_logsumexp[tokens])[:, None]
                    if grad_total is not None:
                        powers, factor = powers.mul_(factor).add_(grad_total[tokens, None]), torch.ones_like(factor)
                    powers.scatter_(1, column, _without(powers, column, inside))
                    powers = torch.autograd.grad(logits, made, powers)[0] if ctx.maps else powers.to(made.dtype)
                if grad_hidden is not None:
                    grad_hidden[tokens] += (powers @ weight[rows]) * factor
                if for_weight:
                    of_weight += powers.T @ (hidden[tokens] * factor).to(hidden.dtype)
                if for_bias:
                    of_bias += (powers * factor).sum(0)
            if first < last:
                mine = by_target[first:last]
                row = target[mine] - rows.start
                here, at_row = hidden[mine], weight[rows][row]
                change = _at_target(here, at_row, None if bias is None else bias[rows][row], ctx.maps, at_target[mine])
                if grad_hidden is not None:
                    grad_hidden.index_add_(0, mine, change[:, None] * at_row)
                if for_weight:
                    of_weight += _summed_by_row(change[:, None] * here, row, len(of_weight))
                if for_bias:
                    of_bias += _summed_by_row(change[:, None], row, len(of_weight))[:, 0]
            if grad_weight is not None:
                grad_weight[rows] = of_weight
            if grad_bias is not None:
                grad_bias[rows] = of_bias
        return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, grad_bias, None, None, None


def _mapped(logits: torch.Tensor, maps: Sequence[Map]) -> torch.Tensor:
    for each in maps:
        logits = each(logits)
    return logits.float()


def _powers(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """exp(logits - the largest), and the largest logit of each token, [n], or 0 if it is infinite."""
    largest = logits.amax(1)
    largest = largest.where(largest.isfinite(), 0.0)
    return logits.sub(largest[:, None]).exp_(), largest


def _without(values: torch.Tensor, column: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    """The values of a block in the columns of the targets, [n, 1], with 0 for targets inside the block."""
    return values.gather(1, column).where(~inside[:, None], 0.0)


def _at_target(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, maps: Sequence[Map], grad: torch.Tensor
) -> torch.Tensor:
    """Gradients with respect to n target logits before `maps`, from those after `maps`: fp32, [n]. `hidden` and
    `weight` are [n, H], with a row for each target."""
    if not maps:
        return grad
    made = torch.linalg.vecdot(hidden.float(), weight.float())
    made = (made if bias is None else made + bias).to(hidden.dtype)
    with torch.enable_grad():
        mapped = _mapped(made.requires_grad_(), maps)
    change: torch.Tensor = torch.autograd.grad(mapped, made, grad)[0].float()
    return change


def _summed_by_row(values: torch.Tensor, row: torch.Tensor, rows: int) -> torch.Tensor:
    """Sum of `values` [n, H] by row: [rows, H]. The order of summation is always the same."""
    summed: torch.Tensor = torch.ops.aten.embedding_dense_backward(values, row, rows, -1, False)
    return summed


def _logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rows: slice) -> torch.Tensor:
    return nn.functional.linear(hidden, weight, None if bias is None else bias[rows])


def _column(target: torch.Tensor, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Column of each token's target in a block of `rows`, [n, 1], and whether the target is in the block. If it is not,
    the column has no meaning."""
    inside = (target >= rows.start) & (target < rows.stop)
    return (target - rows.start).where(inside, 0)[:, None], inside


def _rows_at_once(hidden: torch.Tensor) -> int:
    logits = BLOCK_LOGITS.get(hidden.device.type, BLOCK_LOGITS["cuda"])
    return max(256, logits // max(1, min(len(hidden), BLOCK_TOKENS)))


def _blocks(length: int, most: int) -> Iterator[slice]:
    for start in range(0, length, most):
        yield slice(start, min(start + most, length))
