"""Places for offloaded activations: RAM (if compute has memory of its own) and SSD, with the transfers to and from
them."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from pagoda.memory.page import PageRun, pages_for
from pagoda.memory.pool import PagePool
from pagoda.memory.region import Region
from pagoda.memory.ssd.file import PageFile
from pagoda.memory.ssd.slots import Hashes, PageTable
from pagoda.memory.ssd.striped import StripedFile, portion_of
from pagoda.memory.ssd.xxh3 import hashes_of
from pagoda.plan.activations import offload_room
from pagoda.plan.placement import ACTIVATION_BUFFERS, ACTIVATIONS
from pagoda.plan.tiers import HOST, SSD
from pagoda.runtime.device import Device, Event
from pagoda.runtime.ring import Ring
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
    def write(self, pieces: Pieces, source: torch.Tensor, issued: Event) -> list[Hashes]:
        """Move `source` (uint8, shape [nbytes]) to pieces once compute has passed `issued`. Returns when the move has
        ended, with the hashes that `read` compares."""

    @abstractmethod
    def read(self, pieces: Pieces, hashes: list[Hashes], target: torch.Tensor, issued: Event) -> None:
        """Move the bytes of pieces back to `target`."""

    @abstractmethod
    def close(self) -> None:
        """Return everything to the system."""

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
        hashes = self.write(pieces, sample, issued)
        middle = time.perf_counter()
        self.read(pieces, hashes, sample, issued)
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

    def write(self, pieces: Pieces, source: torch.Tensor, issued: Event) -> list[Hashes]:
        for bank, first, part in self._chunks(pieces, source.nbytes):
            self._device.copy_out(self._bytes(bank, first, part), source[part], issued).synchronize()
        return []

    def read(self, pieces: Pieces, hashes: list[Hashes], target: torch.Tensor, issued: Event) -> None:
        for bank, first, part in self._chunks(pieces, target.nbytes):
            self._device.copy_in(target[part], self._bytes(bank, first, part), issued).synchronize()

    def free(self, pieces: Pieces) -> None:
        super().free(pieces)
        for bank, run in pieces:
            self._banks[bank].part(run).poison()

    def close(self) -> None:
        for bank in self._banks:
            bank.arena.close()

    def _open(self, pages: int) -> bool:
        arena = self._device.host_arena(pages * self.page_bytes)
        self._banks.append(Region.of("activations", arena, self.page_bytes, poison=self._poison))
        return True

    def _bytes(self, bank: int, first: int, part: slice) -> torch.Tensor:
        return self._banks[bank].tensor(torch.uint8, part.stop - part.start, first * self.page_bytes)


class SsdPlace(Place):
    """SSD, through buffers in RAM: unnamed files, striped over the drives, which vanish with the process.

    Every write hashes each page, and every read compares, like `SSDTier`.
    """

    tier = SSD

    def __init__(
        self,
        room_bytes: int,
        page_bytes: int,
        device: Device,
        directories: Mapping[Path, int | None],
        buffers: Sequence[memoryview],
    ) -> None:
        """`directories` maps each directory to its limit in bytes; None means no limit. `buffers` are page-aligned and
        of equal size. Half of them are for writing."""
        super().__init__(room_bytes, page_bytes, device)
        self._directories = tuple(directories)
        self._left = [None if limit is None else limit // page_bytes for limit in directories.values()]
        self._files: list[StripedFile] = []
        self.pass_through(buffers)

    def pass_through(self, buffers: Sequence[memoryview]) -> None:
        """Use these buffers from now on."""
        half = len(buffers) // 2
        self._writing, self._reading = Ring(buffers[:half]), Ring(buffers[half:])
        self._most = buffers[0].nbytes // self.page_bytes
        """Pages of one buffer."""

    def write(self, pieces: Pieces, source: torch.Tensor, issued: Event) -> list[Hashes]:
        hashes = []
        for bank, first, part in self._chunks(pieces, source.nbytes, self._most):
            with self._writing.one() as buffer:
                self._device.copy_out(self._bytes(buffer, part), source[part], issued).synchronize()
                data = self._pages(buffer, part)
                hashes.append(hashes_of(data, self.page_bytes))
                self._files[bank].write(np.arange(first, first + len(hashes[-1])), data)
        return hashes

    def read(self, pieces: Pieces, hashes: list[Hashes], target: torch.Tensor, issued: Event) -> None:
        chunks = self._chunks(pieces, target.nbytes, self._most)
        for (bank, first, part), of_chunk in zip(chunks, hashes, strict=True):
            with self._reading.one() as buffer:
                table = PageTable(np.arange(first, first + len(of_chunk)), of_chunk)
                self._files[bank].read(table, self._pages(buffer, part))
                self._device.copy_in(target[part], self._bytes(buffer, part), issued).synchronize()

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _open(self, pages: int) -> bool:
        portion = portion_of(pages, self._left)
        if portion is None:
            return False
        used = [(directory, count) for directory, count in zip(self._directories, portion, strict=True) if count]
        files = (PageFile(directory, count, self.page_bytes) for directory, count in used)
        self._files.append(StripedFile(files, [[count for _, count in used]]))
        self._left = [None if left is None else left - count for left, count in zip(self._left, portion, strict=True)]
        return True

    def _bytes(self, buffer: memoryview, part: slice) -> torch.Tensor:
        return torch.frombuffer(buffer, dtype=torch.uint8)[: part.stop - part.start]

    def _pages(self, buffer: memoryview, part: slice) -> memoryview:
        return buffer[: pages_for(part.stop - part.start, self.page_bytes) * self.page_bytes]


def open_places(store: Store, device: Device, page: int) -> list[Place]:
    """The places for which the plan has room, in pages of `page` bytes: RAM, unless compute uses it, then SSD."""
    room = _room(store)
    places: list[Place] = []
    if room[HOST] >= page:
        places.append(RamPlace(room[HOST], page, device, store.host.poisoned))
    if room[SSD] >= page:
        places.append(SsdPlace(room[SSD], page, device, store.left_on_drives(), _buffers(store)))
    return places


def follow_plan(places: Sequence[Place], store: Store) -> None:
    """Give places the room and the buffers of the store's plan, which is new. They keep what they hold. Nothing is on
    its way."""
    room = _room(store)
    for place in places:
        place.limit(room[place.tier])
        if isinstance(place, SsdPlace):
            place.pass_through(_buffers(store))


def _room(store: Store) -> dict[str, int]:
    plan = store.plan
    return offload_room(plan.layout, plan.placement, plan.budgets)


def _buffers(store: Store) -> list[memoryview]:
    """Buffers on the way to SSD."""
    pages = store.plan.placement.pages(HOST, ACTIVATIONS) // ACTIVATION_BUFFERS
    return [store.host.take(pages).view() for _ in range(ACTIVATION_BUFFERS)]
