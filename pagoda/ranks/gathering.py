"""Gathering: makes a unit's whole weights from every rank's slice."""

from collections.abc import Sequence
from functools import partial
from itertools import chain

import torch

from pagoda.memory.page import PageRun, pages_for
from pagoda.parameters.unit import LiveUnit
from pagoda.plan.collective import MESSAGE_BYTES
from pagoda.plan.lanes import LaneName
from pagoda.plan.layout import WEIGHT
from pagoda.plan.placement import SERVING
from pagoda.plan.tiers import HOST
from pagoda.plan.units import UnitSpec
from pagoda.ranks.collective import Collectives
from pagoda.ranks.order import Call, CollectiveKind
from pagoda.ranks.service import Requests
from pagoda.runtime.device import Event
from pagoda.runtime.gradients import UnitGradient
from pagoda.runtime.lanes import Handle, Lane, wait_all
from pagoda.runtime.store import Store

_PIECE_BYTES = 8 << 20
"""Bytes that a thread of a lane reads or writes at a time."""


class Gathering:
    """Gathers the weights that this rank wants: into leases if ranks have slices of the weights (stage 3), into the
    homes if every rank has all weights and updates a slice of them (stages 1 and 2)."""

    def __init__(self, collectives: Collectives, store: Store, lanes: dict[str, Lane]) -> None:
        """Every rank must call this at the same point."""
        self.collectives = collectives
        self._store = store
        self._lanes = lanes
        self._shards = collectives.shards
        self.requests = Requests(collectives.transport) if collectives.mesh.ranks.shards_weights else None
        """For weights that other ranks do not want now."""
        self.take_memory()

    def take_memory(self) -> None:
        """Take the memory that the plan has for weights of other ranks."""
        shares = not self.collectives.mesh.ranks.shards_weights and self._store.plan.placement.pages(HOST, SERVING)
        self._shared = SharedWeights(self._store, self._lanes) if shares else None
        """If ranks have all weights: brings new weights to those that live on SSD."""

    def gather(self, unit: LiveUnit, weights: torch.Tensor, own: Handle, free: Event) -> Handle:
        """Complete a lease, shape [numel], if weights are sliced. This rank's slice lies there once `own` has
        ended; other slices may arrive once compute has passed `free`."""
        if not self._shards.is_sliced(unit.spec, WEIGHT):
            return own
        version = self.collectives.edition(unit)

        def work(together: bool) -> None:
            free.synchronize()
            if together:
                self.complete(unit.spec, weights)
            else:
                self._ask(unit, version, weights)

        return self.collectives.submit(CollectiveKind.GATHER, unit, work, (own,), weights.nbytes)

    def share(self, gradient: UnitGradient) -> Handle:
        """Bring every rank's updated slice of a unit's weights to where this rank's update has written its own, once it
        has."""
        unit, updated = gradient.unit, gradient.updated
        # `step()` has all ranks share the same units in the same order: those that any of them has a gradient of.
        # Under backward, ranks may update others.
        alike = not self._store.plan.options.update_during_backward
        kind, nbytes = CollectiveKind.SHARE, unit.spec.trainable_numel * self.dtype(unit).itemsize
        return self.collectives.submit(
            kind, unit, lambda _: self.share_slices(unit, gradient.weights), (updated,), nbytes, alike
        )

    def complete(self, spec: UnitSpec, whole: torch.Tensor) -> None:
        """Complete a unit in `whole`, shape [numel or more], in which this rank's slice lies. Frozen elements come
        first, since the padding of the trained slices lies there."""
        group = self.collectives.sharers(spec)
        for spans in (self._shards.frozen_slices(spec), self._shards.trained_slices(spec)):
            group.gather(whole, [(span.start, span.stop) for span in spans])

    # --- weights of all ranks ---

    def share_slices(self, unit: LiveUnit, run: PageRun) -> None:
        """Share a unit whose own slice is updated, in a run. Runs on the collective lane."""
        home, order = self._store.tensor(unit.index, WEIGHT, run), self.collectives.order
        if home is not None:
            self._share_into(unit, home)
            return
        assert self._shared is not None, "a plan with weights on SSD has room to share them"
        if order.failed:  # the others wait for this rank, whatever it has
            self._share_into(unit, self._shared.weights(unit))
            return
        try:
            self._shared.read_own(unit, run)
        except BaseException:
            order.fail(Call(CollectiveKind.SHARE, unit.index), None, alike=True)
            raise
        self._share_into(unit, self._shared.weights(unit))
        self._shared.write_others(unit, run)

    def _share_into(self, unit: LiveUnit, weights: torch.Tensor) -> None:
        """Complete a unit's trained weights with the other ranks' updated slices."""
        spans = [(span.start, span.stop) for span in self._shards.trained_slices(unit.spec)]
        self.collectives.sharers(unit.spec).gather(weights, spans)

    # --- one rank by itself ---

    def _ask(self, unit: LiveUnit, version: int, whole: torch.Tensor) -> None:
        """Have the other ranks' slices of a unit after `version` updates from their services."""
        assert self.requests is not None
        targets, most = [], self.message_elements(unit)
        for rank in self._shards.sharers(unit.spec):
            if rank != self._shards.rank:
                parts = (whole[span.start : span.stop] for span in self._shards.spans(unit.spec, WEIGHT, rank))
                targets.append((rank, [*chain.from_iterable(part.split(most) for part in parts)]))  # type: ignore[no-untyped-call]
        self.requests.ask(unit.index, version, targets)
        if whole.is_cuda:
            torch.cuda.current_stream(whole.device).synchronize()

    def dtype(self, unit: LiveUnit) -> torch.dtype:
        """The dtype of a unit's weights."""
        return self._store.dtype(unit.index, WEIGHT)

    def message_elements(self, unit: LiveUnit) -> int:
        """Most elements of a message from a service or to those that gather."""
        return MESSAGE_BYTES // self.dtype(unit).itemsize


class SharedWeights:
    """RAM for the trained weights of one unit at a time, as whole pages of its extent; for one thread."""

    def __init__(self, store: Store, lanes: dict[str, Lane]) -> None:
        self._store = store
        self._lanes = lanes
        self._page = store.plan.page_bytes
        self._room = store.host.take(store.plan.placement.pages(HOST, SERVING))

    def weights(self, unit: LiveUnit) -> torch.Tensor:
        """A unit's weights from its first element; undefined between two units."""
        return self._room.tensor(self._store.dtype(unit.index, WEIGHT))

    def read_own(self, unit: LiveUnit, run: PageRun) -> None:
        """Read this rank's updated slice of a unit. The other slices are still to come."""
        self._room.poison()
        own, pages = self._store.shards.updated(unit.spec), self._pages(unit)
        itemsize = self._store.dtype(unit.index, WEIGHT).itemsize
        reads = []
        if len(own):
            reads.append(range(own.start * itemsize // self._page, pages_for(own.stop * itemsize, self._page)))
        if unit.spec.trainable_numel < unit.spec.numel and pages and not any(pages - 1 in each for each in reads):
            reads.append(range(pages - 1, pages))  # it may also have frozen weights, which others do not send
        self._move(LaneName.SSD_READ, unit, run, reads)

    def write_others(self, unit: LiveUnit, run: PageRun) -> None:
        """Write the pages that hold parts of the other ranks' slices."""
        own, itemsize = self._store.shards.updated(unit.spec), self._store.dtype(unit.index, WEIGHT).itemsize
        begin = pages_for(own.start * itemsize, self._page)
        end = max(begin, own.stop * itemsize // self._page)
        self._move(LaneName.SSD_WRITE, unit, run, [range(begin), range(end, self._pages(unit))])

    def _pages(self, unit: LiveUnit) -> int:
        return self._store.plan.layout.trained_weight_pages(unit.spec)

    def _move(self, lane: str, unit: LiveUnit, run: PageRun, pages: Sequence[range]) -> None:
        """Read or write pages of a run, and wait for that."""
        move = self._store.load if lane == LaneName.SSD_READ else self._store.save
        step, moves = max(1, _PIECE_BYTES // self._page), []
        for each in pages:
            for first in each[::step]:
                at, nbytes = first * self._page, min(step, each.stop - first) * self._page
                work = partial(move, run, at, self._room.view(at, nbytes))
                moves.append(self._lanes[lane].submit(work, (), nbytes, f"share {unit.spec.name}"))
        wait_all(moves)
