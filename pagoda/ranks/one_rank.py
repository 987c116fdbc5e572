"""OneRank: a process that is alone in its stage."""

from collections.abc import Sequence
from typing import TypeVar

import torch

from pagoda.mesh.mesh import Mesh
from pagoda.parameters.unit import LiveUnit
from pagoda.plan.units import UnitSpec
from pagoda.ranks.rank_group import Factors, SquareSums
from pagoda.runtime.gradients import GradientBuffers

T = TypeVar("T")


class OneRank:
    """Stands in for `Collectives`, `Gathering` and `RankGroup` where there are no other ranks. It has all of every
    state, so nothing is gathered or shared, and all answers are its own."""

    gather = share = None

    def __init__(self, mesh: Mesh, units: Sequence[LiveUnit], gradients: GradientBuffers) -> None:
        self.mesh = mesh
        self._units = units
        self.arrivals = gradients
        """The receiver of autograd's gradients."""

    def _nothing(self, *_: object) -> None:
        """There is nobody to tell, to wait for or to leave, and nothing to reduce."""

    begin_forward = end_forward = begin_access = agree_to_change = arrived = flush = take_memory = close = _nothing

    def announce(self, what: str, value: T) -> list[T]:
        """This rank's value."""
        return [value]

    of_each_forward = announce

    def of_part(self, what: str, mine: torch.Tensor, part: int, receivers: object) -> torch.Tensor:
        """This rank's tensor, as there is one part."""
        return mine

    def completed(self, spec: UnitSpec, state: str, start: int, mine: torch.Tensor) -> torch.Tensor:
        """The elements of this rank, which has all."""
        return mine

    def drop_gradients(self) -> bool:
        """Whether this rank drops its gradients now."""
        return True

    def norm_terms(self, what: str, square_sums: SquareSums, factors: Factors) -> tuple[list[list[float]], str | None]:
        """The square sums by param group, and the name of the first parameter whose gradient is NaN or infinite."""
        bad = self.arrivals.non_finite()
        sums = square_sums(self.arrivals.of_step().values(), lambda _unit, _slot: True)
        return sums, None if bad is None else self._units[bad[1]].name(bad[2])
