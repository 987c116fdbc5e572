"""Operator tiling: layers too large to be fetched at once are replaced by tiles, before units are found."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from pagoda.models import layers
from pagoda.models.expert_tiles import TiledExperts, is_expert_stack, some_experts
from pagoda.models.late_logits import LateHead, make_late
from pagoda.models.tiles import EmbeddingTile, LinearTile, Tiled, TiledEmbedding, TiledLinear, row_blocks

_LINEARS = (nn.Linear, layers.Linear, LateHead)
_EMBEDDINGS = (nn.Embedding, layers.Embedding)
"""Subclasses may do anything; ours only initialise otherwise."""

Place = tuple[nn.Module, str]
"""A module, and the name under which it holds another."""


class Tiling:
    """What was replaced in a model: every linear layer, embedding and stack of experts with more than some elements.

    Layers that share a weight share its tiles. A layer stays whole where something else uses its weight too, where it
    is the model itself, has hooks, or does more than its class: a norm of vectors, sparse gradients.
    """

    def __init__(self, model: nn.Module, most_elements: int) -> None:
        self._tiled: list[tuple[list[Place], nn.Module, Tiled]] = []
        """(where it is, the whole layer, its tiles)"""
        self._parts: dict[tuple[int, str], list[nn.Parameter]] = {}
        """(whole parameter, its name in a layer) -> its parts, which tied layers share."""
        self._whole: dict[int, tuple[nn.Parameter, int]] = {}
        users: dict[int, list[nn.Module]] = {}
        places: dict[nn.Module, list[Place]] = {}
        for module in model.modules():
            for param in module.parameters(recurse=False):
                users.setdefault(id(param), []).append(module)
            for name, child in module.named_children():
                places.setdefault(child, []).append((module, name))
        for module in list(model.modules()):
            held = list(module.parameters(recurse=False))
            if sum(param.numel() for param in held) <= most_elements or module not in places:
                continue
            if is_expert_stack(module):
                if not _has_hooks(module) and all(users[id(param)] == [module] for param in held):
                    self._tiled.append((places[module], module, self._tiles_of_experts(module, most_elements)))
                continue
            weight = module._parameters.get("weight")
            if weight is None or weight.numel() <= most_elements:
                continue
            if all(_can_be_tiled(user) and user in places for user in users[id(weight)]):
                self._tiled.append((places[module], module, self._tiles_of(module, weight, most_elements)))
        before = {id(param): name for name, param in model.named_parameters()}
        for at, _, tiled in self._tiled:
            _put(at, tiled)
        after = {id(param): name for name, param in model.named_parameters()}
        self._renamed = {before[whole]: [after[id(part)] for part in cut] for (whole, _), cut in self._parts.items()}

    def renamed(self, names: Iterable[str]) -> list[str]:
        """Parameters by their names now: of one that is in tiles, the names of its parts."""
        return [new for name in names for new in self._renamed.get(name, [name])]

    def whole(self, param: nn.Parameter) -> tuple[nn.Parameter, int]:
        """The parameter of the untiled model that a parameter is of, and its first element there."""
        return self._whole.get(id(param), (param, 0))

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Inside, the model is untiled: it initialises itself as if it had never been."""
        self.undo()
        try:
            yield
        finally:
            for at, _, tiled in self._tiled:
                _put(at, tiled)

    def undo(self) -> None:
        """Put the whole layers back."""
        for at, layer, _ in self._tiled:
            _put(at, layer)

    def _tiles_of(self, layer: nn.Module, weight: nn.Parameter, most_elements: int) -> Tiled:
        rows, width = weight.shape
        blocks = row_blocks(rows, (width,), most_elements)
        weights = self._cut("weight", weight, blocks)
        if isinstance(layer, nn.Embedding):
            tiles = [EmbeddingTile(w, at[0], layer.padding_idx) for w, at in zip(weights, blocks, strict=True)]
            return TiledEmbedding(tiles, rows, width).train(layer.training)
        assert isinstance(layer, nn.Linear)
        biases = [None] * len(blocks) if layer.bias is None else self._cut("bias", layer.bias, blocks)
        linear = [LinearTile(w, b, at[0]) for w, b, at in zip(weights, biases, blocks, strict=True)]
        tiled = TiledLinear(linear, width, rows, layer.bias is not None).train(layer.training)
        if isinstance(layer, LateHead):
            make_late(tiled)
        return tiled

    def _tiles_of_experts(self, stack: nn.Module, most_elements: int) -> Tiled:
        params = dict(stack.named_parameters())
        count = len(next(iter(params.values())))
        blocks = row_blocks(count, [param.numel() // count for param in params.values()], most_elements)
        cut = [self._cut(name, param, blocks) for name, param in params.items()]
        tiles = [some_experts(stack, dict(zip(params, parts, strict=True))) for parts in zip(*cut, strict=True)]
        return TiledExperts(tiles, stack).train(stack.training)

    def _cut(self, name: str, whole: nn.Parameter, blocks: list[tuple[int, int]]) -> list[nn.Parameter]:
        """A parameter for each block of rows: views of the values where there are some."""
        key = id(whole), name
        if key not in self._parts:
            self._parts[key] = []
            for start, stop in blocks:
                part = nn.Parameter(whole.detach()[start:stop], whole.requires_grad)
                self._parts[key].append(part)
                self._whole[id(part)] = whole, start * (whole.numel() // len(whole))
        return self._parts[key]


def _has_hooks(layer: nn.Module) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks) or "forward" in vars(layer)


def _can_be_tiled(layer: nn.Module) -> bool:
    if _has_hooks(layer):
        return False
    if isinstance(layer, nn.Embedding) and type(layer) in _EMBEDDINGS:
        return layer.max_norm is None and not layer.scale_grad_by_freq and not layer.sparse
    return type(layer) in _LINEARS and layer.get_parameter("weight").layout is torch.strided


def _put(places: list[Place], module: nn.Module) -> None:
    for parent, name in places:
        parent._modules[name] = module
