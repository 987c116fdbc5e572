"""Gathering: whole weights of a unit, made of every rank's slice."""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import torch

from pagoda.distributed.agreement import Call, CollectiveKind
from pagoda.distributed.service import Service
from pagoda.distributed.world import rank_timeout_s
from pagoda.errors import NonFiniteGradientError, RankError
from pagoda.plan.collective import MESSAGE_BYTES
from pagoda.plan.layout import WEIGHT
from pagoda.plan.ops import HOST
from pagoda.plan.placement import SERVING
from pagoda.plan.ranks import ring_bytes
from pagoda.plan.units import UnitSpec
from pagoda.runtime.collective import Collectives
from pagoda.runtime.device import Device, Event
from pagoda.runtime.executor import Executor
from pagoda.runtime.lanes import Handle
from pagoda.runtime.store import Store
from pagoda.runtime.unit import LiveUnit


class Gathering:
    """Gathers into leases where ranks have slices of the weights (stage 3), and into the homes where every rank has all
    weights and updates a slice of them (stages 1 and 2)."""

    def __init__(
        self,
        collectives: Collectives,
        store: Store,
        units: Sequence[LiveUnit],
        device: Device,
        executor: Executor,
        landing: torch.Tensor | None,
        early: bool,
    ) -> None:
        """Weights that this rank has no use for arrive in `landing`, uint8. `early`: units are updated under backward,
        of which ranks may have others then."""
        self._collectives = collectives
        self._shards = collectives.shards
        self._store = store
        self._units = units
        self._device = device
        self._executor = executor
        self._landing = landing
        self._early = early
        self._dtype = store.dtype(WEIGHT)
        pages = store.plan.placement.pages(HOST, SERVING)
        self._window = store.host.take(pages).view() if pages else None
        """What a slice on SSD passes, message by message: one has been sent before the next is read."""
        self._reading = threading.Lock()
        self._updated: dict[int, Handle] = {}
        """unit -> this rank's latest update of a slice that is shared."""
        collectives.serve(CollectiveKind.GATHER, self._take_part)
        collectives.serve(CollectiveKind.SHARE, self._take_part_in_sharing)
        mesh = collectives.mesh
        self._service = Service(collectives.transport, self._answer) if mesh.ranks.shards_weights else None

    def gather(self, unit: LiveUnit, weights: torch.Tensor, own: Handle, free: Event) -> Handle:
        """Complete a lease, shape [numel], in which this rank's slice lies once `own` has ended, and which others'
        slices may overwrite once compute has passed `free`."""
        spec, version = unit.spec, unit.version

        def work(rank_group: bool) -> None:
            free.synchronize()
            if rank_group:
                self._complete(spec, weights)
            else:
                self._ask(unit, version, weights)

        sent = ring_bytes(weights.nbytes, len(self._shards.sharers(spec)))
        call = Call(CollectiveKind.GATHER, unit.index, version)
        return self._collectives.submit(call, work, (own,), sent, f"gather {spec.name}")

    def share(self, unit: LiveUnit, updated: Handle) -> Handle:
        """Have every rank's updated slice of a unit's weights in this rank's home, once its own is `updated`."""
        spec = unit.spec
        self._updated[unit.index] = updated
        sent = ring_bytes(spec.trainable_numel * self._dtype.itemsize, len(self._shards.sharers(spec)))
        call = Call(CollectiveKind.SHARE, unit.index, unit.version)
        # `step()` has all ranks share the same units in the same order: those that any of them has a gradient of.
        alike, label = not self._early, f"share {spec.name}"
        return self._collectives.submit(call, lambda _: self._share(unit), (updated,), sent, label, alike)

    def close(self) -> None:
        """Answer nobody any more."""
        if self._service is not None:
            self._service.close()

    def _complete(self, spec: UnitSpec, whole: torch.Tensor) -> None:
        """Have all slices of a unit, of which this rank's lies in `whole`, shape [numel or more]. What is frozen comes
        first: the padding of the trained slices lies there."""
        group = self._collectives.sharing(spec)
        for spans in (self._shards.frozen_slices(spec), self._shards.trained_slices(spec)):
            group.gather(whole, [(span.start, span.stop) for span in spans])

    def _take_part(self, unit: LiveUnit, version: int | None) -> None:
        """Give the others this rank's slice of a unit, in weights that it has no use for."""
        spec, plan = unit.spec, self._store.plan
        assert self._landing is not None
        assert version is not None
        pages = math.ceil(spec.numel * self._dtype.itemsize / plan.page_bytes)
        whole = self._landing[: pages * plan.page_bytes].view(self._dtype)  # as long as a lease
        if self._collectives.failed:
            whole.fill_(math.nan)
        else:
            for start, message in self._messages(unit, version):
                whole[start : start + message.numel()].copy_(message)
        self._complete(spec, whole)

    # --- weights of all ranks ---

    def _share(self, unit: LiveUnit) -> None:
        home = self._store.tensor(unit.index, WEIGHT)
        assert home is not None, "ranks that have all weights have them in RAM"
        spans = [(span.start, span.stop) for span in self._shards.trained_slices(unit.spec)]
        self._collectives.sharing(unit.spec).gather(home, spans)

    def _take_part_in_sharing(self, unit: LiveUnit, version: int | None) -> None:
        if version is None:
            return
        if not self._collectives.failed:
            # This rank's compute is about to queue the same update, unless it waits for what comes after this.
            self._await_version(unit, version, lambda: self._collectives.awaited)
            _end(self._updated.get(unit.index))
            self._check_version(unit, version)
        self._share(unit)

    # --- one rank by itself ---

    def _ask(self, unit: LiveUnit, version: int, whole: torch.Tensor) -> None:
        """Have the other ranks' slices of a unit after `version` updates from their services."""
        assert self._service is not None
        most, targets = MESSAGE_BYTES // self._dtype.itemsize, []
        for rank in self._shards.sharers(unit.spec):
            if rank != self._shards.rank:
                spans = self._shards.spans(unit.spec, WEIGHT, rank)
                pieces = [piece for span in spans for piece in whole[span.start : span.stop].split(most)]  # type: ignore[no-untyped-call]
                targets.append((rank, [piece for piece in pieces if piece.numel()]))
        self._service.ask(unit.index, version, targets)
        if whole.is_cuda:
            torch.cuda.current_stream(whole.device).synchronize()

    def _answer(self, index: int, version: int) -> Iterator[torch.Tensor]:
        """This rank's slice of a unit after `version` updates, in messages in RAM; for a rank that asks."""
        unit = self._units[index]
        self._await_version(unit, version, lambda: False)
        for _, message in self._messages(unit, version):
            yield message.cpu()

    def _messages(self, unit: LiveUnit, version: int) -> Iterator[tuple[int, torch.Tensor]]:
        """This rank's slice of a unit after `version` updates, in messages: (first element, values)."""
        self._check_version(unit, version)
        if unit.version == version:
            _end(self._executor.updated(unit))
        home, itemsize = self._store.tensor(unit.index, WEIGHT), self._dtype.itemsize
        most = MESSAGE_BYTES // itemsize
        for span in self._shards.spans(unit.spec, WEIGHT):
            for start in range(0, len(span), most):
                count, at = min(most, len(span) - start), span.at + start
                if home is not None:
                    yield span.start + start, home[at : at + count]
                    continue
                assert self._window is not None, "a plan with weights on SSD has room to serve them"
                with self._reading:
                    data = self._store.read_into(self._window, unit.index, WEIGHT, at, count)
                    yield span.start + start, torch.frombuffer(data, dtype=self._dtype)
        self._check_version(unit, version)

    def _await_version(self, unit: LiveUnit, version: int, hopeless: Callable[[], bool]) -> None:
        """Wait until compute has asked for an update that another rank has asked for already."""
        deadline = time.monotonic() + rank_timeout_s()  # when the others give this rank up
        while unit.version < version and not hopeless() and time.monotonic() < deadline:
            time.sleep(0.001)

    def _check_version(self, unit: LiveUnit, version: int) -> None:
        """A unit whose next update has yet to begin has the weights before it: that update needs a gradient of all
        ranks, so it waits for the one that asks."""
        if unit.version == version or (unit.version == version + 1 and self._executor.is_to_come(unit)):
            return
        raise RankError(
            f"Another rank asks for the weights of {unit.spec.name!r} after {version} updates, and rank "
            f"{self._shards.rank} has made {unit.version}: run the same steps on every rank, and where graphs "
            "differ, leave out wrap(accumulation_steps=...), so that updates wait for optimizer.step()."
        )


def _end(update: Handle | None) -> None:
    """Wait until an update has ended. One that was refused, as its gradient is not finite, has changed nothing."""
    with suppress(NonFiniteGradientError):
        if update is not None:
            update.wait()
