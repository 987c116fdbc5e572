"""What graphs keep between forward and backward: the parts that pack it, move it, recompute it and account for it."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf
from pathlib import Path

from pagoda.plan.activations import (
    LEAST_OFFLOADED_BYTES,
    SHARE_OF_LANES,
    ActivationBytes,
    ActivationPlan,
    Room,
    StepSizes,
)
from pagoda.plan.ops import HOST, SSD
from pagoda.runtime.accesses import Accesses
from pagoda.runtime.activations import Activations
from pagoda.runtime.device import Device
from pagoda.runtime.lanes import Lane
from pagoda.runtime.leases import Leases
from pagoda.runtime.offload import Offloader
from pagoda.runtime.packing import Packing
from pagoda.runtime.partition import Partitioner
from pagoda.runtime.places import Place, open_places
from pagoda.runtime.saved import SavedStorages
from pagoda.runtime.store import Store

_NO_LIMIT = 1 << 62


class GraphMemory:
    """Owns the parts, and is asked for what they take."""

    def __init__(
        self,
        leases: Leases,
        accesses: Accesses,
        store: Store,
        directories: Mapping[Path, int | None],
        lanes: dict[str, Lane],
        device: Device,
        stalled: Callable[[str, float], None],
        poison: bool,
        partitioner: Partitioner | None = None,
    ) -> None:
        options = store.plan.options
        page = min(LEAST_OFFLOADED_BYTES, store.plan.page_bytes)
        self._budget = _NO_LIMIT if options.activation_bytes is None else options.activation_bytes
        self._strict = options.activations_limited
        self._saved = SavedStorages()
        self._places: list[Place] = open_places(store, device, directories, page, poison) if options.may_offload else []
        self._offloader: Offloader | None = None
        if self._places:
            required = options.activations != "auto"
            self._offloader = Offloader(self._places, page, required, lanes, device, self._saved, stalled)
        self._rates: list[tuple[float, float]] | None = None
        self.packing = Packing(leases, accesses, self._saved, self._offloader, partitioner)
        self.activations = Activations(
            options.activations, self.packing, self._saved, device, page, self._room, partitioner
        )

    @property
    def plan(self) -> ActivationPlan:
        """What one forward was planned to take at most, or what several graphs at once have taken, if that is more."""
        plan = self.activations.plan
        taken = ActivationBytes(0, self.peak_bytes.get(HOST, 0), self.peak_bytes.get(SSD, 0))
        return replace(plan, peak=plan.peak.or_more(taken))

    @property
    def peak_bytes(self) -> Mapping[str, int]:
        """tier -> most bytes of offloaded activations at once, so far."""
        return {place.tier: place.scratch.peak_bytes for place in self._places if place.scratch.peak_bytes}

    def end_of_step(self) -> ActivationBytes:
        """Close a step; returns the most that its graphs kept."""
        self.activations.end_of_step()
        kept = self._saved.peak_bytes
        self._saved.start_step()
        if self._offloader is not None:
            self._offloader.settle()
        return ActivationBytes(kept, self.peak_bytes.get(HOST, 0), self.peak_bytes.get(SSD, 0))

    def close(self) -> None:
        """Give everything back. Lanes have ended."""
        if self._offloader is not None:
            self._offloader.close()
        for place in self._places:
            place.scratch.close()

    def _room(self, sizes: StepSizes) -> Room:
        rooms = {place.tier: place.scratch.room_bytes for place in self._places}
        movable = {HOST: inf, SSD: inf}
        if self._offloader is not None and self.activations.chooses:
            if self._rates is None:
                self._rates = self._offloader.rates()
            forward_s = SHARE_OF_LANES * sum(block.forward_s for block in sizes.blocks)
            for place, (out, back) in zip(self._places, self._rates, strict=True):
                movable[place.tier] = forward_s * min(out, 2 * back)  # backward takes twice as long
        return Room(self._budget, rooms.get(HOST, 0), rooms.get(SSD, 0), movable[HOST], movable[SSD], self._strict)
