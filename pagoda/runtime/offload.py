"""Offloading: saved tensors leave the memory that compute uses, and come back ahead of backward."""

import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch

from pagoda.errors import BudgetError, UsageError
from pagoda.memory.scratch import Piece
from pagoda.memory.sizes import format_bytes
from pagoda.plan.activations import BUFFERED
from pagoda.runtime.device import Device
from pagoda.runtime.lanes import Handle, Lane
from pagoda.runtime.places import Offloaded, Pages, Place
from pagoda.runtime.saved import AbsentTensor, SavedStorage, SavedStorages

_MOST_OF_STORAGE = 8
"""A tensor that is less than one in so many bytes of its storage stays: moving it would move all of that."""
_SAMPLE_BYTES = 16 << 20
"""What is moved to measure how fast a place is."""


class OffloadedTensor(AbsentTensor):
    """What a graph keeps in place of a tensor that was offloaded."""

    __slots__ = ("copy",)

    def __init__(self, tensor: torch.Tensor, copy: Offloaded, position: int) -> None:
        super().__init__(tensor, position)
        self.copy = copy


class Offloader:
    """Moves saved storages out and back, each once however many tensors lie in it.

    At most two of the largest are on their way out, and two on their way back, at a time. Backward uses them in the
    reverse order, so each use of what is at a position has those before it read ahead. Only the compute thread calls
    this class.
    """

    def __init__(
        self,
        places: Sequence[Place],
        least_bytes: int,
        required: bool,
        lanes: dict[str, Lane],
        device: Device,
        saved: SavedStorages,
        stalled: Callable[[str, float], None],
    ) -> None:
        """Storages of `least_bytes` and more go to the first of `places` that has room; `required` makes it an error
        that none has, else they stay."""
        self._places = tuple(places)
        self._required = required
        self._least_bytes = least_bytes
        self._lanes = lanes
        self._device = device
        self._saved = saved
        self._stalled = stalled
        self._order: list[weakref.ref[Offloaded]] = []
        """Copies in the order in which they were made, as far as they are needed."""
        self._freed: deque[Pages] = deque()
        self._closed = False
        self._window = 0
        self._writing: deque[tuple[Handle, int, str]] = deque()
        self._ahead: dict[int, weakref.ref[Offloaded]] = {}
        """Copies that are being read, or have been, and were not used yet."""

    def close(self) -> None:
        """Lanes have ended: what they did not bring back is gone."""
        self._closed = True

    @property
    def position(self) -> int:
        """Copies made so far, of those that are needed."""
        return len(self._order)

    def movable(self, storage: SavedStorage) -> bool:
        return storage.nbytes >= self._least_bytes

    def offload(self, tensor: torch.Tensor, storage: SavedStorage) -> OffloadedTensor | None:
        """Start moving a saved tensor; None where it has to stay."""
        if not self.movable(storage) or tensor.nbytes * _MOST_OF_STORAGE < storage.nbytes:
            return None
        if tensor.device != self._device.torch_device or tensor.is_conj() or tensor.is_neg():
            return None
        if tensor.is_leaf and tensor.requires_grad:
            return None  # the user's: it lives on
        copy = storage.copy() if isinstance(storage.copy, weakref.ref) else None
        if copy is None or storage.version != tensor._version:
            copy = self._move(tensor, storage)
            if copy is None:
                return None
        return OffloadedTensor(tensor, copy, self.position)

    def unpack(self, packed: OffloadedTensor) -> torch.Tensor:
        """The tensor, in the memory that compute uses."""
        if packed.modified:
            raise RuntimeError(modified(packed.shape, packed.version))
        copy = packed.copy
        self._ahead.pop(id(copy), None)
        if copy.tensor is None:
            copy.tensor = copy.source  # still here while it is being written
        if copy.tensor is None:
            self._read(copy)
        if copy.reading is not None:
            self._wait(copy.reading, copy.place.lanes[1])
        assert copy.tensor is not None
        empty = torch.empty(0, dtype=packed.dtype, device=copy.tensor.device)
        return empty.set_(copy.tensor.untyped_storage(), packed.offset, packed.shape, packed.stride)

    def read_ahead(self, position: int) -> None:
        """Backward has come to `position`: read what it will need next."""
        while self._order and self._order[-1]() is None:
            self._order.pop()
        for key in [key for key, copy in self._ahead.items() if copy() is None]:
            del self._ahead[key]
        ahead = sum(copy.nbytes for reference in self._ahead.values() if (copy := reference()) is not None)
        for index in range(min(position, len(self._order)) - 1, -1, -1):
            copy = self._order[index]()
            if copy is None or copy.tensor is not None or copy.source is not None:
                continue
            ahead += copy.nbytes
            if ahead > self._window:
                break
            self._ahead[id(copy)] = self._order[index]
            self._read(copy)

    def settle(self) -> None:
        """Wait until nothing is on its way out, and give pages back. Raises what a transfer raised."""
        self._hold_back(0)
        self._give_back()
        self._order = [reference for reference in self._order if reference() is not None]
        self._window = max((copy.nbytes for r in self._order if (copy := r()) is not None), default=0) * BUFFERED

    def _move(self, tensor: torch.Tensor, storage: SavedStorage) -> Offloaded | None:
        self._give_back()
        place, pieces = self._room_for(storage.nbytes)
        if place is None:
            return None
        with torch.no_grad():
            source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        copy = Offloaded(place, pieces, source, self._freed)
        issued = self._device.fence()
        wanted = weakref.ref(copy)

        def write() -> None:
            copy = wanted()
            if copy is None or copy.source is None:
                return  # the graph is gone
            copy.place.write(copy, copy.source, issued)
            copy.source = None

        lane = place.lanes[0]
        copy.written = self._lanes[lane].submit(write, (), copy.nbytes, "save activation")
        storage.copy, storage.version = wanted, tensor._version
        self._order.append(wanted)
        self._window = max(self._window, BUFFERED * copy.nbytes)
        self._writing.append((copy.written, copy.nbytes, lane))
        del source
        self._hold_back(self._window)
        return copy

    def _room_for(self, nbytes: int) -> tuple[Place | None, tuple[Piece, ...]]:
        for place in self._places:
            pieces = place.scratch.alloc(nbytes)
            if pieces is not None:
                return place, pieces
        if self._required:
            names = " and ".join(place.tier for place in self._places)
            room = sum(place.scratch.room_bytes for place in self._places)
            raise BudgetError(
                f"No room to offload activations: {names} has {format_bytes(room)} beside training state, and "
                f"{format_bytes(nbytes)} more are needed. Raise memory.{self._places[-1].tier}, or use "
                "activations='recompute+offload', which moves the inputs of blocks alone, or 'auto'.",
                tier=self._places[-1].tier,
            )
        return None, ()

    def rates(self) -> list[tuple[float, float]]:
        """(out, back) in bytes per second of each place, measured now, before anything is offloaded; 0 for no room."""
        measured = []
        for place in self._places:
            sample = torch.zeros(min(_SAMPLE_BYTES, place.scratch.room_bytes), dtype=torch.uint8)
            sample = sample.to(self._device.torch_device)
            pieces = place.scratch.alloc(sample.nbytes) if sample.nbytes else None
            if pieces is None:
                measured.append((0.0, 0.0))
                continue
            copy = Offloaded(place, pieces, sample, self._freed)
            issued = self._device.fence()
            start = time.perf_counter()
            place.write(copy, sample, issued)
            middle = time.perf_counter()
            place.read(copy, sample, issued)
            end = time.perf_counter()
            measured.append((sample.nbytes / (middle - start), sample.nbytes / (end - middle)))
            del copy
            self._give_back()
            place.scratch.restart_peak()
        return measured

    def _read(self, copy: Offloaded) -> None:
        if self._closed:
            raise UsageError("Backward needs activations that were offloaded, but the optimizer is closed.")
        target = torch.empty(copy.nbytes, dtype=torch.uint8, device=self._device.torch_device)
        self._saved.add(target)
        issued = self._device.fence()
        lane = copy.place.lanes[1]
        copy.tensor = target
        copy.reading = self._lanes[lane].submit(
            lambda: copy.place.read(copy, target, issued), (copy.written,), copy.nbytes, "return activation"
        )

    def _hold_back(self, most: int) -> None:
        """Wait until at most `most` bytes are on their way out."""
        while self._writing and (self._writing[0][0].done or sum(nbytes for _, nbytes, _ in self._writing) > most):
            handle, _, lane = self._writing.popleft()
            self._wait(handle, lane)

    def _wait(self, handle: Handle, lane: str) -> None:
        if not handle.done:
            start = time.perf_counter()
            handle.wait_until_done()
            self._stalled(lane, time.perf_counter() - start)
        handle.wait()

    def _give_back(self) -> None:
        """Free the pages of copies that are gone."""
        while self._freed:
            place, pieces = self._freed.popleft()
            place.scratch.free(pieces)


def modified(shape: torch.Size, version: int) -> str:
    """The message for a saved tensor that was changed before backward."""
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of "
        f"shape {tuple(shape)} that was saved at version {version}. Do not change it before backward."
    )
