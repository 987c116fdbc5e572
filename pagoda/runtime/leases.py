"""Leases: weights where compute can reach them, for as long as something uses them."""

from collections.abc import Callable

import torch

from pagoda.memory.arena import FRESH_USE_COUNT, storage_use_count
from pagoda.memory.page import Run
from pagoda.memory.region import Region
from pagoda.runtime.device import PAST, Device, Event
from pagoda.runtime.lanes import Handle
from pagoda.runtime.unit import LiveUnit
from pagoda.schedule.operations import Operation


class Lease:
    """A unit's weights in memory that compute reads, with a storage object of their own.

    Invariant: every view of the weights outside this class (a parameter's data, a tensor saved for backward)
    shares `base`'s storage, so the storage's use count tells whether the frames may be reused.
    """

    __slots__ = ("base", "ready", "run", "unit")

    def __init__(self, unit: LiveUnit, base: torch.Tensor, run: Run | None, ready: Handle | None) -> None:
        self.unit = unit
        self.base = base
        self.run = run
        """Frames of the lease; None where the home itself is leased."""
        self.ready = ready
        """Ends when the weights are there; None where they always are."""

    @property
    def storage(self) -> int:
        """Identity of the storage, for as long as the lease lives."""
        return int(self.base.untyped_storage()._cdata)

    @property
    def held(self) -> bool:
        """True while someone outside keeps a view of the weights alive."""
        return storage_use_count(self.base) > FRESH_USE_COUNT


class Leases:
    """The tensors of every lease that the scheduler has asked for.

    Host-resident weights on a machine whose device is host RAM are leased in place, once and for good. All other leases
    are of frames of `region`. The scheduler decides which; `find` is compute's, everything else is called under the
    driver's lock.
    """

    def __init__(
        self,
        region: Region | None,
        dtype: torch.dtype,
        device: Device,
        fill: Callable[[LiveUnit, torch.Tensor, Event, tuple[Handle, ...]], Handle],
    ) -> None:
        """`fill` starts filling frames from the home of a unit's weights, once compute has passed an event and handles
        have ended."""
        self.region = region
        self._dtype = dtype
        self._device = device
        self._fill = fill
        self.gather: Callable[[LiveUnit, torch.Tensor, Handle, Event], Handle] | None = None
        """Brings the other ranks' slices of a lease beside this rank's; set where there are any."""
        self._freed = PAST
        """What compute had been given when frames were last freed: nothing after it reads their old values."""
        self._homes: dict[int, Lease] = {}
        self._latest: dict[int, Lease] = {}
        """unit -> its latest lease of frames."""
        self._by_run: dict[int, Lease] = {}
        self._by_storage: dict[int, Lease] = {}
        self._filling: list[tuple[Run, Handle]] = []
        """Frames that were given back while they were being filled: what fills them next waits for that."""

    def add_home(self, unit: LiveUnit, base: torch.Tensor) -> None:
        """Lease a unit in place; whatever still holds another place that it had may see that change."""
        before = self._homes.get(unit.index)
        if before is not None:
            del self._by_storage[before.storage]
        lease = self._homes[unit.index] = Lease(unit, base, None, None)
        self._by_storage[lease.storage] = lease

    def get(self, unit: LiveUnit) -> Lease:
        """The lease of a unit that compute has accessed and found ready."""
        return self._homes.get(unit.index) or self._latest[unit.index]

    def latest(self, unit: LiveUnit) -> Lease | None:
        """The last lease of frames that a unit has had, ready or not, ended or not."""
        return self._latest.get(unit.index)

    def in_place(self, unit: LiveUnit) -> bool:
        """Whether a unit is leased in its home."""
        return unit.index in self._homes

    def find(self, storage: int) -> Lease | None:
        """The lease whose storage this is, ended ones included."""
        return self._by_storage.get(storage)

    def fetch(self, operation: Operation, unit: LiveUnit, after: tuple[Handle, ...]) -> Handle:
        """Start a FETCH, once `after` have ended."""
        run = operation.run
        assert self.region is not None
        assert run is not None
        nbytes = unit.spec.numel * self._dtype.itemsize
        whole_pages = -(-nbytes // self.region.page_bytes) * self.region.page_bytes
        self._filling = [(taken, handle) for taken, handle in self._filling if not handle.done]
        earlier = tuple(h for taken, h in self._filling if taken.start < run.stop and run.start < taken.stop)
        with torch.inference_mode(False):  # a lease may outlive the inference that asked for it
            frames = self.region.part(run)
            base = frames.tensor(self._dtype, unit.spec.numel)
            target = frames.tensor(torch.uint8, whole_pages)
            ready = self._fill(unit, target, self._freed, (*after, *earlier))
            if self.gather is not None:
                ready = self.gather(unit, frames.tensor(self._dtype), ready, self._freed)
        lease = self._latest[unit.index] = self._by_run[run.start] = Lease(unit, base, run, ready)
        self._by_storage[lease.storage] = lease
        return ready

    def reclaim(self, operation: Operation, unit: LiveUnit) -> bool:
        """Whether nothing refers to what a RECLAIM asks for. Frames are given back then."""
        if operation.run is None:
            lease = self._homes.get(unit.index) or self._latest.get(unit.index)
            return not (unit.packed or unit.active or (lease is not None and lease.held))
        lease = self._by_run[operation.run.start]
        if lease.held:
            return False
        del self._by_run[operation.run.start]
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

    def is_held(self, operation: Operation) -> bool:
        """Whether something refers to the frames that a RECLAIM has asked for."""
        assert operation.run is not None
        return self._by_run[operation.run.start].held

    def close(self) -> bool:
        """End every lease; returns whether someone still holds weights of one."""
        held = any(lease.held for lease in self._by_storage.values())
        for leases in (self._homes, self._latest, self._by_run, self._by_storage):
            leases.clear()
        return held
