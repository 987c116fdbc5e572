"""Batch tiling: a block runs its batch in micro-batches, so that its weights are fetched once for all of them."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from pagoda.errors import ConfigError
from pagoda.plan.batch_tiles import BatchTiles, tile_count
from pagoda.runtime.blocks import Block, find_blocks

Forward = Callable[..., Any]
_SHARED = (bool, int, float, str, torch.dtype, torch.device, Enum, nn.Module, type(None))
"""What each micro-batch can be given as it is: nothing that a forward would write to."""
_SAME = 0.02
"""Largest difference, relative to the norm, of results that are the same but for the order of summation in bf16."""


def blocks_to_tile(model: nn.Module, tiles: BatchTiles) -> list[Block]:
    """The blocks of a model that `tile_batches` is for.

    Raises ConfigError for a count that is none, and for a model without blocks.
    """
    if tiles != "auto" and not (isinstance(tiles, int) and tiles >= 1):
        raise ConfigError(f"batch_tiles is {tiles!r}; it must be at least 1, or 'auto'.")
    blocks = find_blocks(model)
    if not blocks:
        raise ConfigError(
            "batch_tiles needs a model with repeated layers, an nn.ModuleList or nn.Sequential of at least two modules "
            f"of one class with parts; {type(model).__name__} has none. Leave it out."
        )
    return blocks


def tile_batches(blocks: list[Block], tiles: BatchTiles) -> None:
    """Let every block that is being trained run its batch in micro-batches.

    Tensors whose first dimension is that of the block's first input are split and all others shared; outputs are
    rejoined. Before a block's class is tiled with inputs of a new form, two samples are run together and one by one:
    where the results differ, or one of the inputs cannot be shared, the batch is run whole, with a warning.

    The last micro-batch runs first. Backward goes the other way, so a weight's gradient is added up in the order of
    the samples, as by ordinary accumulation of the same micro-batches, and has the same bits where the block's
    kernels give a sample the same bits whatever is beside it.
    """
    tiled = _TiledForward(tiles)
    for block in blocks:
        block.wrap(tiled.run)


@dataclass(frozen=True)
class _Form:
    """How the outputs of calls of one form are rejoined."""

    outputs: TreeSpec
    joined: tuple[bool, ...]
    """Of each leaf of the output: whether it is joined; others are the same for all samples."""


class _Call:
    """The arguments of one call of a block, flat."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.leaves, self.spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]
        first = next((leaf for leaf in tensors if leaf.is_floating_point() and leaf.dim() > 1), None)
        self.batch = 0 if first is None else len(first)
        """Samples; 0 where there is no input to tell."""
        self.tokens = 0 if first is None else first.numel() // max(1, first.shape[-1])
        self.split = tuple(isinstance(x, torch.Tensor) and x.dim() > 0 and len(x) == self.batch for x in self.leaves)

    @property
    def form(self) -> Any:
        """Equal for calls that are split and rejoined alike."""
        kinds = [
            (leaf.dtype, tuple(size == self.batch for size in leaf.shape)) if isinstance(leaf, torch.Tensor) else None
            for leaf in self.leaves
        ]
        return repr(self.spec), tuple(kinds)

    def cut(self, sizes: list[int]) -> list[Callable[[Forward], Any]]:
        """For every part of the batch, `sizes` samples long: what calls a forward with it.

        Each input is split by one operator, whose backward joins the gradients of all parts once.
        """
        parts = [
            torch.unsafe_split_with_sizes(leaf, sizes) if split else [leaf] * len(sizes)
            for leaf, split in zip(self.leaves, self.split, strict=True)
        ]

        def caller(leaves: tuple[Any, ...]) -> Callable[[Forward], Any]:
            args, kwargs = tree_unflatten(leaves, self.spec)
            return lambda forward: forward(*args, **kwargs)

        return [caller(leaves) for leaves in zip(*parts, strict=True)]

    def cannot_share(self) -> str | None:
        for leaf in self.leaves:
            if not isinstance(leaf, (torch.Tensor, *_SHARED)) and not callable(leaf):
                return f"an input is a {type(leaf).__name__}, which micro-batches cannot share"
        return None


class _TiledForward:
    """What blocks run in place of their forward."""

    def __init__(self, tiles: BatchTiles) -> None:
        self._tiles = tiles
        self._forms: dict[Any, _Form | str] = {}
        """(class, form of a call) -> how it is tiled, or why it is not."""

    def run(self, block: Block, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = _Call(args, kwargs)
        count = tile_count(self._tiles, call.batch, call.tokens)
        if count < 2 or not block.module.training:
            return forward(*args, **kwargs)
        key = type(block.module), call.form
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = self._probe(block.module, call, forward)
            if isinstance(form, str):
                warnings.warn(f"{block.name} runs its batch whole: {form}.", stacklevel=2)
        return forward(*args, **kwargs) if isinstance(form, str) else _run_tiled(call, form, forward, count)

    @torch.no_grad()
    def _probe(self, module: nn.Module, call: _Call, forward: Forward) -> _Form | str:
        """How a call is tiled, or why it cannot be: found by running its first two samples."""
        reason = call.cannot_share()
        if reason is None and any(isinstance(part, _BatchNorm) for part in module.modules()):
            reason = "a batch norm takes its statistics from the whole batch"
        if reason is not None:
            return reason
        modes = {part: part.training for part in module.modules()}
        module.eval()  # dropout would differ
        try:
            others = call.batch - 2
            samples = (call.cut([2, others])[0], *call.cut([1, 1, others])[:2])
            both, first, second = (tree_flatten(run(forward)) for run in samples)
        except (RuntimeError, ValueError, IndexError) as error:
            return f"two samples of it cannot be run alone ({str(error).splitlines()[0]})"
        finally:
            for part, mode in modes.items():
                part.training = mode
        if not both[1] == first[1] == second[1]:
            return "its outputs are others for two samples than for one"
        joined = []
        for pair, one, other in zip(both[0], first[0], second[0], strict=True):
            if not isinstance(pair, torch.Tensor):
                if not isinstance(pair, _SHARED) or not pair == one == other:
                    return f"an output is a {type(pair).__name__}, which cannot be rejoined"
                joined.append(False)
            elif pair.dim() and (len(pair), len(one), len(other)) == (2, 1, 1):
                joined.append(True)
                if not _same(pair, torch.cat([one, other])):
                    return "samples are not treated independently"
            elif pair.shape == one.shape == other.shape and _same(pair, one) and _same(pair, other):
                joined.append(False)
            else:
                return "an output is of all samples together"
        return _Form(both[1], tuple(joined))


def _run_tiled(call: _Call, form: _Form, forward: Forward, count: int) -> Any:
    bounds = [tile * call.batch // count for tile in range(count + 1)]
    outputs: list[list[Any]] = []
    for run in reversed(call.cut([stop - start for start, stop in pairwise(bounds)])):
        outputs.insert(0, tree_flatten(run(forward))[0])
    leaves = [
        torch.cat(of_tiles) if joined else of_tiles[0]
        for of_tiles, joined in zip(zip(*outputs, strict=True), form.joined, strict=True)
    ]
    return tree_unflatten(leaves, form.outputs)


def _same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    if not tensor.is_floating_point():
        return torch.equal(tensor, other)
    difference = (tensor.double() - other.double()).norm()
    return bool(difference <= _SAME * other.double().norm())
