"""RankGroup: the engine's interface to the other ranks."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import TypeVar

import torch
import torch.distributed as dist

from pagoda.errors import UsageError
from pagoda.mesh.mesh import Mesh
from pagoda.parameters.unit import LiveUnit
from pagoda.plan.collective import reduce_buffers
from pagoda.plan.slices import Span
from pagoda.plan.units import UnitSpec
from pagoda.ranks.collective import Collectives
from pagoda.ranks.gathering import Gathering
from pagoda.ranks.mean import Buffers
from pagoda.ranks.reducing import Reducer
from pagoda.ranks.transport import Transport
from pagoda.runtime.device import Device
from pagoda.runtime.executor import Executor
from pagoda.runtime.gradients import GradientBuffers, UnitGradient
from pagoda.runtime.lanes import Lane
from pagoda.runtime.store import Store

_INSTEAD = "clip with wrap(max_grad_norm=...), or with optimizer.clip_grad_norm_(max_norm) on every rank"
T = TypeVar("T")

Counts = Callable[[UnitSpec, int], bool]
"""Whether a norm counts this rank's elements of a unit's parameter."""
SquareSums = Callable[[Iterable[UnitGradient], Counts], list[list[float]]]
"""Returns the square sums of the gradients of a step, by param group."""


@dataclass(eq=False, repr=False)
class RankGroup:
    """All communication of one engine with the engines of other ranks, in the order that `Order` decides."""

    mesh: Mesh
    _transport: Transport
    _store: Store
    _units: Sequence[LiveUnit]
    _gradients: GradientBuffers
    _device: Device
    _lanes: dict[str, Lane]
    _executor: Executor
    _reducer: Reducer | None = None
    """None if no two ranks have gradients of the same elements."""

    def __post_init__(self) -> None:
        store, units, device, driver, lanes = self._store, self._units, self._device, self._executor.driver, self._lanes
        self._shards = store.shards
        self._transport.connect(device.torch_device)
        shards, report = store.shards, self._gradients.meter.worked
        self.collectives = Collectives(self.mesh, self._transport, shards, device, units, driver.scheduler, report)
        buffers = self._open_buffers()
        if buffers is not None:
            self._reducer = Reducer(self.collectives, self._gradients, buffers, device, lanes["d2h"], driver)
        self.gathering = Gathering(self.collectives, store, units, self._executor, lanes)
        self.gathering.take_memory(None if buffers is None else buffers.landing)
        store.assemble = self._assemble

    def take_memory(self) -> None:
        """Take the memory that the store's plan, which is new, has for communication. Nothing is on its way."""
        buffers = self._open_buffers()
        if buffers is not None:
            assert self._reducer is not None, "all plans of a run have buffers, or none"
            self._reducer.use(buffers)
        self.gathering.take_memory(None if buffers is None else buffers.landing)

    def _open_buffers(self) -> Buffers | None:
        store = self._store
        if not reduce_buffers(store.plan.layout).pages:
            return None
        dtypes = {unit.index: self._gradients.arriving(unit) for unit in self._units}
        return Buffers.open(store.device or store.host, store.plan.layout, dtypes)

    def of_part(self, what: str, mine: torch.Tensor, part: int, receivers: Collection[int]) -> torch.Tensor:
        """A part's counterpart of `mine`, which is a tensor of this rank's part of the experts. The first rank of the
        part sends it to the `receivers`; on other ranks the result has no meaning. `what` names it in errors."""
        mesh, found = self.mesh, mine
        sender = mesh.ranks.tensor_parallel * part
        sends = [(rank, mine) for rank in receivers if mesh.rank == sender and mesh.ranks.expert_part(rank) != part]
        receives = []
        if mesh.expert_index != part and mesh.rank in receivers:
            found = torch.empty_like(mine)
            receives = [(sender, found)]
        self.collectives.on_all_ranks(what, lambda: self.collectives.transport.trade(sends, receives))
        return found

    @property
    def arrivals(self) -> GradientBuffers | Reducer:
        """The receiver of autograd's gradients."""
        return self._reducer or self._gradients

    def when_flushed(
        self, announce: Callable[[UnitGradient, bool], None], refuse: Callable[[UnitGradient], None]
    ) -> None:
        """Call `announce` with each gradient that ranks will add up, and `refuse`, which raises, with one for whose
        mean there is no room."""
        if self._reducer is not None:
            self._reducer.announce, self._reducer.refuse = announce, refuse

    def flush(self, last: bool = False) -> None:
        """Reduce what has arrived since the last time."""
        if self._reducer is not None:
            self._reducer.flush(last)

    def announce(self, what: str, value: T) -> list[T]:
        """Every rank's value; all ranks call this at the same point of their programs."""
        return self.collectives.on_all_ranks(what, lambda: self.collectives.transport.announce(value))

    def of_each_forward(self, what: str, value: T) -> list[T]:
        """As `announce`, but only of the ranks that run every block together: all ranks if experts are divided, else
        those that divide tensors, else this one."""
        if self.mesh.ranks.expert_parallel > 1:
            return self.announce(what, value)
        said = [value] * self.mesh.ranks.tensor_parallel
        if len(said) > 1:
            dist.all_gather_object(said, value, group=self.mesh.tensor.get_group())
        return said

    def parameter_square_sums(self, what: str) -> dict[int, list[float]]:
        """Unit -> the square sum of each of its parameters' gradients, over all ranks.

        All ranks call this at the same point, as with `norm_terms`. Raises UsageError on all of them if some have
        gradients that others do not show yet, or if experts are divided.
        """
        if self.mesh.ranks.expert_parallel > 1:
            raise UsageError(f"Ranks that divide experts have gradients of other parameters each: {_INSTEAD}.")
        self.flush()
        trained = [(unit, slot) for unit in self._units for slot in range(unit.trainable)]

        def work() -> list[tuple[bool, list[float]]]:
            shown = [unit.has_gradient(slot) for unit, slot in trained]
            gradients = self._marked()
            here = [unit.has_gradient(slot) for unit, slot in trained]
            sums = [
                gradients[unit.index].square_sums[slot]
                if unit.index in gradients and self._shards.counts(unit.spec, slot)
                else 0.0
                for unit, slot in trained
            ]
            return self.collectives.transport.announce((shown != here, sums))

        said = self.collectives.on_all_ranks(what, work, step=True)
        if any(differs for differs, _ in said):
            raise UsageError(f"Ranks have gradients of different parameters, so their norms differ: {_INSTEAD}.")
        found: dict[int, list[float]] = {}
        for number, (unit, _) in enumerate(trained):
            found.setdefault(unit.index, []).append(math.fsum(sums[number] for _, sums in said))
        return found

    def norm_terms(
        self, what: str, square_sums: SquareSums, factors: Mapping[tuple[int, int], float]
    ) -> tuple[list[list[float]], str | None]:
        """The square sums of all ranks, by param group, and the name of the first parameter whose gradient is NaN or
        infinite on some rank.

        All ranks call this at the same point, which `what` names; earlier collectives have ended by then. The step's
        gradients are looked up once all ranks are there. `factors` has the factors by which gradients have been
        multiplied, by unit and slot. Raises UsageError on all ranks if they differ.
        """
        self.flush()
        changed = {key: factor for key, factor in factors.items() if factor != 1.0}

        def work() -> tuple[bool, list[list[float]], str | None]:
            all_sums = square_sums(self._marked().values(), self._shards.counts)
            mine = [[*filter(math.isfinite, sums)] for sums in all_sums]
            by_rank = self.collectives.transport.announce((mine, self._gradients.non_finite(), changed))
            alike = all(its == changed for *_, its in by_rank)
            of_groups = [[*chain(*of_ranks)] for of_ranks in zip(*(sums for sums, *_ in by_rank), strict=True)]
            first = min((bad for _, bad, _ in by_rank if bad is not None), default=None)
            return alike, of_groups, None if first is None else self._units[first[1]].name(first[2])

        alike, square_sums_of_all, non_finite = self.collectives.on_all_ranks(what, work, step=True)
        if not alike:
            raise UsageError(f"Ranks have multiplied their gradients by different numbers: {_INSTEAD}.")
        return square_sums_of_all, non_finite

    def drop_gradients(self) -> bool:
        """All ranks drop gradients that no step has used. Returns whether this rank drops its gradients now. A rank
        that has made none may have those of other ranks, and drops them in the DROP of these."""
        if self._reducer is None:
            return True
        made = any(gradient.by_hand or any(gradient.arrivals) for gradient in self._gradients.untaken())
        if made:
            self._reducer.drop()
        self.collectives.drop_gradients(made)
        return made

    def close(self) -> None:
        """Leave the others."""
        self.collectives.close()
        self.gathering.close()

    def _marked(self) -> dict[int, UnitGradient]:
        """The gradients of this step by unit. Parameters show all of them from now on, also those that have arrived on
        other ranks only: this step updates these, too."""
        gradients = self._gradients.of_step()
        for gradient in gradients.values():
            for slot in gradient.present:
                if slot not in gradient.unit.marked:
                    gradient.unit.mark(slot)
        return gradients

    def _assemble(self, spec: UnitSpec, state: str, start: int, out: torch.Tensor) -> None:
        """Complete `out`, a state's elements from `start` on, in which this rank's elements lie."""
        group, stop = self.collectives.sharers(spec), start + out.numel()
        by_place = [self._shards.held(spec, state, rank) for rank in group.ranks]

        def work() -> None:
            for spans in zip_longest(*by_place, fillvalue=Span(start, start)):
                parts = [span.within(start, stop) or Span(start, start) for span in spans]
                group.gather(out, [(part.start - start, part.stop - start) for part in parts])

        self.collectives.on_all_ranks(f"reading {state} of unit {spec.index} from element {start}", work)
