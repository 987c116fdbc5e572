"""RankGroup: the gradients of a step, of all ranks."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from pagoda.errors import UsageError
from pagoda.parameters.unit import LiveUnit
from pagoda.plan.collective import reduce_buffers
from pagoda.plan.units import UnitSpec
from pagoda.ranks.gathering import Gathering
from pagoda.ranks.giving import Giving
from pagoda.ranks.mean import Buffers
from pagoda.ranks.reducing import Reducer
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
Factors = Mapping[tuple[int, int], float]
"""The factors by which gradients have been multiplied, by unit and slot."""


@dataclass(eq=False, repr=False)
class RankGroup:
    """What ranks do together with the gradients of a step: they add them up, take norms of all, and drop them. The
    group also gives other ranks this rank's weights."""

    _gathering: Gathering
    _store: Store
    _units: Sequence[LiveUnit]
    _gradients: GradientBuffers
    _device: Device
    _copies: Lane
    _executor: Executor
    _tell: Callable[..., None]
    """Tells the scheduler an event of compute."""
    _reducer: Reducer | None = None
    """None if no two ranks have gradients of the same elements."""

    def __post_init__(self) -> None:
        self.collectives, self._shards = self._gathering.collectives, self._store.shards
        self.mesh, buffers, gradients = self.collectives.mesh, self._open_buffers(), self._gradients
        if buffers is not None:
            self._reducer = Reducer(
                self.collectives, gradients, buffers, self._device, self._copies, self._executor, self._tell
            )
        self.arrivals: GradientBuffers | Reducer = self._reducer or gradients
        """The receiver of autograd's gradients."""
        landing = None if buffers is None else buffers.landing
        self._giving = Giving(self._gathering, self._store, self._units, self._executor, landing)

    def take_memory(self) -> None:
        """Take the memory that the store's plan, which is new, has for communication. Nothing is on its way."""
        buffers = self._open_buffers()
        if buffers is not None:
            assert self._reducer is not None, "all plans of a run have buffers, or none"
            self._reducer.use(buffers)
        self._gathering.take_memory()
        self._giving.take_memory(None if buffers is None else buffers.landing)

    def _open_buffers(self) -> Buffers | None:
        store = self._store
        if not reduce_buffers(store.plan.layout).pages:
            return None
        dtypes = {unit.index: self._gradients.arriving(unit) for unit in self._units}
        return Buffers.open(store.device or store.host, store.plan.layout, dtypes)

    def arrived(self, gradient: UnitGradient, last: bool) -> None:
        """Autograd has made a gradient, and `arrivals` has it. Reduce the unit's gradient if that is complete."""
        if gradient.complete:
            self.flush(last)

    def flush(self, last: bool = False) -> None:
        """Reduce what has arrived since the last time."""
        if self._reducer is not None:
            self._reducer.flush(last)

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

    def norm_terms(self, what: str, square_sums: SquareSums, factors: Factors) -> tuple[list[list[float]], str | None]:
        """The square sums of all ranks, by param group, and the name of the first parameter whose gradient is NaN or
        infinite on some rank.

        All ranks call this at the same point, which `what` names; earlier collectives have ended by then. The step's
        gradients are looked up once all ranks are there. Raises UsageError on all ranks if `factors` differ.
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
        self._giving.close()

    def _marked(self) -> dict[int, UnitGradient]:
        """The gradients of this step by unit. Parameters show all of them from now on, also those that have arrived on
        other ranks only: this step updates these, too."""
        gradients = self._gradients.of_step()
        for gradient in gradients.values():
            for slot in gradient.present:
                if slot not in gradient.unit.marked:
                    gradient.unit.mark(slot)
        return gradients
