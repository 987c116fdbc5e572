"""Modules that compute in RAM while a device of its own computes all others: embeddings."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from pagoda.errors import UsageError


def run_in_ram(call: Callable[..., Any], results_to: torch.device, /, *args: Any, **kwargs: Any) -> Any:
    """Call a module in RAM. Its arguments come from a device, and its results go there. Autograd brings their gradients
    back. All these copies wait for what they read."""
    if results_to.type == "cpu":  # an arena stands in for a device
        return call(*args, **kwargs)
    args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), (args, kwargs))
    with _SumsAsOnGpu():
        results = call(*args, **kwargs)
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(results_to), results)


class _SumsAsOnGpu(TorchFunctionMode):
    """Inside, the gradients of a row are added up as on a GPU: in fp32, and rounded once. torch's CPU kernel rounds
    after each addition, so in bf16 the gradients of a frequent token would not add up."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.embedding:
            return look_up(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def look_up(
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """As `functional.embedding`, without a norm, and with a dense gradient."""
    if max_norm is not None:
        raise UsageError(
            "An embedding that the CPU looks up wrote to its weights in forward (max_norm): leave max_norm out, or "
            "raise memory.embedding_limit."
        )
    padding = -1 if padding_idx is None else padding_idx % len(weight)
    rows: torch.Tensor = _Lookup.apply(weight, input, padding, scale_grad_by_freq)  # type: ignore[no-untyped-call]
    return rows


class _Lookup(torch.autograd.Function):
    """A lookup whose backward adds up the gradients of a row in fp32."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, ids: torch.Tensor, padding: int, by_frequency: bool) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.rows, ctx.padding, ctx.by_frequency = len(weight), padding, by_frequency
        return functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (ids,) = ctx.saved_tensors
        used, places = ids.unique(return_inverse=True)
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        sums = torch.ops.aten.embedding_dense_backward(wide, places, len(used), -1, ctx.by_frequency)
        sums = sums.masked_fill((used == ctx.padding)[:, None], 0).to(gradient.dtype)
        whole = sums.new_zeros(ctx.rows, sums.shape[-1])
        return whole.index_copy(0, used.long(), sums), None, None, None
