"""Operator tiling: before units are made, layers that are too large to fetch at once are replaced by tiles, and experts
by separate modules."""

import warnings
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pagoda.errors import ConfigError
from pagoda.mesh.dtensors import as_dtensor, local
from pagoda.models.switch import is_switch
from pagoda.parameters.unit import node_is_held
from pagoda.plan.lookups import check_lookup
from pagoda.plan.units import ALIGN_ELEMENTS
from pagoda.prepare.deferred_logits import LateHead, defer_logits
from pagoda.prepare.experts import (
    ExpertStack,
    RoutedExperts,
    SwitchExperts,
    SwitchRouter,
    adapting_pieces,
    adapts_experts,
    experts_of_stack,
    is_expert_stack,
    some_experts,
)
from pagoda.prepare.lookups import lookups_in
from pagoda.prepare.tiles import EmbeddingTile, LinearTile, Tiled, TiledEmbedding, TiledLinear, row_blocks
from pagoda.ranks.experts import ExpertExchange

_LINEARS = (nn.Linear, LateHead)
"""Types of linear layers that can be tiled. Subclasses cannot, because they may compute something else."""
_FORWARD_HOOKS = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
_OTHER_HOOKS = (
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks"),
    *("_is_full_backward_hook", "_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
"""Attributes in which a module keeps its hooks."""
_ADAPTED = "base_layer"
"""The name of the adapted layer in peft's adapters, which read its parameters."""

Parent = tuple[nn.Module, str]
"""A module, and the name under which it has a child."""


class Tiling:
    """The replacements in a model: all linear layers and embeddings above a number of elements, and all experts.

    Layers that share a weight share its tiles. Forward hooks of a layer move to its replacement. A linear layer or
    embedding stays whole, with a warning, in these cases: another kind of module uses its weight too, it is the model
    itself, tensor parallelism has divided it, it or its parameters have other hooks, or it does more than its class
    says (a forward of its own, a maximum norm of vectors, sparse gradients). Experts with hooks of any kind stay in one
    unit, also with a warning.
    """

    def __init__(
        self,
        model: nn.Module,
        most_elements: int | None = None,
        *,
        trained: Container[str] | None = None,
        cuts_stacks: bool = True,
        in_blocks: bool = False,
        exchange: ExpertExchange | None = None,
        most_looked_up: int | None = None,
    ) -> None:
        """Replace layers of `model`.

        Args:
            most_elements: most elements of a tile. By default linear layers and embeddings stay whole, and each expert
                is a tile.
            trained: names of the parameters with optimizer state, by default those that require a gradient.
            cuts_stacks: whether those may be cut that hold several experts.
            in_blocks: whether the optimizer has one state for each block of a parameter. Then biases too are cut
                between blocks only, as a checkpoint joins the states of tiles.
            exchange: divides the experts of each layer over ranks. The model then has the experts of this rank.
            most_looked_up: embeddings with more elements stay whole, because the CPU looks up their rows.

        Raises ConfigError, with nothing replaced, if experts cannot be divided, if the model has none to divide, or if
        the CPU cannot look up the rows of such an embedding.
        """
        self._most_elements = most_elements
        self._in_blocks = in_blocks
        self._exchange = exchange
        self._replaced: list[tuple[list[Parent], nn.Module, nn.Module]] = []
        """(parents of a layer, the whole layer, its replacement)"""
        self._parts: dict[tuple[int, str], list[nn.Parameter]] = {}
        """(identity of the whole parameter, its name in a layer) -> its parts, which tied layers share."""
        self._whole: dict[int, tuple[nn.Parameter, int]] = {}
        self._users: dict[int, list[nn.Module]] = {}
        self._parents: dict[nn.Module, list[Parent]] = {}
        for module in model.modules():
            for param in module.parameters(recurse=False):
                self._users.setdefault(id(param), []).append(module)
            for name, child in module.named_children():
                self._parents.setdefault(child, []).append((module, name))
        self._trained = {
            id(param)
            for name, param in model.named_parameters()
            if (param.requires_grad if trained is None else name in trained)
        }
        self._replace_experts(model, cuts_stacks)
        if most_elements is not None:
            self._replace_large(model, most_elements, most_looked_up)
        before = {id(param): name for name, param in model.named_parameters()}
        for at, _, made in self._replaced:
            _put(at, made)
        after = {id(param): name for name, param in model.named_parameters()}
        self._renamed: dict[str, list[str]] = {name: [] for param, name in before.items() if param not in after}
        for (whole, _), cut in self._parts.items():
            self._renamed[before[whole]] = [after[id(part)] for part in cut]

    def _replace_experts(self, model: nn.Module, cuts_stacks: bool) -> None:
        """Replace the experts of every layer, except compiled ones and those that an adapter reads."""
        compiled = {
            inner for module in model.modules() if module._compiled_call_impl is not None for inner in module.modules()
        }
        kept: list[str] = []
        found = 0
        for name, module in model.named_modules():
            made: RoutedExperts | None = None
            if is_switch(module, "Top1Router") and type(linear := module.get_submodule("classifier")) is nn.Linear:
                if "forward" not in vars(linear):
                    self._replaced.append((self._parents[linear], linear, _with_hooks(SwitchRouter.of(linear), linear)))
            elif (is_switch(module, "Experts") or self._may_be_cut(module, cuts_stacks)) and _hooked(module):
                warnings.warn(
                    f"The experts of {name!r} stay together, as they or their parameters have hooks.", stacklevel=2
                )
                kept.append(name)
            elif is_switch(module, "Experts") and self._is_free(module, compiled):
                made = self._switch_experts(name, module)
            elif is_expert_stack(module):
                adapters = self._adapters_of(module)
                free = self._is_free(module, compiled, adapters) and not (adapters and self._exchange)
                if free and self._may_be_cut(module, cuts_stacks):
                    made = self._expert_stack(name, module, adapted=bool(adapters))
                else:
                    kept.append(name)
                if made is not None:
                    self._replaced += [(self._parents[each], each, adapting_pieces(each)) for each in adapters]
            if made is not None:
                self._replaced.append((self._parents[module], module, made))
                found += 1
        if self._exchange is not None and (kept or not found):
            why = f"those of {kept[0]!r} cannot be divided" if kept else "the model has no experts to divide"
            raise ConfigError(
                f"expert_parallel is {self._exchange.ranks}, but {why}: it needs a transformers mixture of experts "
                "without hooks, adapters or torch.compile on the experts, and an optimizer that does not need whole "
                "parameters."
            )

    def _may_be_cut(self, module: nn.Module, cuts_stacks: bool) -> bool:
        """Whether a module is a stack of experts, and the optimizer does not need its parameters whole."""
        return is_expert_stack(module) and (cuts_stacks or not self._trains(module))

    def _trains(self, stack: nn.Module) -> bool:
        return any(id(param) in self._trained for param in stack.parameters(recurse=False))

    def _replace_large(self, model: nn.Module, most_elements: int, most_looked_up: int | None) -> None:
        replaced = {whole for _, whole, _ in self._replaced}
        lookups, names = lookups_in(model), {module: name for name, module in model.named_modules()}
        for module in list(model.modules()):
            weight = module._parameters.get("weight")
            if weight is None or local(weight).numel() <= most_elements:
                continue
            if module in replaced or module not in self._parents:
                continue
            if most_looked_up is not None and module in lookups and weight.numel() > most_looked_up:
                check_lookup(names[module], lookups[module])
                continue
            reasons = (self._stays_whole(user, names[user], weight) for user in self._users[id(weight)])
            reason = next(filter(None, reasons), "")
            if not reason:
                # Such as transformers' for checkpointed models: they run after the forward of the tiles.
                tiled = _with_hooks(self._tiles_of(module, weight, most_elements), module, _FORWARD_HOOKS)
                self._replaced.append((self._parents[module], module, tiled))
            elif isinstance(module, (nn.Linear, nn.Embedding)):
                warnings.warn(f"tile_limit leaves layer {names[module]!r} whole: {reason}.", stacklevel=2)

    def _stays_whole(self, layer: nn.Module, name: str, weight: nn.Parameter) -> str:
        """Why a layer that uses a weight cannot be tiled, or "" if it can."""
        if layer not in self._parents:
            return "it is the model itself"
        if as_dtensor(weight) is not None:
            return "tensor parallelism has divided it, and this rank's part is still larger"
        if _changes_forward(layer):
            return f"{name!r} has hooks before its forward, or a forward of its own"
        if _hooked(layer, _FORWARD_HOOKS):
            return f"{name!r} or one of its parameters has hooks, or is in the graph of an earlier forward"
        is_plain = layer._parameters.get("weight") is weight
        if type(layer) is nn.Embedding:
            is_plain &= layer.max_norm is None and not layer.scale_grad_by_freq and not layer.sparse
        else:
            is_plain &= type(layer) in _LINEARS and weight.layout is torch.strided
        return "" if is_plain else f"{name!r}, a {type(layer).__name__}, may do more with it than multiply or look up"

    def renamed(self, names: Iterable[str]) -> list[str]:
        """The names that parameters have now: a parameter in tiles becomes its parts on this rank."""
        return [new for name in names for new in self._renamed.get(name, [name])]

    def whole(self, param: nn.Parameter) -> tuple[nn.Parameter, int]:
        """The parameter of the untiled model to which `param` belongs, and the index there of the first element of
        `param`."""
        return self._whole.get(id(param), (param, 0))

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Context in which the model is untiled, so that it initialises itself as if it had never been tiled."""
        self.undo()
        try:
            yield
        finally:
            for at, _, made in self._replaced:
                _put(at, made)

    def undo(self) -> None:
        """Put the whole layers back."""
        for at, layer, _ in self._replaced:
            _put(at, layer)

    def _tiles_of(self, layer: nn.Module, weight: nn.Parameter, most_elements: int) -> Tiled:
        rows, width = weight.shape
        cuts_bias = self._in_blocks and getattr(layer, "bias", None) is not None
        blocks = row_blocks(rows, (width, 1) if cuts_bias else (width,), most_elements)
        weights = self._cut("weight", weight, blocks)
        if isinstance(layer, nn.Embedding):
            tiles = [EmbeddingTile(w, at[0], layer.padding_idx) for w, at in zip(weights, blocks, strict=True)]
            return TiledEmbedding(tiles, rows, width).train(layer.training)
        assert isinstance(layer, nn.Linear)
        biases = [None] * len(blocks) if layer.bias is None else self._cut("bias", layer.bias, blocks)
        linear = [LinearTile(w, b, at[0]) for w, b, at in zip(weights, biases, blocks, strict=True)]
        tiled = TiledLinear(linear, width, rows, layer.bias is not None).train(layer.training)
        if isinstance(layer, LateHead):
            defer_logits(tiled)
        return tiled

    def _adapters_of(self, stack: nn.Module) -> list[nn.Module]:
        """peft's adapters around a stack of experts, from the inside: one for each adapted parameter."""
        found: list[nn.Module] = []
        around = self._parents.get(stack, [])
        while len(around) == 1 and adapts_experts(around[0][0], experts_of_stack(stack)):
            found.append(around[0][0])
            around = self._parents[found[-1]]
        return found

    def _is_free(self, experts: nn.Module, compiled: Container[nn.Module], adapters: Sequence[nn.Module] = ()) -> bool:
        """Whether only the layer's own forward, and `adapters` around it, use its experts."""
        held = list(experts.parameters(recurse=False))
        outer = adapters[-1] if adapters else experts
        return (
            experts not in compiled
            and experts in self._parents
            and all(name != _ADAPTED for _, name in self._parents[outer])
            and not _changes_forward(experts)
            and all(self._users[id(param)] == [experts] and as_dtensor(param) is None for param in held)
        )

    def _expert_stack(self, name: str, stack: nn.Module, adapted: bool) -> ExpertStack | None:
        """This rank's tiles of a stack of experts. None if one tile would be the whole stack."""
        params = dict(stack.named_parameters())
        count = experts_of_stack(stack)
        here = self._here(name, count)
        widths = [param.numel() // count for param in params.values()]
        if any(here.start * width % ALIGN_ELEMENTS for width in widths):
            raise ConfigError(
                f"The experts of {name!r} cannot be divided over {count // len(here)} ranks: a rank's part of a "
                f"parameter must start at a multiple of {ALIGN_ELEMENTS} elements."
            )
        most = sum(widths) if self._most_elements is None else self._most_elements
        align = ALIGN_ELEMENTS if self._trains(stack) else 1
        cuts = row_blocks(len(here), widths, most, align)
        blocks = [(here.start + start, here.start + stop) for start, stop in cuts]
        if len(blocks) == 1 and self._exchange is None:
            return None
        cut = [self._cut(short, param, blocks) for short, param in params.items()]
        tiles = {
            start: some_experts(stack, dict(zip(params, parts, strict=True)), adapted)
            for (start, _), *parts in zip(blocks, *cut, strict=True)
        }
        return ExpertStack(tiles, stack, self._exchange).train(stack.training)

    def _switch_experts(self, name: str, experts: nn.Module) -> SwitchExperts:
        """This rank's experts of a Switch Transformer layer."""
        every = dict(experts.named_children())
        here = self._here(name, len(every))
        mine = dict(list(every.items())[here.start : here.stop])
        return SwitchExperts(mine, len(every), self._exchange).train(experts.training)

    def _here(self, name: str, count: int) -> range:
        """The numbers of this rank's experts in a layer."""
        if self._exchange is None:
            return range(count)
        ranks, rank = self._exchange.ranks, self._exchange.rank
        if count % ranks:
            raise ConfigError(f"expert_parallel is {ranks}, which does not divide the {count:,} experts of {name!r}.")
        return range(rank * count // ranks, (rank + 1) * count // ranks)

    def _cut(self, name: str, whole: nn.Parameter, blocks: list[tuple[int, int]]) -> list[nn.Parameter]:
        """Make a parameter for each block of rows. It is a view of the whole parameter."""
        key = id(whole), name
        if key not in self._parts:
            self._parts[key] = []
            values = whole.detach()
            for start, stop in blocks:
                part = nn.Parameter(values[start:stop], whole.requires_grad)
                self._parts[key].append(part)
                self._whole[id(part)] = whole, start * (whole.numel() // len(whole))
        return self._parts[key]


def _changes_forward(layer: nn.Module) -> bool:
    """Whether forward may compute something other than the layer's class says, such as a hook that sets the weight."""
    return bool(layer._forward_pre_hooks) or "forward" in vars(layer)


def _hooked(layer: nn.Module, but: Container[str] = ()) -> bool:
    """Whether a module or one of its own parameters has hooks of the user's, other than those in the attributes
    `but`."""
    hooks = [hook for name in (*_FORWARD_HOOKS, *_OTHER_HOOKS) if name not in but for hook in _hooks_in(layer, name)]
    params = layer.parameters(recurse=False)
    return bool(hooks) or any(p._backward_hooks or p._post_accumulate_grad_hooks or node_is_held(p) for p in params)


def _hooks_in(layer: nn.Module, attribute: str) -> list[Any]:
    held = getattr(layer, attribute)
    hooks = [getattr(hook, "hook", hook) for hook in held.values()] if isinstance(held, dict) else []
    return [hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith("pagoda.")]


def _with_hooks(
    made: nn.Module, layer: nn.Module, names: Iterable[str] = (*_FORWARD_HOOKS, *_OTHER_HOOKS)
) -> nn.Module:
    """Make a module share the hooks of the layer that it replaces, so that their handles remove them from both."""
    for name in names:
        setattr(made, name, getattr(layer, name))
    return made


def _put(parents: list[Parent], module: nn.Module) -> None:
    for parent, name in parents:
        parent._modules[name] = module
