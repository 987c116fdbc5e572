"""Packing: what graphs keep. Of a weight its name, of an activation itself or where its bytes are."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from pagoda.distributed.tensors import Form, local
from pagoda.errors import UsageError
from pagoda.plan.activations import Policy
from pagoda.runtime.accesses import Accesses
from pagoda.runtime.hidden import hidden_class, outside_use
from pagoda.runtime.leases import Leases
from pagoda.runtime.offload import Offloader
from pagoda.runtime.partition import Partitioner
from pagoda.runtime.saved import AbsentTensor, KeptTensor, SavedStorage, SavedStorages, View
from pagoda.runtime.unit import LiveUnit, ShownParameter


class Packed(Protocol):
    """What a graph keeps in place of a tensor."""

    def unpack(self) -> torch.Tensor: ...


class WeightReference(View):
    """What a graph keeps in place of a tensor that lies in a lease."""

    __slots__ = ("_accesses", "_unit", "_version", "device")

    requires_grad = False
    """With shape, dtype and device, what torch's checkpoint asks of what it holds."""

    def __init__(self, accesses: Accesses, unit: LiveUnit, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        self.device = tensor.device
        self._accesses = accesses
        self._unit = unit
        self._version = unit.version
        unit.packed += 1

    def __del__(self) -> None:
        self._unit.packed -= 1

    def unpack(self) -> torch.Tensor:
        """The weight, leased again. Raises UsageError where it was updated since."""
        unit = self._unit
        if unit.version != self._version:
            raise UsageError(
                f"Backward needs the weights of {unit.spec.name!r} as they were in forward (version {self._version}), "
                f"but an update has changed them since (version {unit.version}). Run every backward of a graph before "
                "optimizer.step(); with updates under backward, leave out wrap(accumulation_steps=...) so that they "
                "wait for step()."
            )
        return self.of(self._accesses.read(unit))


class PackedPart:
    """What a graph keeps of a DTensor: what it keeps of this rank's part, and how that is shown."""

    __slots__ = ("_form", "_part", "device", "dtype", "shape")

    requires_grad = False

    def __init__(self, form: Form, tensor: torch.Tensor, part: Packed) -> None:
        self._form = form
        self._part = part
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.device = tensor.device

    def unpack(self) -> torch.Tensor:
        return self._form.around(self._part.unpack())


class ForeignTensor:
    """What a graph keeps of a tensor that hooks of the user's have packed."""

    __slots__ = ("_packed", "_unpack")

    def __init__(self, packed: Any, unpack: Callable[[Any], torch.Tensor]) -> None:
        self._packed = packed
        self._unpack = unpack

    def unpack(self) -> torch.Tensor:
        return self._unpack(self._packed)


References = (WeightReference, PackedPart)
"""What `Packing.reference` gives."""


class Packing:
    """The pair of hooks for `torch.autograd.graph.saved_tensors_hooks`.

    Unpacking is itself the backward access: it leases the unit again, so correctness never depends on a
    backward hook. Hooks hide those around them, so what becomes of activations is decided here too.
    """

    def __init__(
        self,
        leases: Leases,
        accesses: Accesses,
        saved: SavedStorages,
        offloader: Offloader,
        partitioner: Partitioner | None,
        noted: Callable[[SavedStorage], None],
    ) -> None:
        """`noted` is told of every storage that is saved and is not a weight's."""
        self._leases = leases
        self._accesses = accesses
        self._saved = saved
        self._offloader = offloader
        self._partitioner = partitioner
        self._noted = noted
        self.policy: Policy | None = None
        """That of the block whose forward runs; None outside blocks."""
        self._entered: list[tuple[Callable[[torch.Tensor], Packed], Any]] = []
        """The hooks that are active, outermost first, each after what packs for them."""
        self._placeholders: dict[int, str] = {}
        self._buffers: frozenset[int] = frozenset()

    def register(self, units: list[LiveUnit]) -> None:
        """Learn the placeholders, so that saving one names the parameter that was used in the wrong place."""
        self._placeholders = {
            placeholder.untyped_storage()._cdata: unit.name(slot)
            for unit in units
            for slot, placeholder in enumerate(unit.placeholders)
        }

    def leave_alone(self, buffers: Iterable[torch.Tensor]) -> None:
        """Learn the model's buffers: they live anyway, so a graph that saves them keeps nothing."""
        dense = (buffer for buffer in buffers if buffer.layout is torch.strided)
        self._buffers = frozenset(buffer.untyped_storage()._cdata for buffer in dense)

    def enter(self) -> bool:
        """Start packing at a hooked module, if that is not under way; returns whether `leave` must be called.

        Not inside the hooks of a non-reentrant checkpoint, which count the tensors they see: what it recomputes holds
        real views, which pin their lease. Hooks of the user's get all that is no weight: a weight that they kept would
        be a placeholder after the forward.
        """
        top: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        pack: Callable[[torch.Tensor], Packed] = self.pack
        if top is not None:
            if (self._entered and top[0] is self._entered[-1][0]) or _counts_tensors(top[0]):
                return False
            pack = partial(self._pack_inside, *top)
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, self.unpack)
        hooks.__enter__()  # raises where hooks are disabled
        self._entered.append((pack, hooks))
        return True

    def leave(self) -> None:
        """Stop packing."""
        _, hooks = self._entered.pop()
        hooks.__exit__(None, None, None)

    @contextmanager
    def in_block(self, index: int, policy: Policy) -> Iterator[None]:
        """Inside, a block of the forward runs for the first time."""
        self.policy = policy
        if self._partitioner is not None:
            self._partitioner.begin_block(index)
        try:
            yield
        finally:
            self.policy = None

    def _pack_inside(
        self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor], tensor: torch.Tensor
    ) -> Packed:
        """Pack a tensor inside hooks of the user's."""
        reference = self.reference(tensor)
        if reference is not None:
            return reference
        if self._partitioner is not None or (self.policy is not None and self.policy.offloads):
            raise UsageError(
                "Hooks for saved tensors (torch.autograd.graph.saved_tensors_hooks, save_on_cpu, ...) are active "
                "around a forward whose activations wrap(activations=...) offloads or divides: leave one of them out."
            )
        return ForeignTensor(pack(tensor), unpack)

    def pack(self, tensor: torch.Tensor) -> Packed:
        form = Form.of(tensor)
        if form is None:
            return self._pack(tensor, alike=True)
        return PackedPart(form, tensor, self._pack(local(tensor), form.replicated))

    def _pack(self, tensor: torch.Tensor, alike: bool) -> Packed:
        """Pack what this rank has of a tensor; `alike` says whether other ranks may have the same."""
        reference = self._reference(tensor)
        if reference is not None:
            return reference
        storage = self._activation(tensor)
        if storage is None:
            return KeptTensor(tensor)
        if alike and self._partitioner is not None and self.policy is not None and self.policy.recomputes:
            partitioned = self._partitioner.partition(
                tensor, storage, lambda part: self._keep(part, self._saved.find(part))
            )
            if partitioned is not None:
                return AbsentTensor(tensor, partitioned)
        return self._keep(tensor, storage)

    def _keep(self, tensor: torch.Tensor, storage: SavedStorage) -> KeptTensor | AbsentTensor:
        self._saved.count(storage)
        self._noted(storage)
        if self.policy is not None and self.policy.offloads:
            offloaded = self._offloader.offload(tensor, storage)
            if offloaded is not None:
                return AbsentTensor(tensor, offloaded)
        return KeptTensor(tensor)

    def reference(self, tensor: torch.Tensor) -> WeightReference | PackedPart | None:
        """The name of a leased weight; None for what is none. Raises UsageError for a weight that is not leased."""
        form = Form.of(tensor)
        found = self._reference(local(tensor))
        return found if form is None or found is None else PackedPart(form, tensor, found)

    def _reference(self, tensor: torch.Tensor) -> WeightReference | None:
        if not _plain(tensor):
            return None
        address = tensor.untyped_storage()._cdata
        lease = self._leases.find(address)
        if lease is not None:
            return WeightReference(self._accesses, lease.unit, tensor)
        name = self._placeholders.get(address)
        if name is not None:
            raise UsageError(outside_use(name))
        return None

    def count(self, tensor: torch.Tensor) -> SavedStorage | None:
        """Count a tensor that a graph saves and that is no weight; None where that keeps nothing that would not live
        anyway."""
        storage = self._activation(local(tensor))
        if storage is not None:
            self._saved.count(storage)
        return storage

    def _activation(self, tensor: torch.Tensor) -> SavedStorage | None:
        if not _plain(tensor) or tensor.untyped_storage()._cdata in self._buffers:
            return None
        return self._saved.find(tensor)

    def unpack(self, packed: Packed) -> torch.Tensor:
        self._offloader.read_ahead()
        return packed.unpack()


def _counts_tensors(pack: Callable[..., Any]) -> bool:
    """Whether hooks are those of a non-reentrant checkpoint, or of what stands before them in a recomputed block."""
    return getattr(pack, "__module__", None) in ("torch.utils.checkpoint", "pagoda.runtime.recompute")


_PLAIN = (torch.Tensor, nn.Parameter, ShownParameter, hidden_class(torch.Tensor), hidden_class(nn.Parameter))


def _plain(tensor: torch.Tensor) -> bool:
    """Whether its storage is all that a tensor has."""
    return tensor.layout is torch.strided and type(tensor) in _PLAIN
