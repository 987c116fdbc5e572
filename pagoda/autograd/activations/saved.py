"""Saved storages: counts what graphs keep for backward, exactly as long as it lives, and packs single tensors."""

import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from pagoda.errors import UsageError

Packed = Callable[[], torch.Tensor]
"""What a graph keeps in place of a tensor. Calling it returns the tensor in the memory of compute."""

_MOST_OF_STORAGE = 8
"""A tensor with less than one in this many bytes of its storage stays, because moving it would move the whole
storage."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class AbsentStorage(ABC):
    """What graphs keep in place of a storage. It lives as long as a graph needs it."""

    version: int
    """Version of the tensor that it was made from."""

    @abstractmethod
    def whole(self) -> torch.Tensor:
        """A tensor in the memory of compute whose storage has all the bytes."""


_Absent = TypeVar("_Absent", bound=AbsentStorage)


class _Address(weakref.ref[Any]):
    """A reference to a storage that knows its address. So its callback need not be a function of Python, in which an
    exception of a signal's handler would be lost."""

    __slots__ = ("address",)
    address: int


@dataclass(eq=False, slots=True)
class SavedStorage:
    """A storage that a block was given or that a graph has saved, as long as the storage lives."""

    nbytes: int
    counted: bool = False
    """Whether a graph has saved it. Only then is it an activation."""
    _alive: "_Address | None" = None
    _absent: "weakref.ref[AbsentStorage] | None" = None

    def may_leave(self, tensor: torch.Tensor, least_bytes: int) -> bool:
        """Whether a graph may keep something else in place of a tensor in this storage."""
        if self.nbytes < least_bytes or tensor.nbytes * _MOST_OF_STORAGE < self.nbytes:
            return False
        is_users = tensor.is_leaf and tensor.requires_grad  # so it lives on
        return not (is_users or tensor.is_conj() or tensor.is_neg())

    def absent(self, kind: type[_Absent], version: int) -> _Absent | None:
        """What a graph keeps in its place, if it is of this kind and was made from this version."""
        found = self._absent() if self._absent is not None else None
        return found if isinstance(found, kind) and found.version == version else None

    def replace_by(self, absent: AbsentStorage) -> None:
        """From now on, graphs keep `absent` in its place."""
        self._absent = weakref.ref(absent)


class SavedStorages:
    """All storages that are saved now, each counted once, and the sum of their bytes.

    Invariant: a storage is in here exactly as long as it lives, so its address identifies it.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        """Most bytes alive at once since `start_step`."""
        self._live_bytes = 0
        self._known: dict[int, SavedStorage] = {}
        self._dead: deque[_Address] = deque()
        """Storages that have died, on any thread. Appending is atomic."""

    def start_step(self) -> None:
        """Restart the peak from the bytes that live now."""
        self._bury()
        self.peak_bytes = self._live_bytes

    def find(self, tensor: torch.Tensor) -> SavedStorage:
        """The storage that a tensor lies in. Counts nothing."""
        self._bury()
        storage = tensor.untyped_storage()
        address = storage._cdata
        found = self._known.get(address)
        if found is None:
            alive = _Address(storage, self._dead.append)
            alive.address = address
            found = self._known[address] = SavedStorage(storage.nbytes(), False, alive)
        return found

    def count(self, storage: SavedStorage) -> None:
        """A graph saves a tensor. Its storage is an activation from now until it dies."""
        if not storage.counted:
            storage.counted = True
            self._live_bytes += storage.nbytes
            self.peak_bytes = max(self.peak_bytes, self._live_bytes)

    def _bury(self) -> None:
        while self._dead:
            dead = self._dead[0]
            found = self._known.get(dead.address)
            if found is not None and found._alive is dead:
                self._live_bytes -= found.nbytes * found.counted
                del self._known[dead.address]
            self._dead.popleft()


def storage_of(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The whole storage of a tensor, flat, as elements of `dtype`."""
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(tensor.untyped_storage())


class View:
    """Offset, shape and stride of a tensor in its storage."""

    __slots__ = ("dtype", "offset", "shape", "stride")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = tensor.dtype
        self.offset = tensor.storage_offset()
        self.shape = tensor.shape
        self.stride = tensor.stride()

    def of(self, base: torch.Tensor) -> torch.Tensor:
        """The tensor with this layout in the storage of `base`."""
        empty = torch.empty(0, dtype=self.dtype, device=base.device)
        return empty.set_(base.untyped_storage(), self.offset, self.shape, self.stride)


def kept(tensor: torch.Tensor, check: "Check | None" = None) -> Packed:
    """Pack a tensor that stays. Calling the result raises RuntimeError if the tensor was changed in the meantime. torch
    compares versions only without hooks."""
    value, check = tensor.detach(), check or unchanged(tensor)  # the tensor itself could hold the graph that holds this

    def unpack() -> torch.Tensor:
        check()
        return value

    return unpack


def moved(tensor: torch.Tensor, storage: AbsentStorage, check: "Check | None" = None) -> Packed:
    """Pack a tensor whose storage is absent. Calling the result raises RuntimeError if the tensor was changed in the
    meantime."""
    view, check = View(tensor), check or unchanged(tensor)

    def unpack() -> torch.Tensor:
        check()
        return view.of(storage.whole())

    return unpack


Check = Callable[[], None]


def unchanged(tensor: torch.Tensor, block: str | None = None) -> Check:
    """A function that raises RuntimeError if a tensor was changed in place after this call. It does not keep the memory
    of a strided, COO or CSR tensor. `block`: the recomputed block whose input the tensor is."""
    version, shape = tensor._version, tuple(tensor.shape)
    counter = tensor.detach()  # shares the tensor's version counter, and below, not its storage
    if tensor.layout is torch.strided:
        counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    elif tensor.is_sparse or tensor.is_sparse_csr:
        counter.data = torch.empty(shape, dtype=tensor.dtype, device=tensor.device, layout=tensor.layout)

    def check() -> None:
        if counter._version == version:
            return
        if block is None:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {shape} that was saved at version {version}. Do not change it before backward."
            )
        raise UsageError(
            f"An input of shape {shape} of the block {block!r} was changed in place before backward, which recomputes "
            "the block from it. Change a copy, or use wrap(activations='keep') or 'offload'."
        )

    return check
