"""Packing: what graphs keep. Of a weight its name, of an activation itself or where it was offloaded to."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from pagoda.errors import UsageError
from pagoda.models.hidden import hidden_class, outside_use
from pagoda.parallel.tensors import Form, local
from pagoda.runtime.accesses import Accesses
from pagoda.runtime.leases import Leases
from pagoda.runtime.offload import OffloadedTensor, Offloader, modified
from pagoda.runtime.partition import PartitionedTensor, Partitioner
from pagoda.runtime.saved import SavedStorage, SavedStorages
from pagoda.runtime.unit import LiveUnit, ShownParameter


class WeightReference:
    """What a graph keeps in place of a tensor that lies in a lease."""

    __slots__ = ("device", "dtype", "offset", "position", "shape", "stride", "unit", "version")

    requires_grad = False
    """With shape, dtype and device, what torch's checkpoint asks of what it holds."""

    def __init__(self, unit: LiveUnit, tensor: torch.Tensor, position: int) -> None:
        self.unit = unit
        self.position = position
        self.version = unit.version
        self.dtype = tensor.dtype
        self.device = tensor.device
        self.offset = tensor.storage_offset()
        self.shape = tensor.shape
        self.stride = tensor.stride()
        unit.packed += 1

    def __del__(self) -> None:
        self.unit.packed -= 1


class KeptTensor:
    """What a graph keeps of a tensor that stays: its value, and the version it was saved at.

    torch compares versions only where there are no hooks, so these do it.
    """

    __slots__ = ("position", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, position: int) -> None:
        self.tensor = tensor.detach()  # the tensor itself could hold the graph that holds this
        self.version = tensor._version
        self.position = position


Kept = KeptTensor | WeightReference | OffloadedTensor
Whole = Kept | PartitionedTensor
"""What a graph keeps of a tensor that one rank has all of."""


class PackedPart:
    """What a graph keeps of a DTensor: what it keeps of this rank's part, and how that is shown."""

    __slots__ = ("device", "dtype", "form", "part", "position", "shape")

    requires_grad = False

    def __init__(self, form: Form, tensor: torch.Tensor, part: Whole) -> None:
        self.form = form
        self.part = part
        self.position = part.position
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.device = tensor.device


class ForeignTensor:
    """What a graph keeps of a tensor that hooks of the user's have packed."""

    __slots__ = ("packed", "unpack")

    def __init__(self, packed: Any, unpack: Callable[[Any], torch.Tensor]) -> None:
        self.packed = packed
        self.unpack = unpack


Packed = Whole | PackedPart | ForeignTensor
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
        offloader: Offloader | None,
        partitioner: Partitioner | None,
    ) -> None:
        self._leases = leases
        self._accesses = accesses
        self._saved = saved
        self._offloader = offloader
        self._partitioner = partitioner
        self.offloading = False
        """Whether what is saved now is to be offloaded."""
        self.noted: Callable[[SavedStorage], None] | None = None
        """Told of every storage that is saved and is not a weight's."""
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

    def _pack_inside(
        self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor], tensor: torch.Tensor
    ) -> Packed:
        """Pack a tensor inside hooks of the user's."""
        reference = self.reference(tensor)
        if reference is not None:
            return reference
        if self.offloading or self._partitioner is not None:
            raise UsageError(
                "Hooks for saved tensors (torch.autograd.graph.saved_tensors_hooks, save_on_cpu, ...) are active "
                "around a forward whose activations wrap(activations=...) offloads or divides: leave one of them out."
            )
        return ForeignTensor(pack(tensor), unpack)

    def pack(self, tensor: torch.Tensor) -> Packed:
        form = Form.of(tensor)
        if form is not None:
            part = local(tensor)
            return PackedPart(form, tensor, self._pack(part) if form.replicated else self._keep(part))
        return self._pack(tensor)

    def _pack(self, tensor: torch.Tensor) -> Whole:
        if self._partitioner is not None and _plain(tensor) and self._reference(tensor) is None:
            storage = self._saved.find(tensor)
            partitioned = self._partitioner.partition(tensor, storage, self._keep, self._position)
            if partitioned is not None:
                return partitioned
        return self._keep(tensor)

    def _keep(self, tensor: torch.Tensor) -> Kept:
        reference = self._reference(tensor)
        if reference is not None:
            return reference
        storage = self.count(tensor)
        if storage is not None:
            if self.noted is not None:
                self.noted(storage)
            if self.offloading and self._offloader is not None:
                offloaded = self._offloader.offload(tensor, storage)
                if offloaded is not None:
                    return offloaded
        return KeptTensor(tensor, self._position)

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
            return WeightReference(lease.unit, tensor, self._position)
        name = self._placeholders.get(address)
        if name is not None:
            raise UsageError(outside_use(name))
        return None

    def count(self, tensor: torch.Tensor) -> SavedStorage | None:
        """Count a tensor that a graph saves; None where that keeps nothing that would not live anyway."""
        tensor = local(tensor)
        if not _plain(tensor):
            return None
        address = tensor.untyped_storage()._cdata
        if address in self._buffers or address in self._placeholders or self._leases.find(address) is not None:
            return None
        return self._saved.add(tensor)

    def unpack(self, packed: Packed) -> torch.Tensor:
        if isinstance(packed, ForeignTensor):
            return packed.unpack(packed.packed)
        if isinstance(packed, PackedPart):
            return packed.form.around(self.unpack(packed.part))
        if isinstance(packed, PartitionedTensor):
            assert self._partitioner is not None
            return self._partitioner.whole(packed, self.unpack(packed.storage.kept))
        if self._offloader is not None:
            self._offloader.read_ahead(packed.position)
        if isinstance(packed, KeptTensor):
            if packed.tensor._version != packed.version:
                raise RuntimeError(modified(packed.tensor.shape, packed.version))
            return packed.tensor
        if isinstance(packed, OffloadedTensor):
            assert self._offloader is not None
            return self._offloader.unpack(packed)
        return self._weight(packed)

    def weight(self, packed: WeightReference | PackedPart) -> torch.Tensor:
        """The weight that a reference names, leased again."""
        if isinstance(packed, PackedPart):
            assert isinstance(packed.part, WeightReference)
            return packed.form.around(self._weight(packed.part))
        return self._weight(packed)

    def _weight(self, packed: WeightReference) -> torch.Tensor:
        unit = packed.unit
        if unit.version != packed.version:
            raise UsageError(
                f"Backward needs the weights of {unit.spec.name!r} as they were in forward (version "
                f"{packed.version}), but an update has changed them since (version {unit.version}). Run every "
                "backward of a graph before optimizer.step(); with updates under backward, leave out "
                "wrap(accumulation_steps=...) so that they wait for step()."
            )
        base = self._accesses.read(unit)
        empty = torch.empty(0, dtype=packed.dtype, device=base.device)
        return empty.set_(base.untyped_storage(), packed.offset, packed.shape, packed.stride)

    @property
    def _position(self) -> int:
        return self._offloader.position if self._offloader is not None else 0


def _counts_tensors(pack: Callable[..., Any]) -> bool:
    """Whether hooks are those of a non-reentrant checkpoint, or of what stands before them in a recomputed block."""
    return getattr(pack, "__module__", None) in ("torch.utils.checkpoint", "pagoda.runtime.activations")


_PLAIN = (torch.Tensor, nn.Parameter, ShownParameter, hidden_class(torch.Tensor), hidden_class(nn.Parameter))


def _plain(tensor: torch.Tensor) -> bool:
    """Whether its storage is all that a tensor has."""
    return tensor.layout is torch.strided and type(tensor) in _PLAIN
