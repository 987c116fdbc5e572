"""Recomputation: backward repeats a block's forward without side effects on buffers, random generators and caches."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from pagoda.autograd.activations.blocks import ModelBlock, copied, is_cache
from pagoda.autograd.activations.packing import Note, Packing

_SMALL_BYTES = 1 << 20
"""Buffers on an accelerator up to this size are restored without a comparison, which would wait for the device."""

_Generators = tuple[Any, Any]
"""States of Python's and NumPy's random generators."""


def flat(values: Any) -> tuple[list[Any], TreeSpec]:
    """Flatten nested tuples, lists and dictionaries. Returns the values and the structure to nest them again."""
    return tree_flatten(values, is_leaf=lambda value: type(value) not in (tuple, list, dict))


def run_recomputed(
    block: ModelBlock,
    forward: Callable[..., Any],
    again: Callable[..., Any],
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    packing: Packing,
    note: Note,
) -> Any:
    """Run a block's forward and save only its arguments. Backward runs `again` in its place, and calls `note` with each
    storage that this saves.

    torch's checkpoint gets all tensors of the arguments as a flat list, nested ones included, so that it saves them
    through the hooks outside.
    """
    leaves, structure = flat(arguments)
    caches = {index: copied(leaf) for index, leaf in enumerate(leaves) if is_cache(leaf)}
    first = FirstForward(block.module)
    of_first: list[Any] = [arguments]  # its own containers, to which it may add

    def run(*leaves: Any) -> Any:
        if not of_first:
            leaves = tuple(copied(caches[i]) if i in caches else _again(block, leaf) for i, leaf in enumerate(leaves))
            args, kwargs = tree_unflatten(leaves, structure)
            with first.again():
                return again(*args, **kwargs)
        args, kwargs = of_first.pop()
        output = forward(*args, **kwargs)
        first.ended()
        packing.keep_inputs()
        return output

    contexts = _PacksCheckpoint(packing, checks=True), _PacksCheckpoint(packing, note)
    return checkpoint(run, *leaves, use_reentrant=False, context_fn=lambda: contexts)


def _again(block: ModelBlock, leaf: Any) -> Any:
    """An argument of a recomputation. A block that changes its inputs gets a copy, as backward may run once more."""
    return leaf.clone() if block.changes_inputs and isinstance(leaf, torch.Tensor) else leaf


@dataclass
class _PacksCheckpoint:
    """Packs the tensors that a checkpoint sees: those of its first forward, or with `note`, those of a recomputation.
    `note` is called with each saved storage."""

    _packing: Packing
    _note: Note | None = None
    checks: bool = False

    def __enter__(self) -> None:
        self._packing.enter(self._note, self.checks)

    def __exit__(self, *error: object) -> None:
        self._packing.leave()


class FirstForward:
    """The state that a block's first forward found: its buffers, the generators of Python and NumPy, and what
    `torch.nn.utils.parametrize.cached()` has cached.

    torch's checkpoint restores torch's own generators, but nothing else.
    """

    def __init__(self, block: nn.Module) -> None:
        """The forward is about to start."""
        held = [(module, name, buffer) for module in block.modules() for name, buffer in module._buffers.items()]
        copies = {id(buffer): buffer.detach().clone() for _, _, buffer in held if buffer is not None}
        self._found = [(module, name, buffer, copies.get(id(buffer))) for module, name, buffer in held]
        self._versions = [0 if buffer is None else buffer._version for _, _, buffer in held]
        self._generators: _Generators | None = _generators()
        self._cached = parametrize._cache_enabled, dict(parametrize._cache)

    def ended(self) -> None:
        """The forward has ended. Forget the buffers that it did not change."""
        self._found = [
            (module, name, buffer, copy)
            for (module, name, buffer, copy), version in zip(self._found, self._versions, strict=True)
            if module._buffers.get(name) is not buffer or not _is_same(buffer, copy, version)
        ]
        if self._generators is not None and _are_equal(self._generators, _generators()):
            self._generators = None

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, the state is as the first forward found it. Afterwards it is as it was before."""
        now = [module._buffers.get(name) for module, name, _, _ in self._found]
        generators = _generators()
        cached = parametrize._cache_enabled, parametrize._cache
        parametrize._cache_enabled, parametrize._cache = self._cached[0], dict(self._cached[1])
        found = {id(copy): copy.clone() for _, _, _, copy in self._found if copy is not None}
        for module, name, _, copy in self._found:
            module._buffers[name] = found.get(id(copy))
        if self._generators is not None:
            _set_generators(self._generators)
        try:
            yield
        finally:
            parametrize._cache_enabled, parametrize._cache = cached
            for (module, name, _, _), buffer in zip(self._found, now, strict=True):
                module._buffers[name] = buffer
            if self._generators is not None:
                _set_generators(generators)


def _is_same(buffer: torch.Tensor | None, copy: torch.Tensor | None, version: int) -> bool:
    """Whether a buffer still has the values of its copy, which was made at a version."""
    if buffer is None or copy is None:
        return True
    if buffer.device.type == "cpu" and buffer.layout is torch.strided:
        return torch.equal(buffer, copy)
    return buffer._version == version and buffer.nbytes > _SMALL_BYTES


def _generators() -> _Generators:
    return random.getstate(), np.random.get_state(legacy=True)


def _set_generators(states: _Generators) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])


def _are_equal(states: _Generators, others: _Generators) -> bool:
    mine, other = states[1], others[1]
    if not isinstance(mine, tuple) or not isinstance(other, tuple):  # of a generator that is not NumPy's default
        return False
    return states[0] == others[0] and mine[2:] == other[2:] and np.array_equal(mine[1], other[1])
