"""Sharing: updated slices of weights, where every rank has all weights and updates a slice (stages 1 and 2)."""

import time
from collections.abc import Collection, Sequence

import torch

from pagoda.errors import RankError
from pagoda.parallel.agreement import Asks, Call
from pagoda.parallel.world import rank_timeout_s
from pagoda.plan.layout import WEIGHT
from pagoda.plan.ranks import ring_bytes
from pagoda.runtime.collective import Collectives, askers
from pagoda.runtime.lanes import Handle
from pagoda.runtime.store import Store
from pagoda.runtime.unit import LiveUnit


class Sharing:
    """Gathers updated slices straight into the homes.

    `step()` has all ranks share the same units in the same order: those that any rank has a gradient of. Units that are
    updated under backward are shared when ranks ask for it.
    """

    def __init__(self, collectives: Collectives, store: Store, units: Sequence[LiveUnit], early: bool) -> None:
        """`early` says that units are updated under backward."""
        self._collectives = collectives
        self._shards = collectives.shards
        self._store = store
        self._units = units
        self._early = early
        self._updated: dict[int, Handle] = {}
        """unit -> this rank's latest update of a slice that is shared."""
        collectives.serve(Asks.SHARE, self._serve)

    def share(self, unit: LiveUnit, updated: Handle) -> Handle:
        """Have every rank's updated slice of a unit's weights in this rank's home, once its own is `updated`."""
        spec, version = unit.spec, unit.version
        self._updated[unit.index] = updated
        sent = ring_bytes(spec.trainable_numel * self._store.dtype(WEIGHT).itemsize, len(self._shards.sharers(spec)))
        label = f"share {spec.name}"
        if not self._early:
            return self._collectives.run(lambda: self._gather(unit), (updated,), sent, label)

        def work(calls: Sequence[Call]) -> None:
            asking = askers(call, calls, self._shards.family(spec))
            if set(self._shards.sharers(spec)).issubset(asking):
                self._gather(unit)
            else:
                self._trade(unit, asking)

        call = Call(Asks.SHARE, unit.index, version)
        return self._collectives.submit(lambda: call, work, (updated,), sent, label)

    def _gather(self, unit: LiveUnit) -> None:
        spans = [(span.start, span.stop) for span in self._shards.trained_slices(unit.spec)]
        self._collectives.sharing(unit.spec).gather(self._home(unit), spans)

    def _trade(self, unit: LiveUnit, asking: Collection[int]) -> None:
        """Get every slice, and give this rank's to the others that ask."""
        me, home = self._shards.rank, self._home(unit)
        slices = {rank: self._shards.updated(unit.spec, rank) for rank in self._shards.sharers(unit.spec)}
        mine = slices.pop(me)
        sends = [(rank, home[mine.start : mine.stop]) for rank in slices if rank in asking]
        self._collectives.wire.trade(sends, [(rank, home[span.start : span.stop]) for rank, span in slices.items()])

    def _serve(self, call: Call, calls: Sequence[Call]) -> None:
        """Send this rank's updated slice to those who ask for it."""
        unit, me = self._units[call.about], self._shards.rank
        family = askers(call, calls, self._shards.family(unit.spec))
        asking = [rank for rank in family if rank in self._shards.sharers(unit.spec) and rank != me]
        if not asking:
            return
        call = calls[asking[0]]
        deadline = time.monotonic() + rank_timeout_s()  # when the others give this rank up
        # This rank's compute is about to queue the same update, unless it waits for what comes after this.
        while unit.version < call.version and not self._collectives.awaited and time.monotonic() < deadline:
            time.sleep(0.001)
        if (update := self._updated.get(unit.index)) is not None:
            update.wait()
        check_version(unit, call.version, me)
        span = self._shards.updated(unit.spec)
        self._collectives.wire.trade([(rank, self._home(unit)[span.start : span.stop]) for rank in asking], ())
        check_version(unit, call.version, me)

    def _home(self, unit: LiveUnit) -> torch.Tensor:
        home = self._store.tensor(unit.index, WEIGHT)
        assert home is not None, "ranks that have all weights have them in RAM"
        return home


def check_version(unit: LiveUnit, version: int, rank: int) -> None:
    """Raises RankError where a unit on this rank has not had as many updates as another one asks for."""
    if unit.version != version:
        raise RankError(
            f"Another rank asks for the weights of {unit.spec.name!r} after {version} updates, and rank {rank} has "
            f"made {unit.version}: run the same steps on every rank, and where graphs differ, leave out "
            "wrap(accumulation_steps=...), so that updates wait for optimizer.step()."
        )
