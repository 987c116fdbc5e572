"""Gathering: whole weights of a unit, made of every rank's slice."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch

from pagoda.errors import RankError
from pagoda.parallel.agreement import Asks, Call
from pagoda.parallel.world import rank_timeout_s
from pagoda.plan.collective import MESSAGE_BYTES
from pagoda.plan.layout import WEIGHT
from pagoda.plan.ops import HOST
from pagoda.plan.placement import SERVING
from pagoda.plan.ranks import ring_bytes
from pagoda.plan.slices import Span
from pagoda.plan.units import UnitSpec
from pagoda.runtime.collective import Collectives, askers
from pagoda.runtime.device import Device, Event
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
        latest: Callable[[LiveUnit], Handle | None],
    ) -> None:
        """`latest` gives what ends when the latest update of a unit that was asked for has written its weights."""
        self._latest = latest
        self._collectives = collectives
        self._shards = collectives.shards
        self._store = store
        self._units = units
        self._device = device
        self._dtype = store.dtype(WEIGHT)
        pages = store.plan.placement.pages(HOST, SERVING)
        self._window = store.host.take(pages).view() if pages else None
        """What a slice on SSD passes, message by message: one has been sent before the next is read."""
        self._updated: dict[int, Handle] = {}
        """unit -> this rank's latest update of a slice that is shared."""
        collectives.serve(Asks.GATHER, self._serve)
        collectives.serve(Asks.SHARE, self._serve)

    def gather(self, unit: LiveUnit, weights: torch.Tensor, own: Handle, free: Event) -> Handle:
        """Complete a lease, shape [numel], in which this rank's slice lies once `own` has ended, and which others'
        slices may overwrite once compute has passed `free`."""
        spec = unit.spec

        def work(calls: Sequence[Call]) -> None:
            asking = askers(call, calls, self._shards.family(spec))
            free.synchronize()
            # What is frozen comes first: the padding of the trained slices lies there.
            self._complete(spec, weights, [self._shards.frozen_slices(spec), self._shards.trained_slices(spec)], asking)

        call = Call(Asks.GATHER, unit.index, unit.version)
        sent = ring_bytes(weights.nbytes, len(self._shards.sharers(spec)))
        return self._collectives.submit(call, work, (own,), sent, f"gather {spec.name}")

    def share(self, unit: LiveUnit, updated: Handle) -> Handle:
        """Have every rank's updated slice of a unit's weights in this rank's home, once its own is `updated`."""
        spec = unit.spec
        home = self._store.tensor(unit.index, WEIGHT)
        assert home is not None, "ranks that have all weights have them in RAM"

        def work(calls: Sequence[Call]) -> None:
            asking = askers(call, calls, self._shards.family(spec))
            self._complete(spec, home, [self._shards.trained_slices(spec)], asking)

        self._updated[unit.index] = updated
        call = Call(Asks.SHARE, unit.index, unit.version)
        sent = ring_bytes(spec.trainable_numel * self._dtype.itemsize, len(self._shards.sharers(spec)))
        return self._collectives.submit(call, work, (updated,), sent, f"share {spec.name}")

    def _complete(
        self, spec: UnitSpec, whole: torch.Tensor, kinds: Sequence[Sequence[Span]], asking: Collection[int]
    ) -> None:
        """Fill in what the other ranks have of a unit, of which this rank's slices lie in `whole`, shape [numel or
        more]; `kinds` are those of all sharers, by place.

        If all ask, that is a collective. Else each rank that asks gets every slice by itself.
        """
        me, sharers, group = self._shards.rank, self._shards.sharers(spec), self._collectives.sharing(spec)
        if set(sharers).issubset(asking):
            for spans in kinds:
                group.gather(whole, [(span.start, span.stop) for span in spans])
            return
        by_rank = {rank: self._messages(whole, spans) for rank, *spans in zip(sharers, *reversed(kinds), strict=True)}
        mine = by_rank.pop(me)
        sends = [(rank, message) for message in mine for rank in by_rank if rank in asking]
        self._collectives.wire.trade(sends, [(rank, message) for rank, of in by_rank.items() for message in of])

    def _serve(self, call: Call, calls: Sequence[Call]) -> None:
        """Send this rank's slice of a unit's weights to those who ask for it."""
        unit, me = self._units[call.about], self._shards.rank
        family = askers(call, calls, self._shards.family(unit.spec))
        asking = [rank for rank in family if rank in self._shards.sharers(unit.spec) and rank != me]
        if not asking:
            return
        call = calls[asking[0]]
        shared = call.asks is Asks.SHARE
        deadline = time.monotonic() + rank_timeout_s()  # when the others give this rank up
        # This rank's compute is about to queue the same update, unless it waits for what comes after this.
        while shared and unit.version < call.version and not self._collectives.awaited and time.monotonic() < deadline:
            time.sleep(0.001)
        update = self._updated.get(unit.index) if shared else self._latest(unit)
        if update is not None:
            update.wait()
        spans = [self._shards.updated(unit.spec)] if shared else self._shards.spans(unit.spec, WEIGHT)
        for span in spans:
            for message in self._home_messages(unit, span):
                self._check_version(unit, call)
                self._collectives.wire.trade([(rank, message) for rank in asking], ())
        self._check_version(unit, call)

    def _check_version(self, unit: LiveUnit, call: Call) -> None:
        if unit.version != call.version:
            raise RankError(
                f"Another rank asks for the weights of {unit.spec.name!r} after {call.version} updates, and rank "
                f"{self._shards.rank} has made {unit.version}: run the same steps on every rank, and where graphs "
                "differ, leave out wrap(accumulation_steps=...), so that updates wait for optimizer.step()."
            )

    def _messages(self, weights: torch.Tensor, spans: Iterable[Span]) -> list[torch.Tensor]:
        """The spans of a whole unit's weights, in messages."""
        most = MESSAGE_BYTES // self._dtype.itemsize
        return [message for span in spans for message in torch.split(weights[span.start : span.stop], most)]

    def _home_messages(self, unit: LiveUnit, span: Span) -> Iterator[torch.Tensor]:
        """A span of this rank's home of a unit's weights, in the same messages, where the wire can send them from."""
        home, itemsize = self._store.tensor(unit.index, WEIGHT), self._dtype.itemsize
        first = span.at if self._shards.is_cut(unit.spec, WEIGHT) else span.start
        most = MESSAGE_BYTES // itemsize
        for start in range(first, first + len(span), most):
            count = min(most, first + len(span) - start)
            if home is not None:
                message = home[start : start + count]
            else:
                assert self._window is not None, "a plan with weights on SSD has room to serve them"
                data = self._store.read_into(self._window, unit.index, WEIGHT, start, count)
                message = torch.frombuffer(data, dtype=self._dtype)
            yield message.to(self._device.torch_device)
