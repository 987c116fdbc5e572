"""The experts of transformers' mixtures as separate modules. Each forward runs those that routers chose.

transformers holds the experts of a layer in common tensors (Mixtral, Qwen3-MoE, DeepSeek-V3, GPT-OSS and others: a
stack) or as modules (Switch Transformers). `wrap` replaces both by the classes here, so that each expert is a unit. An
adapter of such a stack then adds to the weights of each expert that runs.
Shapes: N tokens, K experts for each token, hidden size H, E experts.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from importlib import import_module
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pagoda.autograd.hooks import Announcing
from pagoda.autograd.reads import adapts_parameter
from pagoda.parameters.quantized import is_quantized
from pagoda.prepare.tiles import Tiled
from pagoda.ranks.experts import ExpertExchange


class RoutedExperts(Announcing):
    """The experts of a layer. A forward runs those that have tokens, in the order of their numbers.

    The K results of a token are weighted and added as in transformers' grouped kernel, with the same bits. With an
    exchange, this module has this rank's part of the experts. Tokens are sent to the ranks of their experts, and
    unweighted results are returned.
    """

    num_experts: int
    """Number of experts of the layer, on all ranks."""
    exchange: ExpertExchange | None = None
    idle_get_zeros: bool
    """Whether parameters of pieces without tokens get a gradient of zeros, as in transformers' own module."""

    def pieces(self) -> list[tuple[nn.Module, int]]:
        return [(expert, 1) for expert in self.children()]

    def run_piece(self, piece: nn.Module, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        """The results [n, H] of `tokens` [n, H], sorted by expert. `piece`: an expert, or a tile of several. `counts`:
        number of tokens of each expert."""
        raise NotImplementedError

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute [N, H] from hidden states [N, H], expert numbers [N, K] and weights [N, K]. Numbers >= E add
        nothing."""
        count, choices = self.num_experts, top_k_index.shape[1]
        numbers, order = top_k_index.flatten().sort(stable=True)
        counts = numbers.clamp(max=count).bincount(minlength=count + 1).tolist()[:count]
        order = order[: sum(counts)]
        results = self._through_ranks(hidden_states[order // choices], counts)
        weighted = results * top_k_weights.flatten()[order].unsqueeze(-1)
        combined = weighted.new_zeros(top_k_index.numel(), hidden_states.shape[-1]).index_copy(0, order, weighted)
        return combined.view(len(hidden_states), choices, -1).sum(1).to(hidden_states.dtype)

    def _through_ranks(self, tokens: Tensor, counts: list[int]) -> Tensor:
        """The results [n, H] for this rank's tokens [n, H], which are sorted by expert."""
        if self.exchange is None:
            return self._run(tokens, counts)
        received, by_rank = self.exchange.to_experts(tokens, counts)
        here = [sum(column) for column in zip(*by_rank, strict=True)]
        order = _by_expert(by_rank, received.device)
        results = self._run(received[order], here)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return self.exchange.from_experts(results[back], counts, by_rank)

    def _run(self, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        """The results [n, H] of this rank's experts for their tokens [n, H], which are sorted by expert."""
        pieces = self.pieces()
        ends = [*accumulate((experts for _, experts in pieces), initial=0)]
        of_pieces = [counts[start:stop] for start, stop in pairwise(ends)]
        parts = torch.split(tokens, [sum(each) for each in of_pieces])
        runs = [
            (piece, part, each) for (piece, _), part, each in zip(pieces, parts, of_pieces, strict=True) if len(part)
        ]
        idle = [piece for (piece, _), part in zip(pieces, parts, strict=True) if not len(part)]
        zeros = self.idle_get_zeros and any(True for piece in idle for _ in piece.parameters())
        if self.coming is not None:
            self.coming([piece for piece, _, _ in runs], idle if zeros else ())
        if not runs:  # the tokens, which have no rows, keep the graph connected
            return _zeroing(tokens, idle) if zeros else tokens
        results: list[Tensor] = []
        waiting: list[nn.Module] = []
        for (piece, _), part, each in zip(pieces, parts, of_pieces, strict=True):
            if len(part):
                results.append(self.run_piece(piece, _zeroing(part, waiting), each))
                waiting = []
            elif zeros and results:
                results[-1] = _zeroing(results[-1], [piece])
            elif zeros:
                waiting.append(piece)
        return torch.cat(results)


class ExpertStack(Tiled, RoutedExperts):
    """A stack of experts in tiles. Each tile is a stack of the same class with some of the experts, named by the number
    of its first one. An expert without tokens gets a gradient of zeros, as in the whole stack."""

    idle_get_zeros = True

    def __init__(
        self, tiles: Mapping[int, nn.Module], stack: nn.Module, exchange: ExpertExchange | None = None
    ) -> None:
        """`tiles`: number of the first expert -> tile, for the whole stack or for this rank's part."""
        shapes = {name: tuple(param.shape) for name, param in stack.named_parameters()}
        named = {str(first): tile for first, tile in tiles.items()}
        super().__init__(named, shapes, first_row=next(iter(tiles)))
        self.num_experts = experts_of_stack(stack)
        self.exchange = exchange

    def pieces(self) -> list[tuple[nn.Module, int]]:
        return [(tile, experts_of_stack(tile)) for tile in self.tiles.values()]

    def run_piece(self, piece: nn.Module, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        numbers = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).to(tokens.device)
        return piece(tokens, numbers[:, None], tokens.new_ones(len(tokens), 1))  # type: ignore[no-any-return]


class SwitchExperts(RoutedExperts):
    """The experts of a Switch Transformer, under their own names. An expert without tokens gets no gradient."""

    idle_get_zeros = False

    def __init__(self, experts: Mapping[str, nn.Module], count: int, exchange: ExpertExchange | None = None) -> None:
        """`experts`: all `count` experts of the layer, or this rank's part of them."""
        super().__init__()
        for name, expert in experts.items():
            self.add_module(name, expert)
        self.num_experts = count
        self.exchange = exchange

    def run_piece(self, piece: nn.Module, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        return piece(tokens)  # type: ignore[no-any-return]

    def forward(self, hidden_states: Tensor, selected_experts: Tensor, routing_weights: Tensor) -> Tensor:
        """Compute [N, H] from hidden states [N, H], a one-hot choice [N, 1, E] and weights [N, 1].

        The choice is all zeros for a token whose expert had no room.
        """
        numbers = selected_experts.argmax(-1).masked_fill(selected_experts.sum(-1) == 0, self.num_experts)
        return super().forward(hidden_states, numbers, routing_weights)


class QuantizedExperts(RoutedExperts):
    """The frozen experts of a stack in 4 or 8 bits. Each expert is a module that its number names, and dequantizes its
    weights in each use."""

    idle_get_zeros = False

    def __init__(self, stack: nn.Module, experts: Sequence[Mapping[str, nn.Parameter]], dtype: torch.dtype) -> None:
        """`experts`: for each expert of `stack`, its parameters: quantized, or its part [1, ...] of the stack's. They
        compute in `dtype`."""
        super().__init__()
        self.num_experts = experts_of_stack(stack)
        self._whole = {
            name: nn.Parameter(torch.full((), torch.nan, dtype=dtype).expand(param.shape), requires_grad=False)
            for name, param in stack.named_parameters()
        }
        """Stand for the parameters of the stack, whose shapes and dtype adapters read."""
        for number, params in enumerate(experts):
            expert = some_experts(stack, params, computes=True)
            states = {name: getattr(param, "quant_state", None) for name, param in params.items()}
            expert.__dict__.update(states=states, num_experts=1)
            self.add_module(str(number), expert)

    def __getattr__(self, name: str) -> Any:
        """For a parameter of the stack, return a tensor that stands for it."""
        whole = self.__dict__.get("_whole", {}).get(name)
        return super().__getattr__(name) if whole is None else whole

    def run_piece(self, piece: nn.Module, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        piece.__dict__["computed"] = self.computed
        numbers = torch.zeros(len(tokens), 1, dtype=torch.int64, device=tokens.device)
        return piece(tokens, numbers, tokens.new_ones(len(tokens), 1))  # type: ignore[no-any-return]


class SwitchRouter(nn.Linear):
    """The linear layer of a Switch Transformer's router. transformers casts the layer itself to the router's dtype in
    every forward, which is impossible for a paged weight. This class casts the weight in each product instead."""

    @classmethod
    def of(cls, linear: nn.Linear) -> "SwitchRouter":
        """The same layer with the same parameters."""
        made = cls(linear.in_features, linear.out_features, bias=False, device="meta")
        made.weight, made.bias = linear.weight, linear.bias
        return made.train(linear.training)

    def to(self, *_dtype: Any, **_others: Any) -> "SwitchRouter":
        """Returns the layer unchanged."""
        return self

    def forward(self, hidden: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(hidden.dtype)
        return functional.linear(hidden, self.weight.to(hidden.dtype), bias)


def is_expert_stack(module: nn.Module) -> bool:
    """Whether a module is like transformers' stacks of experts.

    A stack is called with tokens [N, H], their experts [N, K] and the weights of these [N, K]. The first dimension of
    each of its parameters indexes the experts.
    """
    if not hasattr(module, "is_transposed"):  # set by the decorator `use_experts_implementation` of transformers
        return False
    own, count = list(module.parameters(recurse=False)), getattr(module, "num_experts", None)
    return (
        len(inspect.signature(type(module).forward).parameters) == 4
        and len(own) == sum(1 for _ in module.parameters()) > 0
        and all(param.dim() > 1 and len(param) == count and param.is_floating_point() for param in own)
        and next(module.buffers(), None) is None
    )


def experts_of_stack(stack: nn.Module) -> int:
    """Number of experts in a stack or in a tile of a stack."""
    return len(next(stack.parameters(recurse=False)))


def some_experts(stack: nn.Module, params: Mapping[str, nn.Parameter], computes: bool) -> nn.Module:
    """A stack of the same class with `params`, the parameters of some of its experts. `computes`: each forward computes
    its weights from them, as they are quantized or adapters change them."""
    kind: Any = type(stack)
    tile: nn.Module = object.__new__(_computing_class(kind) if computes else kind)
    nn.Module.__init__(tile)
    tile.__dict__.update({key: value for key, value in vars(stack).items() if key not in vars(tile)})
    for name, child in stack.named_children():
        tile.add_module(name, child)
    for name, param in params.items():
        tile.register_parameter(name, param)
    tile.__dict__["num_experts"] = len(next(iter(params.values())))
    tile.__dict__.update(added={}, states={}, computed=None)
    return tile.train(stack.training)


@cache
def _computing_class(kind: type) -> Any:
    """A class of stacks whose forward sees dequantized weights, with what adapters add to them. Graphs do not keep
    these.

    `states`: parameter -> how bitsandbytes has packed it, if it has. `added`: parameter -> (left, right, scale) of each
    adapter. It adds scale * left @ right, of shape [experts, ...]. `computed`: that of the whole layer (see
    `Announcing`).
    """

    def forward(self: Any, *args: Any) -> Tensor:
        with ExitStack() as until_done:
            for name, param in self._parameters.items():
                adapters = self.added.get(name, ())
                if not adapters and not is_quantized(param):
                    continue
                stored, terms = _stored(param, self.states.get(name))
                compute = partial(_weight, stored, len(terms), [scale for _, _, scale in adapters])
                terms += chain.from_iterable(factors for *factors, _ in adapters)
                weight = compute(*terms)
                if self.computed is not None:
                    until_done.enter_context(self.computed(weight, compute, terms))
                self.__dict__[name] = weight  # hides the parameter
                until_done.callback(self.__dict__.pop, name)
            return kind.forward(self, *args)  # type: ignore[attr-defined, no-any-return]

    return type(kind)(f"Computing{kind.__name__}", (kind,), {"__module__": __name__, "forward": forward})


def _weight(stored: Callable[..., Tensor], count: int, scales: Sequence[float], *terms: Tensor) -> Tensor:
    """The sum of a weight, which `stored` computes from the first `count` terms, and what adapters add to it, as peft
    computes it for one adapter."""
    weight, factors = stored(*terms[:count]), terms[count:]
    for left, right, scale in zip(factors[::2], factors[1::2], scales, strict=True):
        with torch.autocast(weight.device.type, enabled=False):
            weight = torch.baddbmm(weight, left, right, alpha=scale)
    return weight


def _stored(param: Any, state: Any) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """The function that computes the values of a parameter, and the tensors from which it does."""
    if not is_quantized(param):
        return _same, [param]
    if state is not None:
        return partial(import_module("bitsandbytes").functional.dequantize_4bit, quant_state=state), [param.data]
    names, context = param.__tensor_flatten__()
    names = [name for name in names if getattr(param, name) is not None]
    kind, shape, stride = type(param), param.shape, param.stride()

    def values(*tensors: Tensor) -> Tensor:
        made = kind.__tensor_unflatten__(dict(zip(names, tensors, strict=True)), context, shape, stride)
        return made.dequantize()[None]  # type: ignore[no-any-return]

    return values, [getattr(param, name) for name in names]


def _same(values: Tensor) -> Tensor:
    return values


def adapts_experts(module: nn.Module, count: int) -> bool:
    """Whether a module is peft's adapter of a parameter that holds `count` experts (`target_parameters`)."""
    has_factors = adapts_parameter(module) and hasattr(module, "get_delta_factors")
    return has_factors and count > 1 and getattr(module, "num_experts", None) == count


def adapting_pieces(adapter: Any) -> Any:
    """peft's adapter of a parameter of experts, for experts that run in pieces. In place of the whole parameter, it
    changes the pieces that run. It shares everything with `adapter`."""
    kind: Any = type(adapter)
    made: Any = object.__new__(_adapting_class(kind))
    made.__dict__ = adapter.__dict__
    return made


@cache
def _adapting_class(kind: type) -> type:
    @contextmanager
    def _activate_lora(self: Any, active_adapters: Sequence[str]) -> Iterator[None]:
        experts: RoutedExperts = self.get_base_layer()
        pieces, sizes = zip(*experts.pieces(), strict=True)
        for piece in pieces:
            piece.added[self.parameter_name], piece.__dict__["computed"] = [], experts.computed
        for adapter in active_adapters:
            if adapter in self.lora_A:
                left, right, scale = self.get_delta_factors(adapter)
                for piece, *factors in zip(pieces, left.split(sizes), right.split(sizes), strict=True):
                    piece.added[self.parameter_name].append((*factors, scale))
        try:
            yield
        finally:
            for piece in pieces:
                del piece.added[self.parameter_name]

    return type(kind)(f"Pieced{kind.__name__}", (kind,), {"__module__": __name__, "_activate_lora": _activate_lora})


def _by_expert(by_rank: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """int64 [n]: the indices that reorder rows from sorted by rank, then expert, to sorted by expert, then rank."""
    experts = torch.arange(len(by_rank[0])).repeat(len(by_rank))
    counts = torch.tensor(list(chain.from_iterable(by_rank)), dtype=torch.int64)
    return experts.repeat_interleave(counts).argsort(stable=True).to(device)


def _zeroing(tensor: Tensor, idle: Sequence[nn.Module]) -> Tensor:
    """A tensor whose backward also gives zero gradients to the parameters of idle pieces, the last piece first.

    Backward reaches pieces in the reverse order of their forwards. Zeros come in that order too, so ranks that route
    their tokens differently have gradients in one order, and each is reduced once for all of them.
    """
    for piece in idle:
        if params := list(piece.parameters()):
            tensor = _ZeroGradients.apply(tensor, *params)  # type: ignore[no-untyped-call]
    return tensor


class _ZeroGradients(torch.autograd.Function):
    """Returns a tensor unchanged, and gives zero gradients to parameters it does not depend on. Reads no parameter."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *params: Tensor) -> Tensor:
        ctx.like = [(param.shape, param.dtype, param.device) for param in params]
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        # Each has one element. It becomes a full tensor only when it is accumulated, one parameter at a time.
        zeros = [
            torch.zeros((), dtype=dtype, device=device).expand(shape) if wanted else None
            for wanted, (shape, dtype, device) in zip(needed, ctx.like, strict=True)
        ]
        return grad, *zeros
