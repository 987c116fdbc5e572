"""Gathering: makes a unit's whole weights from every rank's slice."""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch

from pagoda.errors import NonFiniteGradientError, RankError
from pagoda.memory.page import PageRun, pages_for
from pagoda.mesh.world import rank_timeout_s
from pagoda.parameters.unit import LiveUnit
from pagoda.plan.collective import MESSAGE_BYTES
from pagoda.plan.layout import WEIGHT, WEIGHT_BACK
from pagoda.plan.placement import SERVING
from pagoda.plan.tiers import HOST
from pagoda.plan.units import UnitSpec
from pagoda.ranks.collective import Collectives
from pagoda.ranks.order import Call, CollectiveKind
from pagoda.ranks.service import Service
from pagoda.runtime.device import Event
from pagoda.runtime.executor import Executor
from pagoda.runtime.gradients import UnitGradient
from pagoda.runtime.lanes import Handle, Lane, wait_all
from pagoda.runtime.store import Store

_PIECE_BYTES = 8 << 20
"""Bytes that a thread of a lane reads or writes at a time."""


@dataclass(eq=False, repr=False)
class Gathering:
    """Gathers weights: into leases if ranks have slices of the weights (stage 3), into the homes if every rank has all
    weights and updates a slice of them (stages 1 and 2)."""

    _collectives: Collectives
    _store: Store
    _units: Sequence[LiveUnit]
    _executor: Executor
    _lanes: dict[str, Lane]
    _landing: torch.Tensor | None = None
    """Weights that only other ranks want arrive here, uint8."""
    _shared: "SharedWeights | None" = None
    """If ranks have all weights: brings new weights to those that live on SSD."""
    _window: memoryview | None = None
    """RAM through which a slice on SSD is sent: each message is sent before the next is read."""

    def __post_init__(self) -> None:
        collectives = self._collectives
        self._reading = threading.Lock()
        """Held while the window is in use."""
        self._shards = collectives.shards
        collectives.take_part |= {CollectiveKind.GATHER: self._give, CollectiveKind.SHARE: self._share_unasked}
        shards_weights = collectives.mesh.ranks.shards_weights
        self._service = Service(collectives.transport, self._answer) if shards_weights else None

    def take_memory(self, landing: torch.Tensor | None) -> None:
        """Take the memory that the plan has for weights of other ranks. Those that only others want go to
        `landing`."""
        store, shards_weights = self._store, self._collectives.mesh.ranks.shards_weights
        pages = store.plan.placement.pages(HOST, SERVING)
        self._landing = landing
        self._window = store.host.take(pages).view() if pages and shards_weights else None
        self._shared = SharedWeights(store, self._lanes) if pages and not shards_weights else None

    def gather(self, unit: LiveUnit, weights: torch.Tensor, own: Handle, free: Event) -> Handle:
        """Complete a lease, shape [numel], if weights are sliced. This rank's slice lies there once `own` has
        ended; other slices may arrive once compute has passed `free`."""
        if not self._shards.is_sliced(unit.spec, WEIGHT):
            return own
        version = self._collectives.edition(unit)

        def work(together: bool) -> None:
            free.synchronize()
            if together:
                self._complete(unit.spec, weights)
            else:
                self._ask(unit, version, weights)

        return self._collectives.submit(CollectiveKind.GATHER, unit, work, (own,), weights.nbytes)

    def share(self, gradient: UnitGradient) -> Handle:
        """Bring every rank's updated slice of a unit's weights to where this rank's update has written its own, once it
        has."""
        unit, updated = gradient.unit, gradient.updated
        # `step()` has all ranks share the same units in the same order: those that any of them has a gradient of.
        # Under backward, ranks may update others.
        alike = not self._store.plan.options.update_during_backward
        kind, nbytes = CollectiveKind.SHARE, unit.spec.trainable_numel * self._dtype(unit).itemsize
        return self._collectives.submit(
            kind, unit, lambda _: self._share(unit, gradient.weights), (updated,), nbytes, alike
        )

    def close(self) -> None:
        """Stop answering other ranks."""
        if self._service is not None:
            self._service.close()

    def _complete(self, spec: UnitSpec, whole: torch.Tensor) -> None:
        """Complete a unit in `whole`, shape [numel or more], in which this rank's slice lies. Frozen elements come
        first, since the padding of the trained slices lies there."""
        group = self._collectives.sharers(spec)
        for spans in (self._shards.frozen_slices(spec), self._shards.trained_slices(spec)):
            group.gather(whole, [(span.start, span.stop) for span in spans])

    def _give(self, unit: LiveUnit, version: int | None) -> None:
        """Give the others this rank's slice of a unit whose weights this rank does not want."""
        assert self._landing is not None
        assert version is not None
        page = self._store.plan.page_bytes
        pages = pages_for(self._store.plan.layout.weight_bytes(unit.spec), page)
        whole = self._landing[: pages * page].view(self._dtype(unit))  # as long as a lease
        if self._collectives.order.failed:
            whole.fill_(math.nan)
        else:
            for start, message in self._messages(unit, version):
                whole[start : start + message.numel()].copy_(message)
        self._complete(unit.spec, whole)

    # --- weights of all ranks ---

    def _share(self, unit: LiveUnit, run: PageRun) -> None:
        home, order = self._store.tensor(unit.index, WEIGHT, run), self._collectives.order
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
        self._collectives.sharers(unit.spec).gather(weights, spans)

    def _share_unasked(self, unit: LiveUnit, version: int | None) -> None:
        """Share a unit that other ranks have updated, and that this one may be about to update."""
        if version is None:
            return
        if not self._collectives.order.failed:
            # This rank's compute is about to queue the same update, unless it waits for what comes after this.
            self._await_version(unit, version, lambda: self._collectives.awaited)
            _end(self._executor.updated(unit))
            self._check_version(unit, version)
        self._share(unit, self._executor.newest(unit))

    # --- one rank by itself ---

    def _ask(self, unit: LiveUnit, version: int, whole: torch.Tensor) -> None:
        """Have the other ranks' slices of a unit after `version` updates from their services."""
        assert self._service is not None
        targets = []
        for rank in self._shards.sharers(unit.spec):
            if rank != self._shards.rank:
                parts = (whole[span.start : span.stop] for span in self._shards.spans(unit.spec, WEIGHT, rank))
                targets.append((rank, [*chain.from_iterable(part.split(self._most(unit)) for part in parts)]))  # type: ignore[no-untyped-call]
        self._service.ask(unit.index, version, targets)
        if whole.is_cuda:
            torch.cuda.current_stream(whole.device).synchronize()

    def _answer(self, index: int, version: int) -> Iterator[torch.Tensor]:
        """This rank's slice of a unit after `version` updates, for a rank that asks: messages in RAM."""
        unit = self._units[index]
        self._await_version(unit, version, lambda: False)
        for _, message in self._messages(unit, version):
            yield message.cpu()

    def _messages(self, unit: LiveUnit, version: int) -> Iterator[tuple[int, torch.Tensor]]:
        """This rank's slice of a unit after `version` updates, in messages: (first element, values)."""
        self._check_version(unit, version)
        if self._collectives.edition(unit) == version:
            _end(self._executor.updated(unit))
        self._executor.lend(unit)
        try:
            yield from self._pieces(unit)
        finally:
            self._executor.take_back(unit)
        self._check_version(unit, version)

    def _pieces(self, unit: LiveUnit) -> Iterator[tuple[int, torch.Tensor]]:
        """This rank's slice of a unit, as it is now, in messages."""
        run, dtype = self._store.home(unit.index, WEIGHT_BACK), self._dtype(unit)
        home = self._store.tensor(unit.index, WEIGHT, run)
        for span in self._shards.spans(unit.spec, WEIGHT):
            for start in range(0, len(span), self._most(unit)):
                count, at = min(self._most(unit), len(span) - start), span.at + start
                if home is not None:
                    yield span.start + start, home[at : at + count]
                    continue
                assert self._window is not None, "a plan with weights on SSD has room to serve them"
                with self._reading:
                    data = self._store.read_into(self._window, dtype, run, at, count)
                    yield span.start + start, torch.frombuffer(data, dtype=dtype)

    def _dtype(self, unit: LiveUnit) -> torch.dtype:
        return self._store.dtype(unit.index, WEIGHT)

    def _most(self, unit: LiveUnit) -> int:
        """Elements of a message."""
        return MESSAGE_BYTES // self._dtype(unit).itemsize

    def _await_version(self, unit: LiveUnit, version: int, hopeless: Callable[[], bool]) -> None:
        """Wait until compute has asked for an update that another rank has asked for already."""
        deadline = time.monotonic() + rank_timeout_s()  # when the others give this rank up
        while self._collectives.edition(unit) < version and not hopeless() and time.monotonic() < deadline:
            time.sleep(0.001)

    def _check_version(self, unit: LiveUnit, version: int) -> None:
        """Raises RankError if this rank does not have the weights after `version` updates. It also has them if one more
        update is queued and has not begun: that needs the gradients of all ranks, so it waits for the rank that asks.
        """
        if self._collectives.edition(unit) == version or (
            self._collectives.edition(unit) == version + 1 and self._executor.is_to_come(unit)
        ):
            return
        raise RankError(
            f"Another rank asks for the weights of {unit.spec.name!r} after {version} updates, and rank "
            f"{self._shards.rank} has made {self._collectives.edition(unit)}: "
            "run the same steps on every rank, and where graphs "
            "differ, leave out wrap(gradient_accumulation_steps=...), so that updates wait for optimizer.step()."
        )


def _end(update: Handle | None) -> None:
    """Wait until an update has ended. An update that is refused for a gradient that is not finite changes nothing."""
    with suppress(NonFiniteGradientError):
        if update is not None:
            update.wait()


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
        self._move("ssd_read", unit, run, reads)

    def write_others(self, unit: LiveUnit, run: PageRun) -> None:
        """Write the pages that hold parts of the other ranks' slices."""
        own, itemsize = self._store.shards.updated(unit.spec), self._store.dtype(unit.index, WEIGHT).itemsize
        begin = pages_for(own.start * itemsize, self._page)
        end = max(begin, own.stop * itemsize // self._page)
        self._move("ssd_write", unit, run, [range(begin), range(end, self._pages(unit))])

    def _pages(self, unit: LiveUnit) -> int:
        return self._store.plan.layout.trained_weight_pages(unit.spec)

    def _move(self, lane: str, unit: LiveUnit, run: PageRun, pages: Sequence[range]) -> None:
        """Read or write pages of a run, and wait for that."""
        move = self._store.load if lane == "ssd_read" else self._store.save
        step, moves = max(1, _PIECE_BYTES // self._page), []
        for each in pages:
            for first in each[::step]:
                at, nbytes = first * self._page, min(step, each.stop - first) * self._page
                work = partial(move, run, at, self._room.view(at, nbytes))
                moves.append(self._lanes[lane].submit(work, (), nbytes, f"share {unit.spec.name}"))
        wait_all(moves)
