"""Fetches weights from their home to the frames of a lease."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from pagoda.memory.page import pages_for
from pagoda.memory.region import Region
from pagoda.plan.layout import WEIGHT
from pagoda.plan.ops import HOST
from pagoda.plan.placement import FETCH_RING, FETCH_SLOTS
from pagoda.runtime.device import PAST, Device, Event
from pagoda.runtime.lanes import Handle, Lane, all_of
from pagoda.runtime.ring import Ring
from pagoda.runtime.store import Store
from pagoda.runtime.unit import LiveUnit

_PIECE_BYTES = 8 << 20
"""Size of the pieces into which a fetch from SSD to RAM is cut, so that the lane's threads share it."""


class _Part(NamedTuple):
    """Bytes of a lease, and their first byte in an extent or a piece of it."""

    target: torch.Tensor
    start: int


class Fetcher:
    """Fills leases over the lanes.

    There are three ways: RAM to a separate device (h2d); SSD directly to frames in RAM (ssd_read); SSD to a separate
    device through the fetch ring, whose slots pass from ssd_read to h2d and back in order.
    """

    def __init__(self, store: Store, lanes: dict[str, Lane], device: Device) -> None:
        self._store = store
        self._lanes = lanes
        self._device = device
        self._page_bytes = page = store.plan.page_bytes
        pages = store.plan.placement.pages(HOST, FETCH_RING) // FETCH_SLOTS
        self._piece_bytes = page * (pages or pages_for(_PIECE_BYTES, page))
        self._ring = Ring(store.host.take(pages) for _ in range(FETCH_SLOTS if pages else 0))

    def fill(self, unit: LiveUnit, into: torch.Tensor, free: Event, after: tuple[Handle, ...]) -> Handle:
        """Start to bring a unit's weights, or this rank's slice of them, to `into` (uint8, whole pages), once compute
        has passed `free` and `after` have ended."""
        label = f"fetch {unit.spec.name}"
        front = self._store.front[unit.index]
        home = self._store.tensor(unit.index, front)
        is_cut = self._store.shards.is_cut(unit.spec, WEIGHT)
        parts = self._slices(unit, into) if is_cut else [_Part(into, 0)]
        if home is not None:
            extent = home.view(torch.uint8)
            nbytes = sum(part.target.nbytes for part in parts)
            return self._lanes["h2d"].submit(lambda: self._copy(parts, extent, free), after, nbytes, label)
        straight = self._store.plan.budgets.device is None and not is_cut
        fills = []
        for start, held in self._pieces(parts):
            load = partial(self._store.load, unit.index, front, start)
            if straight:
                (piece,) = held
                view = memoryview(piece.target.numpy().data)
                fills.append(self._lanes["ssd_read"].submit(partial(load, view), after, view.nbytes, label))
            else:
                fills.append(self._through_ring(load, held, after, free, label))
        return all_of(fills)

    def _slices(self, unit: LiveUnit, whole: torch.Tensor) -> list[_Part]:
        """This rank's slice of a unit's weights, at its place in the whole."""
        itemsize = self._store.dtype(WEIGHT).itemsize
        return [
            _Part(whole[span.start * itemsize : span.stop * itemsize], span.at * itemsize)
            for span in self._store.shards.spans(unit.spec, WEIGHT)
        ]

    def _pieces(self, parts: Sequence[_Part]) -> Iterator[tuple[int, list[_Part]]]:
        """The pieces of an extent that contain bytes of the parts: the first byte of each piece, and the parts in
        it."""
        end = max((start + target.numel() for target, start in parts), default=0)
        for at in range(0, end, self._piece_bytes):
            held = []
            for target, start in parts:
                first, last = max(at, start), min(at + self._piece_bytes, start + target.numel())
                if first < last:
                    held.append(_Part(target[first - start : last - start], first - at))
            if held:
                yield at, held

    def _through_ring(
        self,
        load: Callable[[memoryview], None],
        parts: Sequence[_Part],
        after: tuple[Handle, ...],
        free: Event,
        label: str,
    ) -> Handle:
        """Bring a piece of an extent, whose first pages `load` reads, to the parts in that piece."""
        taken: list[Region] = []
        nbytes = sum(part.target.numel() for part in parts)
        end = max(start + target.numel() for target, start in parts)
        whole = pages_for(end, self._page_bytes) * self._page_bytes

        def view() -> memoryview:
            return taken[0].view(0, whole)

        def read() -> None:
            taken.append(self._ring.take())
            load(view())

        def copied(_: BaseException | None) -> None:
            for slot in taken:
                self._ring.give_back(slot)

        read_handle = self._lanes["ssd_read"].submit(read, after, nbytes, label)
        handle = self._lanes["h2d"].submit(
            lambda: self._copy(parts, torch.frombuffer(view(), dtype=torch.uint8), free), (read_handle,), nbytes, label
        )
        handle.then(copied)
        return handle

    def _copy(self, parts: Sequence[_Part], source: torch.Tensor, free: Event) -> Event:
        """Start to copy to all parts. Returns the event of the last copy, behind all others."""
        event = PAST
        for target, start in parts:
            event = self._device.copy_in(target, source[start : start + target.numel()], free)
        return event
