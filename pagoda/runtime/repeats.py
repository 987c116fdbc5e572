"""Repeated forwards: backward repeats that of a block, and its buffers and generators must not notice."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

_SMALL_BYTES = 1 << 20
"""Up to this size, buffers on an accelerator are kept without comparing them, which would wait for it."""

_Generators = tuple[Any, Any]
"""States of Python's and NumPy's generators."""


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
