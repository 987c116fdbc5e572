"""Saved storages: what graphs keep for backward, counted for exactly as long as it lives."""

import weakref
from collections import deque

import torch


class SavedStorage:
    """One storage that a block was given or that a graph has saved, as long as the storage lives."""

    __slots__ = ("_alive", "copy", "counted", "given_to", "nbytes", "part", "seen", "version")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.counted = False
        """Whether a graph has saved it, so that it is an activation."""
        self.seen: object = None
        """The forward that has counted it as saved."""
        self.given_to: object = None
        """The forward that has counted it as an argument of a block."""
        self.copy: object = None
        """A weak reference to what holds its bytes elsewhere, if they were offloaded."""
        self.part: object = None
        """A weak reference to what this rank keeps of it, if tensor-parallel ranks have divided it."""
        self.version = 0
        """Version of the tensor that `copy` was made of."""
        self._alive: object = None


class SavedStorages:
    """Every storage that is saved now, once however many tensors lie in it, and the bytes of all.

    Invariant: a storage is known here exactly while it lives, so that its address stands for it.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        """Most bytes that lived at once since `start_step`."""
        self._live_bytes = 0
        self._known: dict[int, SavedStorage] = {}
        self._dead: deque[int] = deque()
        """Storages that have died, on whatever thread: appending is atomic."""

    @property
    def live_bytes(self) -> int:
        """Bytes of the storages that graphs have saved and that live now."""
        self._bury()
        return self._live_bytes

    def start_step(self) -> None:
        self.peak_bytes = self.live_bytes

    def find(self, tensor: torch.Tensor) -> SavedStorage:
        """The storage that a tensor lies in; counts nothing."""
        self._bury()
        storage = tensor.untyped_storage()
        address = storage._cdata
        found = self._known.get(address)
        if found is None:
            found = self._known[address] = SavedStorage(storage.nbytes())
            found._alive = weakref.ref(storage, lambda _: self._dead.append(address))
        return found

    def add(self, tensor: torch.Tensor) -> SavedStorage:
        """A graph saves a tensor: its storage is an activation from now until it dies."""
        found = self.find(tensor)
        if not found.counted:
            found.counted = True
            self._live_bytes += found.nbytes
            self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        return found

    def _bury(self) -> None:
        while self._dead:
            found = self._known.pop(self._dead.popleft())
            if found.counted:
                self._live_bytes -= found.nbytes


class AbsentTensor:
    """What a graph keeps in place of a tensor whose storage is elsewhere: how it lies there, and its version."""

    __slots__ = ("_counter", "dtype", "offset", "position", "shape", "stride", "version")

    def __init__(self, tensor: torch.Tensor, position: int) -> None:
        self.position = position
        self.dtype = tensor.dtype
        self.offset = tensor.storage_offset()
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.version = tensor._version
        # Shares the tensor's version counter, but not its storage.
        self._counter = tensor.detach()
        self._counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    @property
    def modified(self) -> bool:
        """Whether the tensor was changed in place since."""
        return self._counter._version != self.version
