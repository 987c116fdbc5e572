"""Stacks of experts in tiles: experts of a layer that lie in common tensors, some to a module, used one after another.

Mixtures of transformers (Mixtral, Qwen3-MoE, GPT-OSS and others) hold theirs so. Shapes: N tokens, K experts for each,
H hidden, E experts.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from pagoda.models.tiles import Tiled


def is_expert_stack(module: nn.Module) -> bool:
    """Whether a module is as transformers' stacks are: it is called with tokens [N, H], their experts [N, K] and the
    weights of these [N, K], and all its parameters have experts as their first dimension."""
    if not hasattr(module, "_is_expert_parallel"):  # set by their decorator, `use_experts_implementation`
        return False
    own, count = list(module.parameters(recurse=False)), getattr(module, "num_experts", None)
    return (
        len(inspect.signature(type(module).forward).parameters) == 4
        and len(own) == sum(1 for _ in module.parameters()) > 0
        and all(param.dim() > 1 and len(param) == count and param.is_floating_point() for param in own)
        and next(module.buffers(), None) is None
    )


def some_experts(stack: nn.Module, params: Mapping[str, nn.Parameter]) -> nn.Module:
    """A stack of the same class with `params`, those of some of its experts."""
    tile: nn.Module = object.__new__(type(stack))
    nn.Module.__init__(tile)
    tile.__dict__.update({key: value for key, value in vars(stack).items() if key not in vars(tile)})
    for name, child in stack.named_children():
        tile.add_module(name, child)
    for name, param in params.items():
        tile.register_parameter(name, param)
    tile.__dict__["num_experts"] = len(next(iter(params.values())))
    return tile.train(stack.training)


class TiledExperts(Tiled):
    """A stack of experts in tiles, each a stack of some of them.

    A tile runs the tokens that are routed to it, once for each of its experts. The K results of a token are added up in
    fp32 and rounded once, as transformers' grouped and batched kernels do. A tile without tokens does not run, and its
    gradient is zero, as it is in the stack.

    Whoever keeps the weights elsewhere sets `coming`, and is told which tiles are about to run, in that order, and
    which will not, though they get a gradient.
    """

    def __init__(self, tiles: Sequence[nn.Module], stack: nn.Module) -> None:
        super().__init__(tiles, {name: tuple(param.shape) for name, param in stack.named_parameters()})
        experts = [len(next(tile.parameters())) for tile in tiles]
        self.num_experts = sum(experts)
        self.coming: Callable[[Sequence[nn.Module], Sequence[nn.Module]], None] | None = None
        self._spans = list(pairwise(accumulate(experts, initial=0)))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[N, H], [N, K] and [N, K] to [N, H]. Numbers from E on are those of no expert and add nothing."""
        experts, weights = top_k_index.T.flatten(), top_k_weights.T.flatten()  # first choices first, as in the stack
        counts = experts.clamp(max=self.num_experts).bincount(minlength=self.num_experts + 1).tolist()
        runs = [any(counts[start:stop]) for start, stop in self._spans]
        idle = [tile for tile, running in zip(self.tiles, runs, strict=True) if not running]
        if self.coming is not None:
            self.coming([tile for tile, running in zip(self.tiles, runs, strict=True) if running], idle)
        combined = hidden_states.new_zeros(top_k_index.numel(), hidden_states.shape[-1])
        results, places = [combined[:0]], [experts[:0]]
        for (start, stop), tile, running in zip(self._spans, self.tiles, runs, strict=True):
            if running:
                place = ((experts >= start) & (experts < stop)).nonzero()[:, 0]
                tokens = hidden_states.index_select(0, place % len(hidden_states))
                expert, weight = experts.index_select(0, place) - start, weights.index_select(0, place)
                results.append(tile(tokens, expert[:, None], weight[:, None]))
                places.append(place)
        joined = torch.cat(results)
        combined = combined.to(joined.dtype).index_copy(0, torch.cat(places), joined)
        combined = combined.view(top_k_index.shape[1], *hidden_states.shape).sum(0).to(hidden_states.dtype)
        return _with_zero_gradients(combined, [param for tile in idle for param in tile.parameters()])


class _ZeroGradients(torch.autograd.Function):
    """A tensor as it is, which gives parameters that it does not depend on gradients of zeros. Reads none of them."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *params: Tensor) -> Tensor:
        ctx.like = [(param.shape, param.dtype, param.device) for param in params]
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        zeros = [
            torch.zeros(shape, dtype=dtype, device=device) if wanted else None
            for wanted, (shape, dtype, device) in zip(needed, ctx.like, strict=True)
        ]
        return grad, *zeros


def _with_zero_gradients(tensor: Tensor, params: Sequence[Tensor]) -> Tensor:
    return _ZeroGradients.apply(tensor, *params) if params else tensor  # type: ignore[no-untyped-call]
