"""Copies that state dicts have of values in pages, and writes to them.

In plain PyTorch, a write to a tensor of a state dict writes to the model or to the optimizer. Here it would be lost, so
it is refused before the model is used again, unless the state dict was loaded since. Each copy shares its version
counter with a tensor that holds no memory, which tells even after the copy is gone.
"""

from typing import NamedTuple
from weakref import ref

import torch

from pagoda.errors import UsageError
from pagoda.mesh.dtensors import as_dtensor


class _Copy(NamedTuple):
    """A copy in a state dict."""

    name: str
    tensor: ref[torch.Tensor]
    counter: torch.Tensor
    """An empty tensor with the version counter of the copy."""
    version: int
    """That of the copy when it was made."""


class Copies:
    """The copies that may have been written to."""

    def __init__(self, source: str, instead: str) -> None:
        """`source` has returned them. `instead`: what the user can do, for errors."""
        self._source, self._instead = source, instead
        self._copies: list[_Copy] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """A tensor is handed out, for what `name` says."""
        counter, nothing = tensor.detach(), torch.empty(0, dtype=tensor.dtype)
        if (distributed := as_dtensor(counter)) is not None:
            distributed._local_tensor = nothing
        else:
            counter.set_(nothing)  # type: ignore[call-overload]
        self._copies.append(_Copy(name, ref(tensor), counter, counter._version))

    def forget(self, name: str | None = None) -> None:
        """New values have taken the place of those with a name, or of all."""
        self._copies = [copy for copy in self._copies if name is not None and copy.name != name]

    def check(self) -> None:
        """Raises UsageError, once, if a copy was written to."""
        copies, self._copies = self._copies, []
        for copy in copies:
            if copy.counter._version != copy.version:
                raise UsageError(
                    f"A tensor that {self._source} returned for {copy.name!r} was written to. It is a copy, so nothing "
                    f"else has the new values. {self._instead} To change a state dict for yourself, clone its tensors."
                )
        self._copies = [copy for copy in copies if copy.tensor() is not None]
