"""Places: where offloaded activations are, RAM beside a device of its own and SSD, and how they get there and back."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from pagoda.memory.page import pages_for
from pagoda.memory.scratch import MemoryScratch, Piece, Scratch, SSDScratch
from pagoda.plan.ops import HOST, SSD
from pagoda.plan.placement import ACTIVATION_BUFFERS, ACTIVATIONS
from pagoda.runtime.device import Device, Event
from pagoda.runtime.store import Store

if TYPE_CHECKING:
    from pagoda.runtime.offload import Offloaded


class Buffers:
    """Page-aligned buffers in RAM of equal size, lent one at a time to whatever thread asks."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self.nbytes = views[0].nbytes
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for view in views:
            self._free.put(view)

    @contextmanager
    def one(self) -> Iterator[memoryview]:
        """A buffer, once one is free."""
        view = self._free.get()
        try:
            yield view
        finally:
            self._free.put(view)


class Place(Protocol):
    """Where offloaded bytes are, and how they get there and back. `write` and `read` run on lanes."""

    tier: str
    lanes: tuple[str, str]
    """The lanes that write and read."""

    @property
    def scratch(self) -> Scratch: ...

    def write(self, copy: Offloaded, source: torch.Tensor, issued: Event) -> None:
        """Move `source`, uint8, shape [nbytes], once compute has passed `issued`; returns when that has ended."""

    def read(self, copy: Offloaded, target: torch.Tensor, issued: Event) -> None:
        """Move it back, likewise."""


class RamPlace:
    """RAM beside a device of its own."""

    tier = HOST
    lanes = ("d2h", "h2d")

    def __init__(self, scratch: MemoryScratch, device: Device) -> None:
        self.scratch = scratch
        self._device = device

    def write(self, copy: Offloaded, source: torch.Tensor, issued: Event) -> None:
        for piece, at, nbytes in copy.parts(self.scratch.page_bytes):
            target = self.scratch.tensor(piece)[:nbytes]
            self._device.copy_out(target, source[at : at + nbytes], issued).synchronize()

    def read(self, copy: Offloaded, target: torch.Tensor, issued: Event) -> None:
        for piece, at, nbytes in copy.parts(self.scratch.page_bytes):
            source = self.scratch.tensor(piece)[:nbytes]
            self._device.copy_in(target[at : at + nbytes], source, issued).synchronize()


class SsdPlace:
    """SSD, through buffers in RAM."""

    tier = SSD
    lanes = ("ssd_write", "ssd_read")

    def __init__(self, scratch: SSDScratch, device: Device, writing: Buffers, reading: Buffers) -> None:
        self.scratch = scratch
        self._device = device
        self._writing = writing
        self._reading = reading

    def write(self, copy: Offloaded, source: torch.Tensor, issued: Event) -> None:
        copy.hashes = []
        for piece, first_page, at, nbytes in self._chunks(copy, self._writing):
            with self._writing.one() as view:
                landing = torch.frombuffer(view, dtype=torch.uint8)[:nbytes]
                self._device.copy_out(landing, source[at : at + nbytes], issued).synchronize()
                copy.hashes.append(self.scratch.write(piece, first_page, self._whole(view, nbytes)))

    def read(self, copy: Offloaded, target: torch.Tensor, issued: Event) -> None:
        chunks = self._chunks(copy, self._reading)
        for (piece, first_page, at, nbytes), hashes in zip(chunks, copy.hashes, strict=True):
            with self._reading.one() as view:
                self.scratch.read(piece, first_page, hashes, self._whole(view, nbytes))
                arrived = torch.frombuffer(view, dtype=torch.uint8)[:nbytes]
                self._device.copy_in(target[at : at + nbytes], arrived, issued).synchronize()

    def _chunks(self, copy: Offloaded, buffers: Buffers) -> Iterator[tuple[Piece, int, int, int]]:
        """(piece, its first page, offset in the storage, bytes) of what goes through a buffer at a time."""
        page = self.scratch.page_bytes
        pages = buffers.nbytes // page
        for piece, at, nbytes in copy.parts(page):
            for first in range(0, pages_for(nbytes, page), pages):
                start = first * page
                yield piece, first, at + start, min(pages * page, nbytes - start)

    def _whole(self, view: memoryview, nbytes: int) -> memoryview:
        page = self.scratch.page_bytes
        return view[: pages_for(nbytes, page) * page]


def open_places(
    store: Store, device: Device, directories: Mapping[Path, int | None], page: int, poison: bool
) -> list[Place]:
    """The places that a plan leaves room for, in pages of `page` bytes: RAM, where it is not what compute uses; SSD."""
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
            nbytes = pages // ACTIVATION_BUFFERS * plan.page_bytes
            runs = [store.host.alloc(pages // ACTIVATION_BUFFERS) for _ in range(ACTIVATION_BUFFERS)]
            views = [store.host.view(run, 0, nbytes) for run in runs]
            half = ACTIVATION_BUFFERS // 2
            scratch = SSDScratch(room, page, store.left_on_drives(directories))
            places.append(SsdPlace(scratch, device, Buffers(views[:half]), Buffers(views[half:])))
    return places
