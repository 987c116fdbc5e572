"""Places: where offloaded activations are, RAM beside a device of its own and SSD, and how they get there and back."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from pagoda.memory.page import pages_for
from pagoda.memory.scratch import MemoryScratch, Piece, Scratch, SSDScratch
from pagoda.memory.ssd.slots import Hashes
from pagoda.plan.ops import HOST, SSD
from pagoda.plan.placement import ACTIVATION_BUFFERS, ACTIVATIONS
from pagoda.runtime.device import Device, Event
from pagoda.runtime.lanes import Handle
from pagoda.runtime.ring import Ring
from pagoda.runtime.store import Store


class Offloaded:
    """A storage's bytes elsewhere, for as long as some graph needs them.

    `source` is the storage until its bytes have been written, `tensor` is what they have been read into; both uint8,
    shape [nbytes]. Its pages are free again when the last reference to it is gone, those of transfers included.
    """

    __slots__ = (
        "__weakref__",
        "_freed",
        "hashes",
        "nbytes",
        "pieces",
        "place",
        "reading",
        "source",
        "tensor",
        "written",
    )

    def __init__(self, place: "Place", pieces: tuple[Piece, ...], source: torch.Tensor, freed: "deque[Pages]") -> None:
        self.place = place
        self.pieces = pieces
        self.nbytes = source.nbytes
        self.source: torch.Tensor | None = source
        self.tensor: torch.Tensor | None = None
        self.hashes: list[Hashes] = []
        self.written: Handle
        self.reading: Handle | None = None
        self._freed = freed

    def __del__(self) -> None:
        self._freed.append((self.place, self.pieces))  # atomic, on whatever thread

    def parts(self, page_bytes: int) -> Iterator[tuple[Piece, int, int]]:
        """(piece, offset in the storage, bytes)."""
        at = 0
        for piece in self.pieces:
            nbytes = min(piece.run.count * page_bytes, self.nbytes - at)
            yield piece, at, nbytes
            at += nbytes


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


Pages = tuple[Place, tuple[Piece, ...]]
"""Where pages are, and which."""


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

    def __init__(self, scratch: SSDScratch, device: Device, buffers: Sequence[memoryview]) -> None:
        """`buffers` are page-aligned, of equal size; half of them are for writing."""
        self.scratch = scratch
        self._device = device
        half = len(buffers) // 2
        self._writing, self._reading = Ring(buffers[:half]), Ring(buffers[half:])
        self._pages = buffers[0].nbytes // scratch.page_bytes
        """Of one buffer."""

    def write(self, copy: Offloaded, source: torch.Tensor, issued: Event) -> None:
        copy.hashes = []
        for piece, first_page, at, nbytes in self._chunks(copy):
            with self._writing.one() as view:
                landing = torch.frombuffer(view, dtype=torch.uint8)[:nbytes]
                self._device.copy_out(landing, source[at : at + nbytes], issued).synchronize()
                copy.hashes.append(self.scratch.write(piece, first_page, self._whole(view, nbytes)))

    def read(self, copy: Offloaded, target: torch.Tensor, issued: Event) -> None:
        chunks = self._chunks(copy)
        for (piece, first_page, at, nbytes), hashes in zip(chunks, copy.hashes, strict=True):
            with self._reading.one() as view:
                self.scratch.read(piece, first_page, hashes, self._whole(view, nbytes))
                arrived = torch.frombuffer(view, dtype=torch.uint8)[:nbytes]
                self._device.copy_in(target[at : at + nbytes], arrived, issued).synchronize()

    def _chunks(self, copy: Offloaded) -> Iterator[tuple[Piece, int, int, int]]:
        """(piece, its first page, offset in the storage, bytes) of what goes through a buffer at a time."""
        page = self.scratch.page_bytes
        pages = self._pages
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
            scratch = SSDScratch(room, page, store.left_on_drives(directories))
            places.append(SsdPlace(scratch, device, views))
    return places
