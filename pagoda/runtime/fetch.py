"""Fetching: weights from their home to the frames of a lease."""

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
"""A fetch from SSD into host frames is cut into pieces of about this size, for the lane's threads to share."""


class Fetcher:
    """Fills leases over the lanes.

    Three ways: host RAM to a device of its own (h2d); SSD straight into host frames (ssd_read); SSD to a device of
    its own through the fetch ring, whose slots pass from ssd_read to h2d and back in order.
    """

    def __init__(self, store: Store, lanes: dict[str, Lane], device: Device) -> None:
        self._store = store
        self._lanes = lanes
        self._device = device
        plan = store.plan
        self._separate = plan.budgets.device is not None
        pages = plan.placement.pages(HOST, FETCH_RING)
        self._piece_bytes = (
            pages // FETCH_SLOTS * plan.page_bytes
            if pages
            else pages_for(_PIECE_BYTES, plan.page_bytes) * plan.page_bytes
        )
        self._ring = Ring(store.host.take(pages // FETCH_SLOTS) for _ in range(FETCH_SLOTS if pages else 0))

    def fill(self, unit: LiveUnit, into: torch.Tensor, free: Event, after: tuple[Handle, ...]) -> Handle:
        """Start bringing a unit's weights into `into`, uint8, whole pages long, once compute has passed `free` and
        `after` have ended."""
        label = f"fetch {unit.spec.name}"
        home = self._store.tensor(unit.index, WEIGHT)
        if self._store.shards.is_cut(unit.spec, WEIGHT):
            return self._slice(unit, home, into, after, free, label)
        if home is not None:
            source = home.view(torch.uint8)[: into.numel()]
            return self._lanes["h2d"].submit(
                lambda: self._device.copy_in(into, source, free), after, into.nbytes, label
            )
        pieces = [(at, into[at : at + self._piece_bytes]) for at in range(0, into.nbytes, self._piece_bytes)]
        if self._separate:
            fills = [self._through_ring(unit, [(piece, 0)], at, after, free, label) for at, piece in pieces]
        else:
            fills = [self._straight(unit, memoryview(piece.numpy().data), at, after, label) for at, piece in pieces]
        return all_of(fills)

    def _straight(self, unit: LiveUnit, into: memoryview, at: int, after: tuple[Handle, ...], label: str) -> Handle:
        return self._lanes["ssd_read"].submit(lambda: self._load(unit, at, into), after, into.nbytes, label)

    def _slice(
        self,
        unit: LiveUnit,
        home: torch.Tensor | None,
        into: torch.Tensor,
        after: tuple[Handle, ...],
        free: Event,
        label: str,
    ) -> Handle:
        """This rank's slice of a unit's weights, to where it belongs in the whole."""
        itemsize = self._store.dtype(WEIGHT).itemsize
        parts = [
            (into[span.start * itemsize : span.stop * itemsize], span.at * itemsize)
            for span in self._store.shards.spans(unit.spec, WEIGHT)
        ]
        """(bytes of the whole, byte of the extent at which they begin)"""
        if home is not None:
            extent = home.view(torch.uint8)

            def copy() -> Event:
                copies = [self._device.copy_in(part, extent[at : at + part.numel()], free) for part, at in parts]
                return copies[-1] if copies else PAST

            return self._lanes["h2d"].submit(copy, after, sum(part.nbytes for part, _ in parts), label)
        fills = []
        for at in range(
            0, self._store.plan.layout.pages(unit.spec, WEIGHT) * self._store.plan.page_bytes, self._piece_bytes
        ):
            held = []
            for part, begin in parts:
                first, last = max(at, begin), min(at + self._piece_bytes, begin + part.numel())
                if first < last:
                    held.append((part[first - begin : last - begin], first - at))
            if held:
                fills.append(self._through_ring(unit, held, at, after, free, label))
        return all_of(fills)

    def _through_ring(
        self,
        unit: LiveUnit,
        parts: list[tuple[torch.Tensor, int]],
        at: int,
        after: tuple[Handle, ...],
        free: Event,
        label: str,
    ) -> Handle:
        """Bytes of an extent from `at` on, in whole pages; `parts` are targets, and where their bytes begin therein."""
        taken: list[Region] = []
        nbytes = sum(part.numel() for part, _ in parts)
        page = self._store.plan.page_bytes
        whole = pages_for(max(begin + part.numel() for part, begin in parts), page) * page

        def view() -> memoryview:
            return taken[0].view(0, whole)

        def read() -> None:
            taken.append(self._ring.take())
            self._load(unit, at, view())

        def copy() -> Event:
            piece = torch.frombuffer(view(), dtype=torch.uint8)
            copies = [self._device.copy_in(p, piece[begin : begin + p.numel()], free) for p, begin in parts]
            return copies[-1]

        def copied(_: BaseException | None) -> None:
            for slot in taken:
                self._ring.give_back(slot)

        read_handle = self._lanes["ssd_read"].submit(read, after, nbytes, label)
        handle = self._lanes["h2d"].submit(copy, (read_handle,), nbytes, label)
        handle.then(copied)
        return handle

    def _load(self, unit: LiveUnit, at: int, into: memoryview) -> None:
        run, ssd = self._store.run(unit.index, WEIGHT), self._store.ssd
        assert run is not None
        assert ssd is not None
        ssd.load(run, at, into)
