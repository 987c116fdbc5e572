"""RankGroup: all that a model's ranks do with one another, as the engine asks for it."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import TypeVar

import torch
import torch.distributed as dist

from pagoda.distributed.mesh import Mesh
from pagoda.distributed.reduction import Buffers
from pagoda.distributed.transport import Transport
from pagoda.errors import UsageError
from pagoda.optim.rule import StateSpec
from pagoda.plan.layout import WEIGHT
from pagoda.plan.slices import Span
from pagoda.plan.units import UnitSpec
from pagoda.runtime.collective import Collectives
from pagoda.runtime.device import Device, Event
from pagoda.runtime.executor import Executor
from pagoda.runtime.gathering import Gathering
from pagoda.runtime.gradients import Gradients, UnitGradient
from pagoda.runtime.lanes import Handle, Lane
from pagoda.runtime.reducing import Reducer
from pagoda.runtime.store import Store
from pagoda.runtime.unit import LiveUnit

_INSTEAD = "clip with wrap(clip_grad_norm=...), or with optimizer.clip_grad_norm_(max_norm) on every rank"
T = TypeVar("T")

Counts = Callable[[UnitSpec, int], bool]
"""Whether a norm counts what this rank has of a unit's parameter."""
SquareSums = Callable[[Iterable[UnitGradient], Counts], list[list[float]]]
"""The square sums of the gradients that a step uses, by param group."""


@dataclass(frozen=True)
class NormTerms:
    """Terms of a global norm."""

    square_sums: list[list[float]]
    """By param group: the square sums of all ranks."""
    non_finite: str | None
    """Name of the first parameter whose gradient is NaN or infinite on some rank."""


class RankGroup:
    """One engine's dealings with those of other ranks. See `Order` for which comes when."""

    def __init__(
        self,
        mesh: Mesh,
        transport: Transport,
        store: Store,
        units: Sequence[LiveUnit],
        gradients: Gradients,
        buffers: Buffers | None,
        device: Device,
        lanes: dict[str, Lane],
        executor: Executor,
        stalled: Callable[[str, float], None],
    ) -> None:
        """`buffers` are for gradients of several ranks; None where no two have any of the same elements."""
        self._store = store
        self._shards = store.shards
        self._units = units
        self._gradients = gradients
        transport.connect(device.torch_device)
        driver = executor.driver
        # Which experts a rank uses, and in which order, is its own.
        listed = not store.plan.layout.expert_units
        self.collectives = Collectives(mesh, transport, store.shards, device, units, driver.scheduler, listed)
        landing = buffers.landing if buffers is not None else None
        self._gathering = Gathering(self.collectives, store, units, executor, landing, lanes)
        self._reducer: Reducer | None = None
        if buffers is not None:
            early = store.plan.options.update_during_backward
            self._reducer = Reducer(self.collectives, gradients, buffers, device, lanes["d2h"], driver, stalled, early)
        store.assemble = self._assemble

    @property
    def rank(self) -> int:
        return self.collectives.mesh.rank

    @property
    def ranks(self) -> int:
        return self.collectives.mesh.size

    @property
    def parts(self) -> int:
        """Parts of the experts of a block, on different ranks."""
        return self.collectives.mesh.ranks.expert_parallel

    def of_part(self, what: str, mine: torch.Tensor, part: int, receivers: Collection[int]) -> torch.Tensor:
        """What a part of the experts has where this rank has `mine`, of the same shape; without meaning where this rank
        is none of the `receivers`. The first rank of the part sends; `what` names it."""
        ranks, found = self.collectives.mesh.ranks, mine
        sender = ranks.tensor_parallel * part
        sends = [(rank, mine) for rank in receivers if self.rank == sender and ranks.expert_part(rank) != part]
        receives = []
        if self.collectives.mesh.expert_index != part and self.rank in receivers:
            found = torch.empty_like(mine)
            receives = [(sender, found)]
        self.collectives.on_all_ranks(what, lambda: self.collectives.transport.trade(sends, receives))
        return found

    @property
    def arrivals(self) -> Gradients | Reducer:
        """Where gradients go from autograd."""
        return self._reducer or self._gradients

    def when_flushed(self, bring: Callable[[UnitGradient, bool], None]) -> None:
        """Have `bring` told of gradients that wait for a buffer to be reduced to."""
        if self._reducer is not None:
            self._reducer.bring = bring

    def flush(self, last: bool = False) -> None:
        """Reduce what has arrived since the last time."""
        if self._reducer is not None:
            self._reducer.flush(last)

    def announce(self, what: str, value: T) -> list[T]:
        """Every rank's value, which each of them gives at the same point of its program."""
        found: list[T] = []
        self.collectives.on_all_ranks(what, lambda: found.extend(self.collectives.transport.announce(value)))
        return found

    def of_each_forward(self, what: str, value: T) -> list[T]:
        """As `announce`, of those ranks that run every block together: where experts are divided all, else those that
        divide tensors, else this one."""
        mesh = self.collectives.mesh
        if mesh.ranks.expert_parallel > 1:
            return self.announce(what, value)
        said = [value] * mesh.ranks.tensor_parallel
        if len(said) > 1:
            dist.all_gather_object(said, value, group=mesh.tensor.get_group())
        return said

    def gather(self, unit: LiveUnit, weights: torch.Tensor, own: Handle, free: Event) -> Handle:
        """Complete a lease of this rank's slice, if ranks have slices; see `Gathering.gather`."""
        if not self._shards.is_cut(unit.spec, WEIGHT):
            return own
        return self._gathering.gather(unit, weights, own, free)

    def share(self, record: UnitGradient) -> None:
        """Have all of a unit's new weights here, once this rank has updated what it updates of them."""
        if record.shown is not record.updated and not record.sharing:
            record.sharing = True
            self._gathering.share(record).then(record.shown.finish)

    def parameter_square_sums(self, what: str, terms: Mapping[int, UnitGradient]) -> dict[int, list[float]]:
        """Unit -> the square sum of each of its parameters' gradients, over all ranks.

        All ranks ask for it at the same point, as for `norm_terms`. Raises UsageError, on all of them, where some have
        gradients that others do not show yet, or experts are divided.
        """
        if self.parts > 1:
            raise UsageError(f"Ranks that divide experts have gradients of other parameters each: {_INSTEAD}.")
        self.flush()
        trained = [(unit, slot) for unit in self._units for slot in range(unit.trainable)]
        said: list[tuple[bool, list[float]]] = []

        def work() -> None:
            shown = [unit.params[slot].grad is not None for unit, slot in trained]
            records = self._marked(terms)
            here = [unit.params[slot].grad is not None for unit, slot in trained]
            sums = [
                records[unit.index].square_sums[slot]
                if unit.index in records and self._shards.counts(unit.spec, slot)
                else 0.0
                for unit, slot in trained
            ]
            said.extend(self.collectives.transport.announce((shown != here, sums)))

        self.collectives.on_all_ranks(what, work, step=True)
        if any(differs for differs, _ in said):
            raise UsageError(f"Ranks have gradients of different parameters, so their norms differ: {_INSTEAD}.")
        found: dict[int, list[float]] = {}
        for number, (unit, _) in enumerate(trained):
            found.setdefault(unit.index, []).append(math.fsum(sums[number] for _, sums in said))
        return found

    def norm_terms(
        self,
        what: str,
        terms: Mapping[int, UnitGradient],
        square_sums: SquareSums,
        factors: Mapping[tuple[int, int], float],
    ) -> NormTerms:
        """What the gradient's norm is the root of the sum of, of all ranks, and the first parameter that is not finite.

        All ranks ask for it at the same point (`what` says which), and whatever was asked for before is done then.
        `terms` are gradients whose update has been queued; the others of this step are found when all ranks are there.
        `factors` has what gradients have been multiplied by, by unit and slot. Raises UsageError, on all ranks, where
        they differ.
        """
        self.flush()
        found: list[NormTerms] = []
        alike: list[bool] = []
        changed = {key: factor for key, factor in factors.items() if factor != 1.0}

        def work() -> None:
            records = self._marked(terms)
            mine = [[*filter(math.isfinite, sums)] for sums in square_sums(records.values(), self._shards.counts)]
            bad = ((at[0], r.unit.index, at[1]) for r in records.values() if (at := r.non_finite()))
            by_rank = self.collectives.transport.announce((mine, min(bad, default=None), changed))
            alike.append(all(its == changed for *_, its in by_rank))
            of_groups = [[*chain(*of_ranks)] for of_ranks in zip(*(sums for sums, *_ in by_rank), strict=True)]
            first = min((bad for _, bad, _ in by_rank if bad is not None), default=None)
            found.append(NormTerms(of_groups, None if first is None else self._units[first[1]].name(first[2])))

        self.collectives.on_all_ranks(what, work, step=True)
        if not alike[0]:
            raise UsageError(f"Ranks have multiplied their gradients by different numbers: {_INSTEAD}.")
        return found[0]

    def drop_gradients(self) -> None:
        """Forget gradients that no step has used, on every rank at once."""
        if self._reducer is None or (self._reducer.is_empty and not self._gradients.records()):
            return
        self._reducer.drop()
        self.collectives.on_all_ranks("optimizer.zero_grad() with gradients to drop", lambda: None, step=False)

    def close(self) -> None:
        """Leave the others."""
        self.collectives.close()
        self._gathering.close()

    def _marked(self, terms: Mapping[int, UnitGradient]) -> dict[int, UnitGradient]:
        """The gradients of this step, `terms` and those still waiting, by unit, all of which parameters show now."""
        records = {**terms, **{r.unit.index: r for r in self._gradients.records()}}
        for record in records.values():
            self._mark(record)
        return records

    def _mark(self, record: UnitGradient) -> None:
        """Let parameters show a gradient that has arrived on other ranks only: this step updates them."""
        unit = record.unit
        for slot in record.present:
            if not record.arrivals[slot]:
                unit.params[slot].grad = unit.markers[slot]

    def _assemble(self, spec: UnitSpec, state: StateSpec, start: int, out: torch.Tensor) -> None:
        """Elements of a state from `start` on: this rank's lie in `out`, the others' come."""
        group, stop = self.collectives.sharers(spec), start + out.numel()
        by_place = [self._shards.held(spec, state.name, rank) for rank in group.ranks]

        def work() -> None:
            for spans in zip_longest(*by_place, fillvalue=Span(start, start)):
                parts = [span.within(start, stop) or Span(start, start) for span in spans]
                group.gather(out, [(part.start - start, part.stop - start) for part in parts])

        self.collectives.on_all_ranks(f"reading {state.name} of unit {spec.index} from element {start}", work)
