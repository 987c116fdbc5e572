"""Batch tiling: a block runs its batch in micro-batches, so that its weights are fetched once for all of them.

The user states that blocks treat samples independently. Violations that can be detected are refused.
"""

import inspect
import warnings
from collections.abc import Callable, Sequence
from enum import Enum
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten, tree_unflatten

from pagoda.autograd.activations.blocks import ModelBlock, find_blocks, without_cache
from pagoda.config.training import TileCount
from pagoda.errors import ConfigError, PagodaError
from pagoda.plan.tiles import tile_count

_PACKED = ("cu_seqlens", "cu_seq_lens", "cu_window_seqlens")
"""Names of arguments for the bounds of sequences that lie in one row after another."""
Forward = Callable[..., Any]
_SHARED = (bool, int, float, str, torch.dtype, torch.device, Enum, nn.Module, type(None))
"""Types of arguments that all micro-batches can share, because a forward does not write to them."""


def blocks_to_tile(model: nn.Module, tiles: TileCount) -> list[ModelBlock]:
    """The blocks of a model to which `batch_tiles` applies.

    Raises ConfigError for a model without blocks, and for a fixed count if a block has a batch norm that computes its
    statistics from the batch.
    """
    blocks = find_blocks(model)
    if not blocks:
        raise ConfigError(
            "batch_tiles needs a model with repeated layers, an nn.ModuleList or nn.Sequential of at least two modules "
            f"of one class with submodules; {type(model).__name__} has none. Leave it out."
        )
    for block in blocks:
        reason = _joins_samples(block)
        if reason is not None and tiles not in (1, "auto"):
            raise _refusal(block, reason)
    return blocks


class TiledBlocks:
    """Makes blocks run their batch in micro-batches in training.

    Tensor arguments are split if their first dimension has the size of the first floating-point argument's. All others
    are shared. A tensor output is joined if its first dimension is the number of samples in every micro-batch. Any
    other output must be the same in all micro-batches. Layers of transformers get no key-value cache.

    The last micro-batch runs first. Backward runs in the opposite order, so a weight's gradient is added up in the
    order of the samples, as with ordinary accumulation over the same micro-batches. It has the same bits if the block's
    kernels compute the same bits for a sample in any batch.
    """

    def __init__(self, blocks: list[ModelBlock], tiles: TileCount) -> None:
        self._tiles = tiles
        self._cache_dropped = False
        self.whole: dict[str, str] = {}
        """Block -> the reason why its batch ran whole. Only "auto" allows that."""
        for block in blocks:
            block.wrap(self._run)

    def _run(self, block: ModelBlock, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not block.module.training or self._tiles == 1:
            return forward(*args, **kwargs)
        call = _Call(args, kwargs)
        count = tile_count(self._tiles, call.batch, call.tokens)
        if count < 2 and call.batch:
            return forward(*args, **kwargs)
        call = _Call(args, self._without_cache(block, kwargs))
        reason = _joins_samples(block) or _is_packed(block, args, kwargs) or call.cannot_be_cut()
        if reason is None:
            return _run_tiled(block, call, forward, count)
        if self._tiles != "auto":
            raise _refusal(block, reason)
        if block.name not in self.whole:
            if reason not in self.whole.values():
                warnings.warn(
                    f"batch_tiles='auto' runs the batch of layer {block.name!r} whole: {reason}.", stacklevel=2
                )
            self.whole[block.name] = reason
        return forward(*args, **kwargs)

    def _without_cache(self, block: ModelBlock, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a layer without an empty key-value cache, which one micro-batch would fill for the next."""
        changed = without_cache(block.module, kwargs)
        dropped = [name for name, value in changed.items() if value is None and kwargs[name] is not None]
        if any(_is_filled(kwargs[name]) for name in dropped):
            return kwargs
        if dropped and not self._cache_dropped:
            self._cache_dropped = True
            warnings.warn(
                "With batch_tiles, layers keep no key-value cache in training: set model.config.use_cache = False, "
                "which has the same effect without this warning.",
                stacklevel=2,
            )
        return changed


class _Call:
    """The flattened arguments of one call of a block."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Other containers, such as a cache, are not flattened: each micro-batch would get a new object.
        self.leaves, self.spec = tree_flatten((args, kwargs), is_leaf=lambda x: not isinstance(x, tuple | list | dict))
        tensors = [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]
        self._first = next((leaf for leaf in tensors if leaf.is_floating_point() and leaf.dim() > 1), None)
        first = self._first
        self.batch = 0 if first is None else len(first)
        """Samples in the batch, or 0 if no input shows their number."""
        self.tokens = 0 if first is None else first.numel() // max(1, first.shape[-1])
        self.split = tuple(isinstance(x, torch.Tensor) and x.dim() > 0 and len(x) == self.batch for x in self.leaves)

    def cut(self, sizes: Sequence[int]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """The arguments of a forward for every part of the batch, with `sizes` samples each.

        Each input is split by one operator, whose backward joins the gradients of all parts at once.
        """
        parts = [
            torch.unsafe_split_with_sizes(leaf, sizes) if split else [leaf] * len(sizes)
            for leaf, split in zip(self.leaves, self.split, strict=True)
        ]
        return [tree_unflatten(leaves, self.spec) for leaves in zip(*parts, strict=True)]

    def cannot_be_cut(self) -> str | None:
        """The reason why the arguments cannot be split for micro-batches, or None."""
        if self._first is None:
            return (
                "none of its arguments is a floating-point tensor of at least two dimensions, so the batch is unknown"
            )
        for leaf in self.leaves:
            if not isinstance(leaf, (torch.Tensor, *_SHARED)) and not callable(leaf):
                return f"an argument is a {type(leaf).__name__}, which micro-batches cannot share"
        shape = self._first.shape
        for leaf, split in zip(self.leaves, self.split, strict=True):
            if split and self.batch in shape[1:] and leaf.shape != shape:
                return (
                    f"an argument of shape {tuple(leaf.shape)} may or may not have a row for each of {self.batch} "
                    f"samples, as its input of shape {tuple(shape)} has another dimension of that length (a batch of "
                    "another size shows which)"
                )
        return None


def _run_tiled(block: ModelBlock, call: _Call, forward: Forward, count: int) -> Any:
    """Run a call in `count` micro-batches. Raises ConfigError if these are found to depend on each other."""
    bounds = [tile * call.batch // count for tile in range(count + 1)]
    sizes = [stop - start for start, stop in pairwise(bounds)]
    before = _buffers(block.module)
    try:
        outputs = [tree_flatten(forward(*args, **kwargs)) for args, kwargs in reversed(call.cut(sizes))][::-1]
    except (RuntimeError, ValueError, IndexError, AssertionError) as error:
        if isinstance(error, PagodaError | torch.OutOfMemoryError):
            raise
        raise _refusal(block, f"its forward of {sizes[-1]} of {call.batch} rows failed ({error})") from error
    changed = [name for name, now in _buffers(block.module).items() if not _is_same(before.get(name), now)]
    if changed:
        raise _refusal(block, f"its forward changes the buffer {changed[0]!r}, which each micro-batch would change")
    if any(structure != outputs[0][1] for _, structure in outputs):
        raise _refusal(block, "micro-batches have outputs of different kinds")
    leaves = [_joined(block, parts, sizes) for parts in zip(*(leaves for leaves, _ in outputs), strict=True)]
    return tree_unflatten(leaves, outputs[0][1])


def _joined(block: ModelBlock, parts: tuple[Any, ...], sizes: Sequence[int]) -> Any:
    """Join the parts of one output from all micro-batches."""
    first = parts[0]
    if all(isinstance(part, torch.Tensor) for part in parts):
        if all(part.dim() and len(part) == size for part, size in zip(parts, sizes, strict=True)):
            return torch.cat(parts)
        if all(torch.equal(part, first) for part in parts):
            return first
        raise _refusal(
            block, f"an output of shape {tuple(first.shape)} has no batch dimension, and depends on the batch"
        )
    if isinstance(first, _SHARED) and all(part == first for part in parts):
        return first
    raise _refusal(block, f"an output is a {type(first).__name__}, which micro-batches cannot share")


def _joins_samples(block: ModelBlock) -> str | None:
    """Describe the module of a block that works across the first dimension. None if there is none."""
    for name, module in block.module.named_modules():
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            return (
                f"the batch norm {name!r} takes its statistics from the whole batch (module.eval() makes it use its "
                "running statistics)"
            )
        if isinstance(module, nn.MultiheadAttention | nn.RNNBase) and not module.batch_first:
            return f"{name!r} takes a sequence as the first dimension (batch_first=False)"
    return None


def _is_packed(block: ModelBlock, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Name the argument that says that rows are parts of several sequences or images, which see each other. None if
    there is none."""
    own = list(inspect.signature(type(block.module).forward).parameters)[1:]
    given = {**dict(zip(own, args, strict=False)), **kwargs}
    packed = (name for name, value in given.items() if value is not None and any(part in name for part in _PACKED))
    name = next(packed, None)
    return None if name is None else f"by its argument {name!r}, its rows are parts of sequences which see each other"


def _buffers(module: nn.Module) -> dict[str, tuple[torch.Tensor, int]]:
    """Name -> each buffer, with the number of writes to it."""
    return {name: (buffer, 0 if buffer.is_inference() else buffer._version) for name, buffer in module.named_buffers()}


def _is_same(before: tuple[torch.Tensor, int] | None, now: tuple[torch.Tensor, int]) -> bool:
    return before is not None and before[0] is now[0] and before[1] == now[1]


def _is_filled(cache: Any) -> bool:
    """Whether a key-value cache has entries that attention would read."""
    length = getattr(cache, "get_seq_length", None)
    return length is None or bool(length())


def _refusal(block: ModelBlock, reason: str) -> ConfigError:
    return ConfigError(
        f"The layer {block.name!r} cannot run its batch in micro-batches: {reason}. Leave out batch_tiles. (With "
        "'auto', layers whose arguments or batch norms do not allow it run their batch whole.)"
    )
