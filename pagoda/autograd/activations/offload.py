"""Offloading: saved storages leave the memory of compute, and come back ahead of backward."""

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from pagoda.autograd.activations.places import Pieces, Place
from pagoda.autograd.activations.saved import AbsentStorage, SavedStorage, SavedStorages, storage_of
from pagoda.errors import BudgetError, StorageError, UsageError
from pagoda.interrupts import allowed, holding_signals, without_signals
from pagoda.memory.arena import FRESH_USE_COUNT, storage_use_count
from pagoda.memory.sizes import format_bytes
from pagoda.plan.activations import OFFLOAD_LANES
from pagoda.runtime.device import Device
from pagoda.runtime.lanes import Handle, Lane
from pagoda.runtime.meter import StepMeter
from pagoda.schedule.activations import Activation, GraphActivations
from pagoda.schedule.waits import InFlight


@dataclass(eq=False)
class Graph:
    """Lives as long as the graph of a forward of the model. Transfers may keep its activations for longer."""

    activations: GraphActivations[Handle]
    in_backward: bool = False

    def begin_backward(self) -> None:
        """Backward uses the graph."""
        if not self.in_backward:
            self.in_backward = True
            without_signals(self.activations.begin_backward)


@dataclass(eq=False, slots=True)
class OffloadedStorage(AbsentStorage):
    """A storage whose bytes are in a place. Its pages are freed when the last reference is gone, including those of
    transfers."""

    _offloader: "Offloader"
    graph: GraphActivations[Handle]
    """Those of the first graph that saved it."""
    activation: Activation
    place: Place
    pieces: Pieces
    source: torch.Tensor | None
    """The storage as uint8 of shape [nbytes], until all of its bytes have been written."""
    target: torch.Tensor | None = None
    """The tensor that the bytes are read into."""
    reading: Handle | None = None

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
    """Moves saved storages out and back, when `GraphActivations` says. Each storage moves once, however many tensors
    lie in it, and as soon as only graphs hold it. So the bytes that move are those that backward would see.

    Only the compute thread calls this class.
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
    _in_use: dict[_OffloadedPages, Activation] = field(default_factory=dict)
    """Pages that are not free."""
    _waiting: list[_OffloadedPages] = field(default_factory=list)
    """Storages that someone other than graphs held when they were last looked at."""
    _leaving: InFlight[Handle] = field(default_factory=InFlight[Handle])
    _closed: bool = False

    def new_graph(self) -> Graph:
        """The graph of a forward that begins."""
        return Graph(GraphActivations(self._leaving, self._write, self._keep_or_read))

    @holding_signals()
    def offload(self, tensor: torch.Tensor, storage: SavedStorage, graph: Graph) -> OffloadedStorage | None:
        """Start to offload the storage of a tensor, which `graph` saves, if it is not offloaded yet. Returns None if it
        has to stay."""
        if tensor.device != self._device.torch_device or not storage.may_leave(tensor, self._least_bytes):
            return None
        offloaded = storage.absent(OffloadedStorage, tensor._version)
        if offloaded is None:
            place, pieces = self._alloc(storage.nbytes)
            if place is None:
                return None
            activation, source = Activation(storage.nbytes), storage_of(tensor, torch.uint8)
            offloaded = OffloadedStorage(tensor._version, self, graph.activations, activation, place, pieces, source)
            pages = activation.payload = _OffloadedPages(offloaded, self.freed.append)
            pages.place, pages.pieces = place, pieces
            self._in_use[pages] = activation
            graph.activations.save(activation)
            storage.replace_by(offloaded)
            self._waiting.append(pages)
        self.write_free()
        return offloaded

    @holding_signals()
    def write_free(self) -> None:
        """Start to write the storages that only graphs hold now. Before that, someone could still write to them where
        autograd does not see it, through `.data`."""
        waiting, self._waiting = self._waiting, []
        try:
            while waiting:
                reference = waiting.pop(0)
                offloaded = reference()
                if offloaded is None or offloaded.activation.wanted:  # backward came first
                    continue
                assert offloaded.source is not None, "it is not written yet"
                if storage_use_count(offloaded.source) <= FRESH_USE_COUNT:
                    offloaded.graph.leave(offloaded.activation)
                    self._hold_back(offloaded.graph.window)
                else:
                    self._waiting.append(reference)
        finally:
            self._waiting += waiting

    @holding_signals()
    def bring_back(self, offloaded: OffloadedStorage) -> torch.Tensor:
        """The storage, in the memory of compute."""
        self._take_back()
        offloaded.graph.use(offloaded.activation)
        if offloaded.reading is not None:
            allowed(self._meter.wait_for, offloaded.reading)
        assert offloaded.target is not None, "it was kept, or it is read"
        return offloaded.target

    @holding_signals()
    def settle(self) -> None:
        """Wait until all outgoing transfers have ended, and free pages. Raises their errors."""
        self.write_free()
        self._hold_back(0)
        self._take_back()

    def _hold_back(self, most: int) -> None:
        """Wait until at most `most` bytes are on their way. Raises the first error of a write. All writes that fail
        with it are one outage, and their storages stay in the memory of compute."""
        try:
            allowed(self._meter.hold_back, self._leaving, most)
        except StorageError as error:
            more = 0
            for transfer in self._leaving.above(0):
                try:
                    allowed(self._meter.wait_for, transfer)
                except StorageError:
                    more += 1
            if more:
                error.add_note(f"Another {more} of the writes failed with it.")
            raise

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

    def _write(self, activation: Activation) -> Handle:
        reference: _OffloadedPages = activation.payload
        offloaded = reference()
        assert offloaded is not None, "a graph holds it"
        issued = self._device.fence()

        def write() -> None:
            wanted = reference()
            if wanted is not None and wanted.source is not None:  # else the graph is gone
                wanted.place.write(wanted.pieces, wanted.source, issued)
                wanted.source = None

        lane = self._lanes[OFFLOAD_LANES[offloaded.place.tier][0]]
        return lane.submit(write, (), activation.nbytes, "save activation")

    def _keep_or_read(self, activation: Activation) -> None:
        offloaded = activation.payload()
        if offloaded is None:
            return  # its graph is gone
        offloaded.target = offloaded.source  # still here while it is being written
        if offloaded.target is None:
            offloaded.target = self._read(offloaded)

    def _read(self, offloaded: OffloadedStorage) -> torch.Tensor:
        if self._closed:
            raise UsageError("Backward needs activations that were offloaded, but the optimizer is closed.")
        nbytes = offloaded.activation.nbytes
        target = torch.empty(nbytes, dtype=torch.uint8, device=self._device.torch_device)
        self._saved.count(self._saved.find(target))
        issued = self._device.fence()

        def read() -> None:
            offloaded.place.read(offloaded.pieces, target, issued)

        lane = self._lanes[OFFLOAD_LANES[offloaded.place.tier][1]]
        offloaded.reading = lane.submit(read, (), nbytes, "return activation")
        return target

    def _take_back(self) -> None:
        """Make freed pages available again."""
        while self.freed:
            pages = self.freed.popleft()
            self._in_use.pop(pages).over = True
            pages.place.free(pages.pieces)
