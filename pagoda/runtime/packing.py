"""Reference packing: graphs keep the name of a weight, not the weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pagoda.errors import UsageError
from pagoda.plan.trace import Phase

if TYPE_CHECKING:
    from pagoda.runtime.engine import Engine
    from pagoda.runtime.unit import LiveUnit


class WeightReference:
    """What a graph keeps in place of a tensor that lies in a lease."""

    __slots__ = ("dtype", "offset", "shape", "stride", "unit", "version")

    def __init__(self, unit: LiveUnit, tensor: torch.Tensor) -> None:
        self.unit = unit
        self.version = unit.version
        self.dtype = tensor.dtype
        self.offset = tensor.storage_offset()
        self.shape = tensor.shape
        self.stride = tensor.stride()
        unit.packed += 1

    def __del__(self) -> None:
        self.unit.packed -= 1


class Packing:
    """The pair of hooks for `torch.autograd.graph.saved_tensors_hooks`.

    Unpacking is itself the backward access: it leases the unit again, so correctness never depends on a
    backward hook.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._depth = 0
        self._hooks: Any = None
        self._placeholders: dict[int, str] = {}

    def register(self, units: list[LiveUnit]) -> None:
        """Learn the placeholders, so that saving one names the parameter that was used in the wrong place."""
        self._placeholders = {
            placeholder.untyped_storage()._cdata: unit.name(slot)
            for unit in units
            for slot, placeholder in enumerate(unit.placeholders)
        }

    def enter(self) -> bool:
        """Start packing at the outermost hooked module; returns whether `leave` must be called.

        Not inside hooks that are already active, such as those of a non-reentrant checkpoint, which count the tensors
        they see: what it recomputes holds real views, which pin their lease.
        """
        if self._hooks is not None:
            return False
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return False
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
        self._hooks.__enter__()
        return True

    def leave(self) -> None:
        """Stop packing."""
        hooks, self._hooks = self._hooks, None
        hooks.__exit__(None, None, None)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | WeightReference:
        if tensor.layout is not torch.strided:
            return tensor
        storage = tensor.untyped_storage()._cdata
        lease = self._engine.leases.find(storage)
        if lease is not None:
            return WeightReference(lease.unit, tensor)
        name = self._placeholders.get(storage)
        if name is not None:
            raise UsageError(outside_use(name))
        return tensor

    def unpack(self, packed: torch.Tensor | WeightReference) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        unit = packed.unit
        if unit.version != packed.version:
            raise UsageError(
                f"Backward needs the weights of {unit.spec.name!r} as they were in forward (version "
                f"{packed.version}), but an update has changed them since (version {unit.version}). Run every "
                "backward of a graph before optimizer.step(); with updates under backward, leave out "
                "wrap(accumulation_steps=...) so that they wait for step()."
            )
        base = self._engine.acquire(unit, Phase.BACKWARD).base
        empty = torch.empty(0, dtype=packed.dtype, device=base.device)
        return empty.set_(base.untyped_storage(), packed.offset, packed.shape, packed.stride)


def outside_use(name: str) -> str:
    """The message for a parameter read where its unit is not leased."""
    return (
        f"Parameter {name!r} was used outside the forward of the module that holds it, where its weights are not "
        "in memory. Call that module's forward, read the parameter under `with pagoda.gathered([param]):`, or "
        "raise memory.unit_limit so that one unit spans both modules."
    )
