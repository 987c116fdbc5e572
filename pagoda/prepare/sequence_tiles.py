"""Sequence tiles: MLPs and norms process a long sequence piece by piece, so that a layer never keeps all tokens at the
width of its MLP.

ALST calls this TiledMLP (arXiv 2506.13996). Here, a layer that is recomputed runs its MLP twice, and not three times.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pagoda.autograd.activations.blocks import find_blocks
from pagoda.config.training import TileCount, Tiles
from pagoda.errors import ConfigError
from pagoda.plan.tiles import tile_count

_MLP = re.compile(r"(MLP|Mlp|FeedForward|DenseActDense|DenseGatedActDense)$")
_NORM = re.compile(r"(RMSNorm|LayerNorm)$")
"""Names of classes of transformers that work on each token alone."""
_ROUTING = re.compile(r"Expert|Router|Moe|MoE|Sparse|TopK")
"""Parts of names of modules that send tokens to experts."""


def modules_to_tile(model: nn.Module, tiles: Tiles) -> list[nn.Module]:
    """The modules of a model to which `sequence_tiles` applies: norms of torch, MLPs and norms of transformers, and
    modules of the classes that `tiles.per_token` names.

    Raises ConfigError if a layer has no such MLP, and for modules that cannot run in pieces.
    """
    chosen = dict(_per_token(model, tiles.per_token))
    mlps = {name for name, module in chosen.items() if not _is_norm(module)}
    missing = set(tiles.per_token) - {type(module).__name__ for module in chosen.values()}
    if missing:
        raise ConfigError(f"per_token names {sorted(missing)[0]!r}, and the model has no module of such a class.")
    for block in find_blocks(model):
        if not any(f"{name}.".startswith(f"{block.name}.") for name in mlps):
            parts = ", ".join(f"{name} ({type(part).__name__})" for name, part in block.module.named_children())
            raise ConfigError(
                f"sequence_tiles does not know which part of the layer {block.name!r} works on each token alone: "
                f"{parts}. Name the class of its MLP in per_token, or leave out sequence_tiles. (Experts, whose "
                "tokens are routed, have no tiles.)"
            )
    if not mlps:
        raise ConfigError(
            f"sequence_tiles needs MLPs that work on each token alone, and {type(model).__name__} has none that are "
            "known: name their class in per_token, or leave out sequence_tiles."
        )
    for name, module in chosen.items():
        _check(model, name, module)
    return list(chosen.values())


def tile_sequences(modules: list[nn.Module], tiles: TileCount) -> None:
    """Make modules process their input in `tiles` pieces of its tokens. With "auto", a piece has at most
    `TILE_TOKENS`, which keeps matrix products fast.

    A forward computes the same values. In training, graphs keep only a module's input, and backward computes one piece
    after another again. Gradients of weights are sums over pieces, rounded after each.
    """
    for module in modules:
        _tile(module, tiles)


def _per_token(model: nn.Module, classes: tuple[str, ...]) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules that work on each token alone, with their names."""

    def visit(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if type(module).__name__ in classes or _is_norm(module) or _is_mlp(module):
            yield name, module
            return
        for short, child in module.named_children():
            yield from visit(f"{name}.{short}" if name else short, child)

    seen: set[nn.Module] = set()
    for name, module in visit("", model):
        if module not in seen:
            seen.add(module)
            yield name, module


def _is_norm(module: nn.Module) -> bool:
    if type(module) is nn.LayerNorm or type(module) is nn.RMSNorm:
        return len(module.normalized_shape) == 1
    return _of_transformers(module, _NORM) and len(_arguments(module)) == 1


def _is_mlp(module: nn.Module) -> bool:
    routes = any(_ROUTING.search(type(part).__name__) for part in module.modules())
    return _of_transformers(module, _MLP) and not routes and len(_arguments(module)) == 1


def _of_transformers(module: nn.Module, name: re.Pattern[str]) -> bool:
    kind = type(module)
    return kind.__module__.startswith("transformers.models.") and name.search(kind.__name__) is not None


def _arguments(module: nn.Module) -> list[str]:
    """Names of the arguments of a module's forward."""
    return list(inspect.signature(type(module).forward).parameters)[1:]


def _check(model: nn.Module, name: str, module: nn.Module) -> None:
    """Raises ConfigError for a module whose forward cannot be called piece by piece."""
    reason = None
    compiled = (other for other, part in model.named_modules() if part._compiled_call_impl is not None)
    around = next((other for other in compiled if not other or f"{name}.".startswith(f"{other}.")), None)
    if around is not None:
        reason = f"{around or 'the model'!r} is compiled as a whole"
    elif len(_arguments(module)) != 1:
        reason = f"its forward takes {', '.join(_arguments(module))}, and not one tensor"
    if reason is not None:
        raise ConfigError(f"{name!r} cannot run in sequence_tiles: {reason}. Leave out sequence_tiles.")


def _tile(module: nn.Module, tiles: TileCount) -> None:
    forward: Callable[[torch.Tensor], torch.Tensor] = module.forward

    @wraps(forward)
    def in_tiles(*args: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        (hidden,) = (*args, *named.values())
        axis = max(range(hidden.dim() - 1), key=lambda dim: hidden.shape[dim], default=None)
        length = 1 if axis is None else hidden.shape[axis]
        count = tile_count(tiles, length, hidden.numel() // max(1, hidden.shape[-1]))
        if axis is None or count < 2:
            return forward(hidden)
        sizes = [(tile + 1) * length // count - tile * length // count for tile in range(count)]
        pieces = [piece.contiguous() for piece in torch.unsafe_split_with_sizes(hidden, sizes, axis)]
        if torch.is_grad_enabled():
            frozen = [param for param in module.parameters(recurse=False) if not param.requires_grad]
            return torch.cat(_recomputed(forward, hidden, pieces, sizes, axis, frozen), axis)
        return torch.cat([forward(piece) for piece in pieces], axis)

    module.__dict__["forward"] = in_tiles


def _recomputed(
    forward: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    pieces: list[torch.Tensor],
    sizes: list[int],
    axis: int,
    frozen: Sequence[nn.Parameter],
) -> list[torch.Tensor]:
    """Run `forward` on pieces of `hidden`. Their graphs keep only `hidden`, and backward runs the pieces again.

    They refer to `frozen` parameters of the module itself too, such as those of a norm: backward may run the pieces
    when all gradients of their unit have been made, and the unit must not be updated before.

    `hidden` is saved before any piece runs. So if the layer around the pieces is recomputed too, torch stops that
    recomputation at this save: backward needs nothing that the layer saves later.
    """
    kept = _KeptWhole(hidden, sizes, axis, frozen)
    first: list[torch.Tensor | None] = [*pieces]

    def run(index: int) -> torch.Tensor:
        piece, first[index] = first[index], None
        return forward(kept.again(index) if piece is None else piece)

    return [checkpoint(run, index, use_reentrant=False) for index in range(len(sizes))]


class _KeptWhole:
    """A tensor that is saved for backward as a whole, and returned in pieces."""

    def __init__(self, tensor: torch.Tensor, sizes: list[int], axis: int, also: Sequence[torch.Tensor]) -> None:
        """`also`: tensors that are saved as long as it is."""
        with torch.enable_grad():
            start = torch.empty(0, requires_grad=True)
            self._also: Any = _Save.apply(start, *also).grad_fn  # type: ignore[no-untyped-call]
            node = _Save.apply(start, tensor).grad_fn  # type: ignore[no-untyped-call]
        self._node: Any = node
        self._sizes, self._axis = sizes, axis
        self._needs_grad = tensor.requires_grad
        self._left: dict[int, torch.Tensor] = {}
        """The pieces that this backward has not asked for yet. They are kept because some hooks return a saved tensor
        only once."""

    def again(self, index: int) -> torch.Tensor:
        if index not in self._left:
            (tensor,) = self._node.saved_tensors
            self._left = dict(enumerate(tensor.detach().split(self._sizes, self._axis)))
        return self._left.pop(index).contiguous().requires_grad_(self._needs_grad)


class _Save(torch.autograd.Function):
    """Saves all but its first argument for backward, even if they need no gradient: the first one does."""

    @staticmethod
    def forward(ctx: Any, needs_grad: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return needs_grad.view_as(needs_grad)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad, *[None] * (len(ctx.needs_input_grad) - 1)
