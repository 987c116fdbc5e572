"""Places for offloaded activations: RAM (if compute has memory of its own) and SSD, with the transfers to and from
them."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from pagoda.errors import BudgetError
from pagoda.memory.page import PAGE_ALIGN, PageRun, pages_for
from pagoda.memory.pool import PagePool
from pagoda.memory.region import Region
from pagoda.memory.ssd.tier import SSDTier
from pagoda.plan.activations import LEAST_OFFLOADED_BYTES, offload_room
from pagoda.plan.buffers import ACTIVATION_BUFFERS
from pagoda.plan.placement import ACTIVATIONS
from pagoda.plan.tiers import HOST, SSD
from pagoda.runtime.buffer_pool import BufferPool
from pagoda.runtime.device import Device, Event
from pagoda.runtime.store import Store

_GROWTH_BYTES = 64 << 20
"""The minimum size of a bank, so that there are few banks."""
_SAMPLE_BYTES = 16 << 20
"""Bytes moved to measure the rate of a place."""


class Piece(NamedTuple):
    """Consecutive pages of one bank."""

    bank: int
    run: PageRun


Pieces = tuple[Piece, ...]


class Place(ABC):
    """Pages for offloaded bytes. Their number is unknown before a step runs, so a place grows by one bank when it needs
    more.

    Invariant: `in_use_bytes <= peak_bytes <= capacity_bytes <= room_bytes`. An allocation may consist of several
    pieces, so nothing is lost to fragmentation. `write` and `read` run on lanes, everything else on the compute thread.
    """

    tier: str

    def __init__(self, room_bytes: int, page_bytes: int, device: Device) -> None:
        self.page_bytes = page_bytes
        self.room_bytes = room_bytes // page_bytes * page_bytes
        """The most bytes that it may hold."""
        self.in_use_bytes = 0
        self.peak_bytes = 0
        """The most bytes in use at once so far."""
        self._device = device
        self._pools: list[PagePool] = []
        """By bank, which pages are free."""

    @abstractmethod
    def write(self, pieces: Pieces, source: torch.Tensor, issued: Event) -> None:
        """Move `source` (uint8, shape [nbytes]) to pieces once compute has passed `issued`. Returns when the move has
        ended."""

    @abstractmethod
    def read(self, pieces: Pieces, target: torch.Tensor, issued: Event) -> None:
        """Move the bytes of pieces back to `target`."""

    def close(self) -> None:
        """Return memory to the system. Nothing moves any more."""
        self._pools.clear()

    def limit(self, room_bytes: int) -> None:
        """Hold at most so many bytes from now on, but at least what has been taken from the system already."""
        self.room_bytes = max(room_bytes // self.page_bytes * self.page_bytes, self.capacity_bytes)

    @property
    def capacity_bytes(self) -> int:
        """Bytes taken from the system so far."""
        return sum(pool.frames for pool in self._pools) * self.page_bytes

    def alloc(self, nbytes: int) -> Pieces | None:
        """Allocate pages for `nbytes`. None if there is no room. May raise the errors of opening a bank."""
        left = pages_for(nbytes, self.page_bytes)
        after = self.in_use_bytes + left * self.page_bytes
        if after > self.room_bytes or not self._grow_to(after):
            return None
        pieces = []
        for bank, pool in enumerate(self._pools):
            while left and pool.largest_free:
                run = pool.alloc(min(left, pool.largest_free))
                assert run is not None, "the longest free run is free"
                pieces.append(Piece(bank, run))
                left -= run.count
        self.in_use_bytes = after
        self.peak_bytes = max(self.peak_bytes, after)
        return tuple(pieces)

    def free(self, pieces: Pieces) -> None:
        """Free what `alloc` returned."""
        for piece in pieces:
            self._pools[piece.bank].free(piece.run)
            self.in_use_bytes -= piece.run.count * self.page_bytes

    def rates(self) -> tuple[float, float]:
        """Rates out and back in bytes per second, measured now, before anything is offloaded, while compute waits. 0 if
        there is no room."""
        sample = torch.zeros(min(_SAMPLE_BYTES, self.room_bytes), dtype=torch.uint8).to(self._device.torch_device)
        pieces = self.alloc(sample.nbytes) if sample.nbytes else None
        if pieces is None:
            return 0.0, 0.0
        issued = self._device.fence()
        issued.synchronize()  # or the time would include what compute has queued
        start = time.perf_counter()
        self.write(pieces, sample, issued)
        middle = time.perf_counter()
        self.read(pieces, sample, issued)
        end = time.perf_counter()
        self.free(pieces)
        self.peak_bytes = self.in_use_bytes
        return sample.nbytes / (middle - start), sample.nbytes / (end - middle)

    @abstractmethod
    def _open(self, pages: int) -> bool:
        """Add a bank. Returns False if a limit other than `room_bytes` forbids it."""

    def _grow_to(self, nbytes: int) -> bool:
        """Grow to a capacity of at least `nbytes` by one bank at most. Returns False if a limit forbids it."""
        have = self.capacity_bytes
        if nbytes <= have:
            return True
        usual = min(self.room_bytes - have, max(nbytes - have, have // 2, _GROWTH_BYTES))
        for pages in (usual // self.page_bytes, (nbytes - have) // self.page_bytes):
            if self._open(pages):
                self._pools.append(PagePool(pages))
                return True
        return False

    def _chunks(self, pieces: Pieces, nbytes: int, most: int | None = None) -> Iterator[tuple[int, int, slice]]:
        """(bank, first page in it, slice of the bytes) for each piece, cut to at most `most` pages."""
        at = 0
        for bank, run in pieces:
            step = most or run.count
            for first in range(run.start, run.stop, step):
                end = min(nbytes, at + min(step, run.stop - first) * self.page_bytes)
                yield bank, first, slice(at, end)
                at = end


class RamPlace(Place):
    """RAM, if compute has memory of its own."""

    tier = HOST

    def __init__(self, room_bytes: int, page_bytes: int, device: Device, poison: bool = False) -> None:
        """With `poison`, free pages are filled with NaN."""
        super().__init__(room_bytes, page_bytes, device)
        self._poison = poison
        self._banks: list[Region] = []

    def write(self, pieces: Pieces, source: torch.Tensor, issued: Event) -> None:
        for bank, first, part in self._chunks(pieces, source.nbytes):
            self._device.copy_out(self._bytes(bank, first, part), source[part], issued).synchronize()

    def read(self, pieces: Pieces, target: torch.Tensor, issued: Event) -> None:
        for bank, first, part in self._chunks(pieces, target.nbytes):
            self._device.copy_in(target[part], self._bytes(bank, first, part), issued).synchronize()

    def free(self, pieces: Pieces) -> None:
        super().free(pieces)
        for bank, run in pieces:
            self._banks[bank].part(run).poison()

    def close(self) -> None:
        super().close()
        for bank in self._banks:
            bank.arena.close()

    def _open(self, pages: int) -> bool:
        arena = self._device.host_arena(pages * self.page_bytes)
        self._banks.append(Region.of("activations", arena, self.page_bytes, poison=self._poison))
        return True

    def _bytes(self, bank: int, first: int, part: slice) -> torch.Tensor:
        return self._banks[bank].tensor(torch.uint8, part.stop - part.start, first * self.page_bytes)


class SsdPlace(Place):
    """Pages that are added to the SSD tier, one bank behind the other, through buffers in RAM."""

    tier = SSD

    def __init__(self, room_bytes: int, device: Device, store: Store) -> None:
        super().__init__(room_bytes, store.plan.page_bytes, device)
        self._store = store
        self.take_buffers()

    def take_buffers(self) -> None:
        """Take buffers of the store's plan, which is new. Half of them are for writing."""
        pages = self._store.plan.placement.pages(HOST, ACTIVATIONS) // ACTIVATION_BUFFERS
        buffers = [self._store.host.take(pages).view() for _ in range(ACTIVATION_BUFFERS)]
        half = ACTIVATION_BUFFERS // 2
        self._writing, self._reading, self._most = BufferPool(buffers[:half]), BufferPool(buffers[half:]), pages

    def write(self, pieces: Pieces, source: torch.Tensor, issued: Event) -> None:
        for bank, first, part in self._chunks(pieces, source.nbytes, self._most):
            with self._writing.one() as buffer:
                self._device.copy_out(self._bytes(buffer, part), source[part], issued).synchronize()
                self._ssd.store(self._ssd.added, self._offset(bank, first), self._blocks(buffer, part))

    def read(self, pieces: Pieces, target: torch.Tensor, issued: Event) -> None:
        for bank, first, part in self._chunks(pieces, target.nbytes, self._most):
            with self._reading.one() as buffer:
                self._ssd.load(self._ssd.added, self._offset(bank, first), self._blocks(buffer, part))
                self._device.copy_in(target[part], self._bytes(buffer, part), issued).synchronize()

    @property
    def _ssd(self) -> SSDTier:
        assert self._store.ssd is not None, "the plan has buffers for it"
        return self._store.ssd

    def _open(self, pages: int) -> bool:
        try:
            self._ssd.alloc(pages)
        except BudgetError:
            return False
        return True

    def _offset(self, bank: int, first: int) -> int:
        return (sum(pool.frames for pool in self._pools[:bank]) + first) * self.page_bytes

    def _bytes(self, buffer: memoryview, part: slice) -> torch.Tensor:
        return torch.frombuffer(buffer, dtype=torch.uint8)[: part.stop - part.start]

    def _blocks(self, buffer: memoryview, part: slice) -> memoryview:
        """The bytes of a part in whole blocks of the drive."""
        return buffer[: pages_for(part.stop - part.start, PAGE_ALIGN) * PAGE_ALIGN]


def open_places(store: Store, device: Device) -> list[Place]:
    """The places for which the plan has room: RAM, unless compute uses it, then SSD."""
    page, room = store.plan.page_bytes, _room(store)
    places: list[Place] = []
    if room[HOST] >= (small := min(LEAST_OFFLOADED_BYTES, page)):
        places.append(RamPlace(room[HOST], small, device, store.host.poisoned))
    if room[SSD] >= page:
        places.append(SsdPlace(room[SSD], device, store))
    return places


def follow_plan(places: Sequence[Place], store: Store) -> None:
    """Give places the room and the buffers of the store's plan, which is new. They keep what they hold. Nothing is on
    its way."""
    room = _room(store)
    for place in places:
        place.limit(room[place.tier])
        if isinstance(place, SsdPlace):
            place.take_buffers()


def _room(store: Store) -> dict[str, int]:
    plan = store.plan
    return offload_room(plan.layout, plan.placement, plan.budgets)
