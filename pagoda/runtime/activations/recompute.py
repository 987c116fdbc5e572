"""Recomputing: backward repeats a block's forward, whose buffers, generators and caches must not notice."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from pagoda.runtime.activations.blocks import copied, is_cache
from pagoda.runtime.activations.packing import Note, Packing

_SMALL_BYTES = 1 << 20
"""Up to this size, buffers on an accelerator are kept without comparing them, which would wait for it."""

_Generators = tuple[Any, Any]
"""States of Python's and NumPy's generators."""


def flat(values: Any) -> tuple[list[Any], TreeSpec]:
    """What is in nested tuples, lists and dictionaries, and how to nest it again; other objects stay themselves."""
    return tree_flatten(values, is_leaf=lambda value: type(value) not in (tuple, list, dict))


def run_recomputed(
    module: nn.Module,
    forward: Callable[..., Any],
    again: Callable[..., Any],
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    packing: Packing,
    note: Note,
) -> Any:
    """A block's forward, of which its arguments are saved alone; backward runs `again` in its place, and `note` is told
    what that saves.

    All tensors in the arguments, nested ones too, go to torch's checkpoint flat, so that it saves them through the
    hooks outside.
    """
    leaves, structure = flat(arguments)
    caches = {index: copied(leaf) for index, leaf in enumerate(leaves) if is_cache(leaf)}
    first = FirstForward(module)
    ran = False

    def run(*leaves: Any) -> Any:
        nonlocal ran
        if ran:
            leaves = tuple(copied(caches[i]) if i in caches else leaf for i, leaf in enumerate(leaves))
            args, kwargs = tree_unflatten(leaves, structure)
            with first.again():
                return again(*args, **kwargs)
        ran = True
        args, kwargs = tree_unflatten(leaves, structure)
        output = forward(*args, **kwargs)
        first.ended()
        return output

    contexts = _Packed(packing), _Packed(packing, note)
    return checkpoint(run, *leaves, use_reentrant=False, context_fn=lambda: contexts)


class _Packed:
    """Packs what a checkpoint sees. Entered anew for each recomputation; `note` is told of what that saves."""

    def __init__(self, packing: Packing, note: Note | None = None) -> None:
        self._packing = packing
        self._note = note

    def __enter__(self) -> None:
        self._packing.enter(self._note)

    def __exit__(self, *error: object) -> None:
        self._packing.leave()


class FirstForward:
    """What a block's first forward found: its buffers, and the generators of Python and NumPy.

    torch's checkpoint takes care of torch's own generators, and of nothing else.
    """

    def __init__(self, block: nn.Module) -> None:
        """The forward is about to start."""
        held = [(module, name, buffer) for module in block.modules() for name, buffer in module._buffers.items()]
        copies = {id(buffer): buffer.detach().clone() for _, _, buffer in held if buffer is not None}
        self._found = [(module, name, buffer, copies.get(id(buffer))) for module, name, buffer in held]
        self._versions = [0 if buffer is None else buffer._version for _, _, buffer in held]
        self._generators: _Generators | None = _generators()

    def ended(self) -> None:
        """The forward has ended: forget what it has left alone."""
        self._found = [
            (module, name, buffer, copy)
            for (module, name, buffer, copy), version in zip(self._found, self._versions, strict=True)
            if module._buffers.get(name) is not buffer or not _is_same(buffer, copy, version)
        ]
        if self._generators is not None and _are_equal(self._generators, _generators()):
            self._generators = None

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, the block finds what its first forward found; afterwards all is as it was before."""
        now = [module._buffers.get(name) for module, name, _, _ in self._found]
        generators = _generators()
        found = {id(copy): copy.clone() for _, _, _, copy in self._found if copy is not None}
        for module, name, _, copy in self._found:
            module._buffers[name] = found.get(id(copy))
        if self._generators is not None:
            _set_generators(self._generators)
        try:
            yield
        finally:
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
