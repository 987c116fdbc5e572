"""Leases: weights where compute can reach them, for as long as something uses them."""

from collections.abc import Callable
from math import inf

import torch

from pagoda.memory.arena import FRESH_USE_COUNT, storage_use_count
from pagoda.memory.page import Run
from pagoda.memory.slabs import SlabRegion
from pagoda.runtime.device import PAST, Device, Event
from pagoda.runtime.lanes import Handle
from pagoda.runtime.unit import LiveUnit


class Lease:
    """A unit's weights in memory that compute reads, with a storage object of their own.

    Invariant: every view of the weights outside this class (a parameter's data, a tensor saved for backward)
    shares `base`'s storage, so the storage's use count tells whether the frames may be reused.
    """

    __slots__ = ("awaited", "base", "ready", "run", "unit")

    def __init__(
        self, unit: LiveUnit, base: torch.Tensor, run: Run | None, ready: Handle | None, awaited: bool = False
    ) -> None:
        self.unit = unit
        self.awaited = awaited
        """Whether those who want the frames wait for what fills them, instead of taking others."""
        self.base = base
        self.run = run
        """Frames of the lease; None where the home itself is leased."""
        self.ready = ready

    @property
    def storage(self) -> int:
        """Identity of the storage, for as long as the lease lives."""
        return int(self.base.untyped_storage()._cdata)

    @property
    def held(self) -> bool:
        """True while someone outside keeps a view of the weights alive."""
        return storage_use_count(self.base) > FRESH_USE_COUNT

    @property
    def pinned(self) -> bool:
        """True while the frames cannot be taken: in a forward, to be filled, or held.

        What fills them next follows what fills them now in the device's queue.
        """
        filling = self.ready is not None and not self.ready.issued and not self.awaited
        return self.unit.active > 0 or filling or self.held


class Leases:
    """Every lease there is, and the frames they share.

    Host-resident weights on a machine whose device is host RAM are leased in place, once and for good. All other
    leases take frames of `region`; whoever asks for one gives the prices at which others may be evicted. Only the
    compute thread calls this class.
    """

    def __init__(
        self,
        region: SlabRegion | None,
        pages: dict[int, int],
        dtype: torch.dtype,
        device: Device,
        fill: Callable[[LiveUnit, torch.Tensor, Event], Handle],
        awaited: bool = False,
    ) -> None:
        """`awaited`: which frames are taken must not depend on how fast others were filled, because ranks that decide
        alike fetch alike, and need not ask each other for what only one of them wants."""
        self._awaited = awaited
        self.region = region
        self._pages = pages
        self._dtype = dtype
        self._device = device
        self._fill = fill
        """Starts filling a lease's frames from the home of the weights, once compute has passed an event."""
        self._freed = PAST
        """What compute had been given when frames were last freed: nothing after it reads their old values."""
        self._leases: dict[int, Lease] = {}
        self._by_run: dict[int, Lease] = {}
        self._by_storage: dict[int, Lease] = {}
        self._stale: list[Lease] = []
        """Leases whose weights have changed at home but whose old values are still held."""

    def add_home(self, unit: LiveUnit, base: torch.Tensor) -> None:
        """Lease a unit in place, for good."""
        self._register(Lease(unit, base, None, None))

    def move_home(self, unit: LiveUnit, base: torch.Tensor) -> None:
        """Lease a unit in another place from now on; whatever still holds the old one may see it change."""
        del self._by_storage[self._leases[unit.index].storage]
        self.add_home(unit, base)

    def get(self, unit: LiveUnit) -> Lease | None:
        """The unit's current lease, ready or on its way."""
        return self._leases.get(unit.index)

    def find(self, storage: int) -> Lease | None:
        """The lease whose storage this is, stale ones included."""
        return self._by_storage.get(storage)

    def fetch(self, unit: LiveUnit, price: Callable[[LiveUnit], float]) -> Lease | None:
        """Start fetching a unit that has no lease, or None when frames cannot be had.

        `price` is what evicting another unit costs (`inf` forbids it); the cheapest window is cleared.
        """
        assert self.region is not None, "a unit without a home in compute's reach has a region for its lease"
        self._collect()
        count = self._pages[unit.index]
        run = self.region.pool.alloc(count)
        if run is None:
            victims = self.region.pool.cheapest_window(count, lambda other: self._price(other, price))
            if victims is None:
                return None
            for victim in victims:
                self.drop(self._by_run[victim.start].unit)
            run = self.region.pool.alloc(count)
            assert run is not None, "the window that was freed is contiguous"
        nbytes = unit.spec.numel * self._dtype.itemsize
        whole_pages = -(-nbytes // self.region.page_bytes) * self.region.page_bytes
        with torch.inference_mode(False):  # a lease may outlive the inference that asked for it
            base = self.region.tensor(run, self._dtype, unit.spec.numel)
            target = self.region.tensor(run, torch.uint8, whole_pages)
            try:
                ready = self._fill(unit, target, self._freed)
            except BaseException:  # of an update that the fetch waits for
                self.region.free(run)
                raise
        lease = Lease(unit, base, run, ready, self._awaited)
        self._register(lease)
        return lease

    def evict(self, unit: LiveUnit) -> None:
        """Free a unit's frames if nothing uses them."""
        lease = self._leases.get(unit.index)
        if lease is not None and lease.run is not None and not lease.pinned:
            self.drop(unit)

    def drop(self, unit: LiveUnit) -> None:
        """End a unit's lease; frames whose old values are still held are freed later. Leases in place stay."""
        lease = self._leases.get(unit.index)
        if lease is None or lease.run is None:
            return
        del self._leases[unit.index]
        self._stale.append(lease)
        self._collect()

    def fetches(self) -> list[Handle]:
        """What fills, or has filled, the frames in use; those of ended leases too, which are free only afterwards."""
        leases = [*self._leases.values(), *self._stale]
        return [lease.ready for lease in leases if lease.ready is not None]

    def holders(self) -> list[str]:
        """Names of the units whose frames cannot be taken now, for error messages."""
        leases = [*self._leases.values(), *self._stale]
        return [lease.unit.spec.name for lease in leases if lease.run is not None and lease.pinned]

    def close(self) -> bool:
        """End every lease; returns whether someone still holds weights of one."""
        held = any(lease.held for lease in (*self._leases.values(), *self._stale))
        self._leases.clear()
        self._by_run.clear()
        self._by_storage.clear()
        self._stale.clear()
        return held

    def _price(self, run: Run, price: Callable[[LiveUnit], float]) -> float | None:
        lease = self._by_run[run.start]
        if self._leases.get(lease.unit.index) is not lease or lease.pinned:
            return None
        cost = price(lease.unit)
        return None if cost == inf else cost

    def _register(self, lease: Lease) -> None:
        self._leases[lease.unit.index] = lease
        self._by_storage[lease.storage] = lease
        if lease.run is not None:
            self._by_run[lease.run.start] = lease

    def _collect(self) -> None:
        """Free the frames of ended leases that nobody holds any more."""
        kept = []
        before = len(self._stale)
        for lease in self._stale:
            if lease.pinned:
                kept.append(lease)
                continue
            if lease.awaited and lease.ready is not None:
                lease.ready.wait_until_done()
            assert self.region is not None
            assert lease.run is not None
            del self._by_run[lease.run.start]
            del self._by_storage[lease.storage]
            self.region.free(lease.run)
        self._stale = kept
        if len(kept) < before:
            self._freed = self._device.fence()
