"""Leases: weights in compute's memory, for as long as something uses them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from pagoda.memory.arena import FRESH_USE_COUNT, storage_use_count
from pagoda.memory.page import Run, pages_for
from pagoda.plan.layout import WEIGHT
from pagoda.plan.placement import LEASES
from pagoda.runtime.device import PAST, Device, Event
from pagoda.runtime.fetch import Fetcher
from pagoda.runtime.lanes import Handle
from pagoda.runtime.store import Store
from pagoda.runtime.unit import LiveUnit
from pagoda.schedule.operations import Operation


@dataclass(eq=False, slots=True)
class Lease:
    """A unit's weights in compute's memory, with a storage object of their own.

    Invariant: every view of the weights outside this class (a parameter's data, a tensor saved for backward) shares
    `base`'s storage. So the storage's use count tells whether the frames may be reused.
    """

    unit: LiveUnit
    base: torch.Tensor
    run: Run | None
    """Frames of the lease. None if the unit's home itself is leased."""
    ready: Handle | None
    """Ends when the weights are there. None if they always are."""

    @property
    def storage(self) -> int:
        """Identity of the storage, as long as the lease lives."""
        return int(self.base.untyped_storage()._cdata)

    @property
    def held(self) -> bool:
        """True while a view of the weights lives outside this class."""
        return storage_use_count(self.base) > FRESH_USE_COUNT


class Leases:
    """The tensors of every lease that the scheduler has asked for.

    If compute can read a unit's home, the unit is leased in place, permanently. All other leases are frames of
    `region`, which the scheduler chooses. The compute thread calls `find`. Everything else is called under the driver's
    lock.
    """

    def __init__(self, store: Store, units: Iterable[LiveUnit], device: Device, fetcher: Fetcher) -> None:
        """Take the frames that the plan has for leases."""
        plan = store.plan
        self.region = None
        if plan.lease_tier is not None:
            self.region = (store.device or store.host).take(plan.placement.pages(plan.lease_tier, LEASES))
        self._store = store
        self._device = device
        self._fetcher = fetcher
        self.gather: Callable[[LiveUnit, torch.Tensor, Handle, Event], Handle] | None = None
        """With several ranks: gathers the other ranks' slices of a lease next to this rank's."""
        self._freed = PAST
        """The point that compute's queue had reached when frames were last freed. Later work does not read their old
        values."""
        self._latest: dict[int, Lease] = {}
        """unit -> its lease in place, or its latest lease of frames, which may not be ready or may have ended."""
        self._by_run: dict[int, Lease] = {}
        self._by_storage: dict[int, Lease] = {}
        self._filling: list[tuple[Run, Handle]] = []
        """Frames that were given back while they were being filled. The next fetch into them waits for that."""
        in_frames = plan.leased_pages()
        for unit in units:
            if unit.index not in in_frames:
                self.lease_home(unit)

    def lease_home(self, unit: LiveUnit) -> None:
        """Lease a unit in place. Views of an earlier place may see its contents change."""
        before = self._latest.get(unit.index)
        if before is not None:
            del self._by_storage[before.storage]
        self._add(Lease(unit, self._store.in_place(unit.index, unit.spec.numel), None, None))

    def get(self, unit: LiveUnit) -> Lease:
        """The lease of a unit that compute has accessed. Its weights are there."""
        return self._latest[unit.index]

    def latest(self, unit: LiveUnit) -> Lease | None:
        """The latest lease of a unit. It may not be ready, or may have ended."""
        return self._latest.get(unit.index)

    def in_place(self, unit: LiveUnit) -> bool:
        """Whether a unit is leased in its home."""
        lease = self._latest.get(unit.index)
        return lease is not None and lease.run is None

    def find(self, storage: int) -> Lease | None:
        """The lease with this storage, even if it has ended."""
        return self._by_storage.get(storage)

    def fetch(self, operation: Operation, unit: LiveUnit, after: tuple[Handle, ...]) -> Handle:
        """Start a FETCH once `after` have ended."""
        run = operation.run
        assert self.region is not None
        assert run is not None
        dtype, page = self._store.dtype(WEIGHT), self.region.page_bytes
        whole_pages = pages_for(unit.spec.numel * dtype.itemsize, page) * page
        self._filling = [(taken, handle) for taken, handle in self._filling if not handle.done]
        earlier = tuple(h for taken, h in self._filling if taken.start < run.stop and run.start < taken.stop)
        with torch.inference_mode(False):  # a lease may outlive the inference that asked for it
            frames = self.region.part(run)
            base = frames.tensor(dtype, unit.spec.numel)
            target = frames.tensor(torch.uint8, whole_pages)
            ready = self._fetcher.fill(unit, target, self._freed, (*after, *earlier))
            if self.gather is not None:
                ready = self.gather(unit, frames.tensor(dtype), ready, self._freed)
        self._by_run[run.start] = self._add(Lease(unit, base, run, ready))
        return ready

    def is_free(self, operation: Operation, unit: LiveUnit) -> bool:
        """Whether nothing refers to the weights that a RECLAIM names."""
        if operation.run is not None:
            return not self._by_run[operation.run.start].held
        latest = self._latest.get(unit.index)
        return not (unit.packed or unit.active or (latest is not None and latest.held))

    def reclaim(self, operation: Operation, unit: LiveUnit) -> bool:
        """Whether nothing refers to the weights that a RECLAIM names. If so, their frames are given back."""
        if not self.is_free(operation, unit):
            return False
        if operation.run is None:
            return True
        lease = self._by_run.pop(operation.run.start)
        del self._by_storage[lease.storage]
        if self._latest.get(unit.index) is lease:
            del self._latest[unit.index]
        assert lease.ready is not None
        if lease.ready.done:
            assert self.region is not None
            self.region.part(operation.run).poison()
        elif not lease.ready.issued:
            self._filling.append((operation.run, lease.ready))
        self._freed = self._device.fence()
        return True

    def close(self) -> bool:
        """End every lease. Returns whether someone still holds weights of one."""
        held = any(lease.held for lease in self._by_storage.values())
        for leases in (self._latest, self._by_run, self._by_storage):
            leases.clear()
        return held

    def _add(self, lease: Lease) -> Lease:
        self._latest[lease.unit.index] = self._by_storage[lease.storage] = lease
        return lease
