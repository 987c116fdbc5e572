"""Places for offloaded activations: RAM (if compute has memory of its own) and SSD, with the transfers to and from
them."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from pagoda.memory.page import pages_for
from pagoda.memory.scratch import MemoryScratch, Piece, Scratch, SSDScratch
from pagoda.memory.ssd.slots import Hashes
from pagoda.plan.ops import HOST, SSD
from pagoda.plan.placement import ACTIVATION_BUFFERS, ACTIVATIONS
from pagoda.runtime.device import Device, Event
from pagoda.runtime.ring import Ring
from pagoda.runtime.store import Store

_SAMPLE_BYTES = 16 << 20
"""Bytes moved to measure the rate of a place."""


Pieces = tuple[Piece, ...]


class Place(ABC):
    """A place for offloaded bytes. `write` and `read` run on lanes, everything else on the compute thread."""

    tier: str
    scratch: Scratch
    _device: Device

    @abstractmethod
    def write(self, pieces: Pieces, source: torch.Tensor, issued: Event) -> list[Hashes]:
        """Move `source` (uint8, shape [nbytes]) to pieces once compute has passed `issued`. Returns when the move has
        ended, with the hashes that `read` compares."""

    @abstractmethod
    def read(self, pieces: Pieces, hashes: list[Hashes], target: torch.Tensor, issued: Event) -> None:
        """Move the bytes of pieces back to `target`."""

    def rates(self) -> tuple[float, float]:
        """Rates out and back in bytes per second, measured now, before anything is offloaded. 0 if there is no room."""
        sample = torch.zeros(min(_SAMPLE_BYTES, self.scratch.room_bytes), dtype=torch.uint8)
        sample = sample.to(self._device.torch_device)
        pieces = self.scratch.alloc(sample.nbytes) if sample.nbytes else None
        if pieces is None:
            return 0.0, 0.0
        issued = self._device.fence()
        start = time.perf_counter()
        hashes = self.write(pieces, sample, issued)
        middle = time.perf_counter()
        self.read(pieces, hashes, sample, issued)
        end = time.perf_counter()
        self.scratch.free(pieces)
        self.scratch.restart_peak()
        return sample.nbytes / (middle - start), sample.nbytes / (end - middle)

    def _chunks(self, pieces: Pieces, nbytes: int, most: int | None = None) -> Iterator[tuple[Piece, int, slice]]:
        """(piece, first page in it, slice of the bytes) for each piece, cut to at most `most` pages."""
        page, at = self.scratch.page_bytes, 0
        for piece in pieces:
            step = most or piece.run.count
            for first in range(0, piece.run.count, step):
                end = min(nbytes, at + min(step, piece.run.count - first) * page)
                yield piece, first, slice(at, end)
                at = end


class RamPlace(Place):
    """RAM, if compute has memory of its own."""

    tier = HOST

    def __init__(self, scratch: MemoryScratch, device: Device) -> None:
        self.scratch: MemoryScratch = scratch
        self._device = device

    def write(self, pieces: Pieces, source: torch.Tensor, issued: Event) -> list[Hashes]:
        for piece, _, part in self._chunks(pieces, source.nbytes):
            self._device.copy_out(self._bytes(piece, part), source[part], issued).synchronize()
        return []

    def read(self, pieces: Pieces, hashes: list[Hashes], target: torch.Tensor, issued: Event) -> None:
        for piece, _, part in self._chunks(pieces, target.nbytes):
            self._device.copy_in(target[part], self._bytes(piece, part), issued).synchronize()

    def _bytes(self, piece: Piece, part: slice) -> torch.Tensor:
        return self.scratch.tensor(piece)[: part.stop - part.start]


class SsdPlace(Place):
    """SSD, through buffers in RAM."""

    tier = SSD

    def __init__(self, scratch: SSDScratch, device: Device, buffers: Sequence[memoryview]) -> None:
        """`buffers` are page-aligned and of equal size. Half of them are for writing."""
        self.scratch: SSDScratch = scratch
        self._device = device
        half = len(buffers) // 2
        self._writing, self._reading = Ring(buffers[:half]), Ring(buffers[half:])
        self._most = buffers[0].nbytes // scratch.page_bytes
        """Pages of one buffer."""

    def write(self, pieces: Pieces, source: torch.Tensor, issued: Event) -> list[Hashes]:
        hashes = []
        for piece, first_page, part in self._chunks(pieces, source.nbytes, self._most):
            with self._writing.one() as buffer:
                self._device.copy_out(self._bytes(buffer, part), source[part], issued).synchronize()
                hashes.append(self.scratch.write(piece, first_page, self._pages(buffer, part)))
        return hashes

    def read(self, pieces: Pieces, hashes: list[Hashes], target: torch.Tensor, issued: Event) -> None:
        chunks = self._chunks(pieces, target.nbytes, self._most)
        for (piece, first_page, part), of_chunk in zip(chunks, hashes, strict=True):
            with self._reading.one() as buffer:
                self.scratch.read(piece, first_page, of_chunk, self._pages(buffer, part))
                self._device.copy_in(target[part], self._bytes(buffer, part), issued).synchronize()

    def _bytes(self, buffer: memoryview, part: slice) -> torch.Tensor:
        return torch.frombuffer(buffer, dtype=torch.uint8)[: part.stop - part.start]

    def _pages(self, buffer: memoryview, part: slice) -> memoryview:
        page = self.scratch.page_bytes
        return buffer[: pages_for(part.stop - part.start, page) * page]


def open_places(
    store: Store, device: Device, directories: Mapping[Path, int | None], page: int, poison: bool
) -> list[Place]:
    """The places for which the plan has room, in pages of `page` bytes: RAM, unless compute uses it, then SSD."""
    plan = store.plan
    places: list[Place] = []
    if plan.budgets.device is not None:
        room = plan.budgets.host - plan.peak_bytes.get(HOST, 0)
        if room >= page:
            places.append(RamPlace(MemoryScratch(room, page, device.host_arena, poison), device))
    pages = plan.placement.pages(HOST, ACTIVATIONS)
    if pages and plan.budgets.ssd is not None:
        room = plan.budgets.ssd - plan.peak_bytes.get(SSD, 0)
        if room >= page:
            views = [store.host.take(pages // ACTIVATION_BUFFERS).view() for _ in range(ACTIVATION_BUFFERS)]
            scratch = SSDScratch(room, page, store.left_on_drives(directories))
            places.append(SsdPlace(scratch, device, views))
    return places
