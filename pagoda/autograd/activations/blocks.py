"""Blocks: modules that a model repeats, such as its layers. Each block has one policy for its activations."""

from collections import Counter
from collections.abc import Callable, Mapping
from copy import copy
from functools import cache, wraps
from typing import Any, NoReturn

import torch
from torch import nn

from pagoda.autograd.reads import join
from pagoda.errors import UsageError

_CACHES = ("past_key_values", "past_key_value", "layer_past")


class ModelBlock:
    """A module whose activations have one policy."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module
        self.changes_inputs: bool | None = None
        """Whether its forward writes to its inputs, so that recomputation needs copies. None until a recomputed forward
        has shown it."""
        self._name = "forward" if module._compiled_call_impl is None else "_compiled_call_impl"

    def wrap(self, run: Callable[["ModelBlock", Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]) -> None:
        """From now on, each forward of the block calls `run(block, forward, args, kwargs)`."""
        forward, refuse = getattr(self.module, self._name), refusal()

        @wraps(forward)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():
                refuse()
            return run(self, forward, args, kwargs)

        self.module.__dict__[self._name] = wrapped


def find_blocks(model: nn.Module) -> list[ModelBlock]:
    """The outermost modules that a model repeats. They have children, they are in a list, sequence or dictionary, and
    another module of their class is in it too.

    Layers of transformers models count even if there is only one.
    """
    blocks: list[ModelBlock] = []

    def visit(module: nn.Module, name: str) -> None:
        if module._compiled_call_impl is not None:
            return  # nothing can be put around the parts of what is compiled as one
        children = list(module.named_children())
        kinds = Counter(type(child) for _, child in children)
        repeats = isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
        for short, child in children:
            child_name = join(name, short)
            if child in seen:
                continue
            has_parts = any(True for _ in child.children())
            if _is_transformers_layer(child) or (repeats and has_parts and kinds[type(child)] > 1):
                seen.add(child)
                blocks.append(ModelBlock(child_name, child))
            else:
                visit(child, child_name)

    seen: set[nn.Module] = set()
    visit(model, "")
    return blocks


def refuse_own_checkpointing(model: nn.Module) -> None:
    """Raises UsageError for a transformers model that does its own checkpointing."""
    if any(_is_transformers_layer(m) and getattr(m, "gradient_checkpointing", False) for m in model.modules()):
        raise UsageError(
            "The model checkpoints its layers itself, and activations=... would recompute them twice. Leave that out "
            "of wrap or Paging; or call model.gradient_checkpointing_disable(), or with a Trainer set "
            "gradient_checkpointing=False in its arguments. SFTConfig and others of TRL set it by default."
        )


def without_cache(module: nn.Module, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a transformers layer that will be recomputed, without an empty key-value cache, which would only
    keep activations. A cache with contents, such as a trained prefix, stays, because the layer attends to it."""
    changed = dict(kwargs)
    if not _is_transformers_layer(module):
        return changed
    if changed.get("use_cache"):
        changed["use_cache"] = False
    if not getattr(module, "_can_checkpoint_with_cache", False):
        empty = [name for name in _CACHES if not (is_cache(changed.get(name)) and changed[name].get_seq_length())]
        changed.update({name: None for name in empty if changed.get(name) is not None})
    return changed


def is_cache(value: object) -> bool:
    """Whether this is a key-value cache of transformers, to which layers add when they run."""
    return any(kind.__name__ == "Cache" for kind in type(value).__mro__)


def copied(cache: Any) -> Any:
    """A copy of a cache. Layers replace the tensors of a cache, so additions to one of the two do not reach the
    other."""
    made = copy(cache)
    for name, value in vars(cache).items():
        if is_cache(value):
            setattr(made, name, copied(value))
        elif isinstance(value, dict):
            setattr(made, name, dict(value))
        elif isinstance(value, list):
            setattr(made, name, [copy(layer) if hasattr(layer, "keys") else layer for layer in value])
    return made


def _is_transformers_layer(module: nn.Module) -> bool:
    return any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(module).__mro__)


@cache
def refusal() -> Callable[[], NoReturn]:
    """A function that raises UsageError, for code that torch.compile traces, which cannot raise it itself.

    It is made when a model is wrapped, because importing torch's compiler takes longer than importing Pagoda.
    """
    marked: Callable[[], NoReturn] = torch.compiler.disable(  # type: ignore[no-untyped-call]
        _refuse, reason=_COMPILED
    )
    return marked


def _refuse() -> NoReturn:
    raise UsageError(_COMPILED)


_COMPILED = (
    "torch.export, torch.jit.script, torch.jit.trace or torch.compile was called on a wrapped model, a part of it or a "
    "function that runs it. Weights come and go around each forward, which compiled code cannot follow: compile before "
    "wrap() (the model's blocks), and export or trace a model that is not wrapped, with the state_dict() of this one."
)
