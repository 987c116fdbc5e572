"""Offloading: saved storages leave the memory of compute, and come back ahead of backward."""

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from pagoda.autograd.activations.places import Pieces, Place
from pagoda.autograd.activations.saved import AbsentStorage, SavedStorage, SavedStorages, storage_of
from pagoda.errors import BudgetError, UsageError
from pagoda.interrupts import allowed, held_back
from pagoda.memory.arena import FRESH_USE_COUNT, storage_use_count
from pagoda.memory.sizes import format_bytes
from pagoda.plan.activations import BUFFERED, OFFLOAD_LANES
from pagoda.runtime.device import Device
from pagoda.runtime.lanes import Handle, Lane
from pagoda.runtime.meter import StepMeter
from pagoda.schedule.waits import InFlight


@dataclass(eq=False, slots=True)
class OffloadedStorage(AbsentStorage):
    """A storage whose bytes are in a place. Its pages are freed when the last reference is gone, including those of
    transfers."""

    _offloader: "Offloader"
    place: Place
    pieces: Pieces
    nbytes: int
    source: torch.Tensor | None
    """The storage as uint8 of shape [nbytes], until its bytes have been written."""
    target: torch.Tensor | None = None
    """The tensor that the bytes are read into."""
    written: Handle = field(init=False)
    reading: Handle | None = None
    used: bool = False
    """Whether backward has asked for it."""

    def whole(self) -> torch.Tensor:
        return self._offloader.bring_back(self)


class _OffloadedPages(weakref.ref[OffloadedStorage]):
    """A reference to an offloaded storage that knows its pages. Its callback is no function of Python, in which an
    exception of a signal's handler would be lost."""

    __slots__ = ("pieces", "place")
    place: Place
    pieces: Pieces


@dataclass(eq=False, repr=False)
class Offloader:
    """Moves saved storages out and back. Each storage moves once, however many tensors lie in it, and as soon as only
    graphs hold it. So the bytes that move are those that backward would see.

    At most twice the bytes of the largest storage are on their way in each direction. Backward uses storages in reverse
    order, so the one saved last is read first. Only the compute thread calls this class.
    """

    places: Sequence[Place]
    """A storage goes to the first one with enough room."""
    _least_bytes: int
    """Smaller storages stay."""
    _required: bool
    """Whether it is an error if there is no room. Otherwise the storage stays."""
    _lanes: dict[str, Lane]
    _device: Device
    _saved: SavedStorages
    _meter: StepMeter
    freed: deque[_OffloadedPages] = field(default_factory=deque)
    """Pages that nothing needs any more. Appending is atomic, on whatever thread."""
    _in_use: set[_OffloadedPages] = field(default_factory=set)
    """Pages that are not free."""
    _order: list[weakref.ref[OffloadedStorage]] = field(default_factory=list)
    """The offloaded storages that are still needed, in the order in which they were offloaded."""
    _waiting: list[weakref.ref[OffloadedStorage]] = field(default_factory=list)
    """Storages that someone else than graphs holds."""
    _window: int = 0
    """Most bytes on their way in each direction."""
    _closed: bool = False

    def __post_init__(self) -> None:
        self._writing = InFlight[Handle]()

    def offload(self, tensor: torch.Tensor, storage: SavedStorage) -> OffloadedStorage | None:
        """Start to offload the storage of a tensor if it is not offloaded yet. Returns None if it has to stay."""
        return held_back(self._offload, tensor, storage)

    def _offload(self, tensor: torch.Tensor, storage: SavedStorage) -> OffloadedStorage | None:
        if tensor.device != self._device.torch_device or not storage.may_leave(tensor, self._least_bytes):
            return None
        offloaded = storage.absent(OffloadedStorage, tensor._version)
        if offloaded is None:
            place, pieces = self._alloc(storage.nbytes)
            if place is None:
                return None
            source = storage_of(tensor, torch.uint8)
            offloaded = OffloadedStorage(tensor._version, self, place, pieces, source.nbytes, source)
            pages = _OffloadedPages(offloaded, self.freed.append)
            pages.place, pages.pieces = place, pieces
            self._in_use.add(pages)
            storage.replace_by(offloaded)
            self._waiting.append(weakref.ref(offloaded))
        self._write_free()
        return offloaded

    def write_free(self) -> None:
        """Start to write the storages that only graphs hold now. Before that, someone could still write to them where
        autograd does not see it, through `.data`."""
        held_back(self._write_free)

    def _write_free(self) -> None:
        waiting, self._waiting = self._waiting, []
        try:
            while waiting:
                reference = waiting.pop(0)
                offloaded = reference()
                if offloaded is None or offloaded.used:  # backward came first
                    continue
                assert offloaded.source is not None, "it is not written yet"
                if storage_use_count(offloaded.source) <= FRESH_USE_COUNT:
                    self._write(offloaded)
                else:
                    self._waiting.append(reference)
        finally:
            self._waiting += waiting

    def bring_back(self, offloaded: OffloadedStorage) -> torch.Tensor:
        """The storage, in the memory of compute."""
        return held_back(self._bring_back, offloaded)

    def _bring_back(self, offloaded: OffloadedStorage) -> torch.Tensor:
        offloaded.used = True
        if offloaded.target is None:
            offloaded.target = offloaded.source  # still here while it is being written
        if offloaded.target is None:
            offloaded.target = self._read(offloaded)
        if offloaded.reading is not None:
            allowed(self._meter.wait_for, offloaded.reading)
        return offloaded.target

    def read_ahead(self) -> None:
        """Read storages that backward will need next."""
        held_back(self._read_ahead)

    def _read_ahead(self) -> None:
        while self._order and self._order[-1]() is None:
            self._order.pop()
        room = self._window
        for reference in reversed(self._order):
            offloaded = reference()
            if offloaded is None or offloaded.used or offloaded.source is not None:
                continue
            room -= offloaded.nbytes
            if room < 0:
                break
            if offloaded.target is None:
                offloaded.target = self._read(offloaded)

    def settle(self) -> None:
        """Wait until all outgoing transfers have ended, and free pages. Raises their errors."""
        held_back(self._settle)

    def _settle(self) -> None:
        self._write_free()
        self._meter.hold_back(self._writing, 0)  # in the event of a step, of which half is done
        self._take_back()
        live = [(reference, offloaded) for reference in self._order if (offloaded := reference()) is not None]
        self._order = [reference for reference, _ in live]
        self._window = BUFFERED * max((offloaded.nbytes for _, offloaded in live), default=0)

    def close(self) -> None:
        """Free all memory and forget all transfers. Lanes have ended, so what they did not bring back is lost."""
        self._closed = True
        for place in self.places:
            place.close()

    def _alloc(self, nbytes: int) -> tuple[Place | None, Pieces]:
        self._take_back()
        for place in self.places:
            pieces = place.alloc(nbytes)
            if pieces is not None:
                return place, pieces
        if self._required:
            last = self.places[-1].tier
            names = " and ".join(place.tier for place in self.places)
            room = sum(place.room_bytes for place in self.places)
            raise BudgetError(
                f"No room to offload activations: {names} has {format_bytes(room)} left for them, and "
                f"{format_bytes(nbytes)} more are needed. Raise memory.{last}, or use "
                "activations='recompute+offload', which moves the inputs of blocks alone, or 'auto'.",
                tier=last,
            )
        return None, ()

    def _write(self, offloaded: OffloadedStorage) -> None:
        reference, nbytes = weakref.ref(offloaded), offloaded.nbytes
        issued = self._device.fence()

        def write() -> None:
            wanted = reference()
            if wanted is not None and wanted.source is not None:  # else the graph is gone
                wanted.place.write(wanted.pieces, wanted.source, issued)
                wanted.source = None

        lane = self._lanes[OFFLOAD_LANES[offloaded.place.tier][0]]
        offloaded.written = lane.submit(write, (), nbytes, "save activation")
        self._order.append(reference)
        self._writing.add(offloaded.written, nbytes)
        self._window = max(self._window, BUFFERED * nbytes)
        allowed(self._meter.hold_back, self._writing, self._window)

    def _read(self, offloaded: OffloadedStorage) -> torch.Tensor:
        if self._closed:
            raise UsageError("Backward needs activations that were offloaded, but the optimizer is closed.")
        target = torch.empty(offloaded.nbytes, dtype=torch.uint8, device=self._device.torch_device)
        self._saved.count(self._saved.find(target))
        issued = self._device.fence()

        def read() -> None:
            offloaded.place.read(offloaded.pieces, target, issued)

        lane = self._lanes[OFFLOAD_LANES[offloaded.place.tier][1]]
        offloaded.reading = lane.submit(read, (offloaded.written,), offloaded.nbytes, "return activation")
        return target

    def _take_back(self) -> None:
        """Make freed pages available again."""
        while self.freed:
            pages = self.freed.popleft()
            self._in_use.discard(pages)
            pages.place.free(pages.pieces)
