"""Leases: weights in compute's memory, for as long as something uses them, and how they get there."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from pagoda.memory.arena import FRESH_USE_COUNT, storage_use_count
from pagoda.memory.page import PageRun, pages_for
from pagoda.memory.region import Region
from pagoda.parameters.unit import LiveUnit
from pagoda.plan.buffers import FETCH_SLOTS
from pagoda.plan.lanes import LaneName
from pagoda.plan.layout import WEIGHT
from pagoda.plan.placement import FETCH_RING, LEASES
from pagoda.plan.tiers import HOST, SSD
from pagoda.runtime.buffer_pool import BufferPool
from pagoda.runtime.device import PAST, Device, Event
from pagoda.runtime.lanes import Handle, Lane, all_of
from pagoda.runtime.store import Store
from pagoda.schedule.operations import Evict, Outdate, Question
from pagoda.schedule.records import Lease
from pagoda.schedule.scheduler import Scheduler

_PIECE_BYTES = 8 << 20
"""Size of the pieces into which a fetch from SSD to RAM is cut, so that the lane's threads share it."""


@dataclass(eq=False, slots=True)
class LeasedWeights:
    """A unit's weights in compute's memory, with a storage object of their own.

    Invariant: every view of the weights outside this class (a parameter's data, a tensor saved for backward) shares
    `base`'s storage. So the storage's use count tells whether the frames may be reused.
    """

    unit: LiveUnit
    base: torch.Tensor
    ready: Handle | None
    """Ends when the weights are there. None if the unit's home itself is leased, where they always are."""

    @property
    def storage(self) -> int:
        """Identity of the storage, as long as the lease lives."""
        return int(self.base.untyped_storage()._cdata)

    @property
    def held(self) -> bool:
        """True while a view of the weights lives outside this class."""
        return storage_use_count(self.base) > FRESH_USE_COUNT


class _Part(NamedTuple):
    """Bytes of a lease, and where they begin in an extent or a piece of it."""

    target: torch.Tensor
    start: int


class Fetcher:
    """The tensors of every lease that the scheduler has asked for.

    If compute can read a unit's home, the unit is leased in place, permanently. All other leases are frames of a
    region, which the scheduler chooses. Each is the payload of the scheduler's lease. `fetch` and `reclaim` are called
    under the driver's lock.
    """

    def __init__(
        self,
        store: Store,
        units: Sequence[LiveUnit],
        device: Device,
        lanes: dict[str, Lane],
        scheduler: Scheduler,
        gather: Callable[[LiveUnit, torch.Tensor, Handle, Event], Handle] | None,
    ) -> None:
        """`gather`, with several ranks: gathers the other ranks' slices of a lease next to this rank's."""
        self._store = store
        self._units = units
        self._device = device
        self._lanes = lanes
        self._scheduler = scheduler
        self._page_bytes = store.plan.page_bytes
        self._gather = gather
        self._freed = PAST
        """The point that compute's queue had reached when frames were last freed. Later work does not read their old
        values."""
        self._by_storage: dict[int, Lease] = {}
        """Identity of a storage -> the lease whose weights lie there, even if it has ended."""
        self._filling: list[tuple[PageRun, Handle]] = []
        """Frames that were given back while they were being filled. The next fetch into them waits for that."""
        self.take_memory()

    def take_memory(self) -> None:
        """Take the frames that the plan has for leases. There are no leases yet."""
        store, plan = self._store, self._store.plan
        frames = 0 if plan.lease_tier is None else plan.placement.pages(plan.lease_tier, LEASES)
        self._region = (store.device or store.host).take(frames)
        pages = plan.placement.pages(HOST, FETCH_RING) // FETCH_SLOTS
        self._piece_bytes = self._page_bytes * (pages or pages_for(_PIECE_BYTES, self._page_bytes))
        self._ring = BufferPool(store.host.take(pages) for _ in range(FETCH_SLOTS if pages else 0))
        in_frames = plan.leased_pages()
        for unit in self._units:
            if unit.index not in in_frames:
                self.lease_in_place(unit)

    def lease_in_place(self, unit: LiveUnit) -> None:
        """Lease a unit in place, in the run that accesses read now. Views of an earlier run may see its contents
        change."""
        scheduled = self._scheduler.lease(unit.index)
        assert scheduled is not None
        base, before = self._store.in_place(unit.index, unit.spec.numel), scheduled.payload
        if before is not None:
            if before.base.data_ptr() == base.data_ptr():
                return
            del self._by_storage[before.storage]
        self._add(scheduled, LeasedWeights(unit, base, None))

    def of(self, unit: LiveUnit) -> LeasedWeights | None:
        """The lease of a unit that has not ended, which may not be ready yet. None if it has none."""
        lease = self._scheduler.lease(unit.index)
        return None if lease is None else lease.payload

    def in_place(self, unit: LiveUnit) -> bool:
        """Whether a unit is leased in its home."""
        lease = self.of(unit)
        return lease is not None and lease.ready is None

    def find(self, storage: int) -> LeasedWeights | None:
        """The lease with this storage, even if it has ended."""
        lease = self._by_storage.get(storage)
        return None if lease is None else lease.payload

    def fetch(self, lease: Lease, unit: LiveUnit, after: Sequence[Handle], source: Callable[[], PageRun]) -> Handle:
        """Start to fill a lease once `after` have ended. `source` says then in which run the weights are."""
        run = lease.run
        dtype, page = self._store.dtype(unit.index, WEIGHT), self._region.page_bytes
        whole_pages = pages_for(unit.spec.numel * dtype.itemsize, page) * page
        self._filling = [(taken, handle) for taken, handle in self._filling if not handle.done]
        earlier = tuple(h for taken, h in self._filling if taken.start < run.stop and run.start < taken.stop)
        frames = self._region.part(run)
        base = frames.tensor(dtype, unit.spec.numel)
        target = frames.tensor(torch.uint8, whole_pages)
        ready = self._fill(unit, target, self._freed, (*after, *earlier), source)
        if self._gather is not None:
            ready = self._gather(unit, frames.tensor(dtype), ready, self._freed)
        self._add(lease, LeasedWeights(unit, base, ready))
        return ready

    def is_free(self, operation: Question, unit: LiveUnit) -> bool:
        """Whether nothing refers to the weights of which a question asks."""
        if isinstance(operation, Evict | Outdate):
            weights: LeasedWeights = operation.lease.payload
            return not weights.held
        lease = self.of(unit)
        return not (unit.packed or unit.active or (lease is not None and lease.held))

    def reclaim(self, operation: Question, unit: LiveUnit) -> bool:
        """Whether nothing refers to the weights of which a question asks. If so, their frames are given back."""
        if not self.is_free(operation, unit):
            return False
        if not isinstance(operation, Evict | Outdate):
            return True
        run, lease = operation.lease.run, operation.lease.payload
        operation.lease.payload = None
        del self._by_storage[lease.storage]
        assert lease.ready is not None
        if lease.ready.done:
            with self._device.as_compute():  # which may still read them, whichever thread this is
                self._region.part(run).poison()
        elif not lease.ready.issued:
            self._filling.append((run, lease.ready))
        self._freed = self._device.fence()
        return True

    @property
    def held(self) -> bool:
        """Whether someone holds weights of a lease, even of one that has ended."""
        return any(lease.payload is not None and lease.payload.held for lease in self._by_storage.values())

    def close(self) -> bool:
        """End every lease. Returns whether someone still holds weights of one."""
        held = self.held
        for lease in self._by_storage.values():
            lease.payload = None
        self._by_storage.clear()
        self._filling.clear()
        return held

    def _add(self, scheduled: Lease, lease: LeasedWeights) -> None:
        scheduled.payload = lease
        self._by_storage[lease.storage] = scheduled

    # --- how weights get there ---

    def _fill(
        self,
        unit: LiveUnit,
        into: torch.Tensor,
        free: Event,
        after: tuple[Handle, ...],
        source: Callable[[], PageRun],
    ) -> Handle:
        """Start to bring a unit's weights, or this rank's slice of them, from a run to `into` (uint8, whole pages),
        once compute has passed `free` and `after` have ended.

        There are three ways: memory to memory (h2d); SSD directly to frames in RAM (ssd_read); SSD through the fetch
        ring, whose slots pass from ssd_read to h2d, to a separate device or to a slice's place in a lease.
        """
        label = f"fetch {unit.spec.name}"
        is_sliced = self._store.shards.is_sliced(unit.spec, WEIGHT)
        parts = self._slices(unit, into) if is_sliced else [_Part(into, 0)]
        if self._store.tier(unit.index, WEIGHT) != SSD:
            nbytes = sum(part.target.nbytes for part in parts)

            def copy() -> Event:
                home = self._store.tensor(unit.index, WEIGHT, source())
                assert home is not None, "it is in memory"
                return self._copy(parts, home.view(torch.uint8), free)

            return self._lanes[LaneName.H2D].submit(copy, after, nbytes, label)
        straight = self._store.plan.budgets.device is None and not is_sliced
        fills = []
        for start, held in self._pieces(parts):
            load = partial(self._load, source, start)
            if straight:
                (piece,) = held
                view = memoryview(piece.target.numpy().data)
                fills.append(self._lanes[LaneName.SSD_READ].submit(partial(load, view), after, view.nbytes, label))
            else:
                fills.append(self._through_ring(load, held, after, free, label))
        return all_of(fills)

    def _load(self, source: Callable[[], PageRun], offset: int, into: memoryview) -> None:
        self._store.load(source(), offset, into)

    def _slices(self, unit: LiveUnit, whole: torch.Tensor) -> list[_Part]:
        """This rank's slice of a unit's weights, at its place in the whole."""
        itemsize = self._store.dtype(unit.index, WEIGHT).itemsize
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

        read_handle = self._lanes[LaneName.SSD_READ].submit(read, after, nbytes, label)
        handle = self._lanes[LaneName.H2D].submit(
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
