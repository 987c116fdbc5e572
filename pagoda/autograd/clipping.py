"""The norms of a step's gradients, and the factors that clip them.

A gradient's square sum was taken on its way to its buffer, and the update multiplies by its factor. So neither a norm
nor clipping reads a gradient.
"""

import math
from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from pagoda.autograd.accesses import event
from pagoda.autograd.gradient_values import TOO_LATE
from pagoda.autograd.loss_scale import not_scaled
from pagoda.errors import NonFiniteGradientError, UsageError
from pagoda.ranks.rank_group import Counts
from pagoda.ranks.stages import Stages, StepTerms
from pagoda.runtime.gradients import UnitGradient, non_finite_error
from pagoda.runtime.next_update import Groups

if TYPE_CHECKING:
    from pagoda.autograd.stepper import Stepper


class Norms(NamedTuple):
    """2-norms of a step's gradients before clipping. None if there are no gradients."""

    total: float | None
    by_group: tuple[float | None, ...]
    """The norm of each param group."""


class Clipping:
    """Clips the gradients of one step."""

    def __init__(self, stepper: "Stepper", groups: Groups, stages: Stages | None) -> None:
        self._stepper, self._groups, self._stages = stepper, groups, stages
        self._accesses, self._gradients = stepper.accesses, stepper.gradients
        self.compute_lock = stepper.accesses.compute_lock
        self._rank_group, self._scaler, self._values = stepper.rank_group, stepper.scaler, stepper.values

    def norms(self, asked_by: str) -> Norms:
        """2-norms of this step's gradients. Waits until all have arrived in their extents, on every rank.

        Every rank must ask at the same point of its program, which `asked_by` names in errors. Raises
        NonFiniteGradientError if a gradient is NaN or infinite.
        """
        self._rank_group.flush()
        self._stepper.settle(self._gradients.of_step().values())
        square_sums, first = self._rank_group.norm_terms(asked_by, self._square_sums, self._values.factors)
        if self._stages is not None:
            mine = StepTerms(square_sums, first, frozenset(self.factors()), self._scaler.used)
            square_sums, first, _, is_scaled = self._stages.all_terms(asked_by, mine)
            if self._scaler.active and any(square_sums) and not is_scaled:
                raise not_scaled("The last stage")
        if first is not None:
            raise non_finite_error(first)
        return Norms(self._norm([*chain(*square_sums)]), tuple(map(self._norm, square_sums)))

    @event
    def clip(self, limit: float) -> float:
        """Clip this step's gradients. Returns their norm before clipping."""
        if not limit >= 0:
            raise UsageError(f"optimizer.clip_grad_norm_ was called with max_norm={limit}: it must be 0 or more.")
        if self._accesses.plan.options.update_during_backward:
            raise UsageError(TOO_LATE.format("optimizer.clip_grad_norm_"))
        try:
            total = self.norms("optimizer.clip_grad_norm_()").total
        except NonFiniteGradientError:
            if not self._scaler.skips:
                raise
            return math.inf  # `step` finds it too, and is skipped
        return 0.0 if total is None else self.clip_to(limit, total)

    def clip_to(self, limit: float, total: float) -> float:
        """Clip gradients to norm `limit`. `total` is their norm without factors. Returns their norm with factors,
        before clipping."""
        shown = self._shown()
        factors = self.factors()
        largest = max(map(abs, factors), default=1.0)
        if largest == 0:
            return 0.0
        # Relative to the largest factor, so that gradients with equal factors are clipped as if there were none.
        relative = [factor / largest for factor in factors]
        norm = total
        if any(abs(each) != 1.0 for each in relative):
            if self._rank_group.mesh.size > 1 or self._stages is not None:
                raise UsageError(
                    "On several ranks, the norm of gradients that were multiplied by different numbers is not known: "
                    "leave out wrap(max_grad_norm=...) and optimizer.clip_grad_norm_, or the multiplication."
                )
            sums = [
                each**2 * gradient.square_sums[slot] for each, (gradient, slot) in zip(relative, shown, strict=True)
            ]
            norm = self._norm(sums) or 0.0
        clipped = min(largest, limit / (norm + 1e-6))
        for each, (gradient, slot) in zip(relative, shown, strict=True):
            self._values.factors[gradient.unit.index, slot] = each * clipped
        return norm * largest

    def factors(self) -> list[float]:
        """The factors of the gradients that `step()` would use now."""
        return [self._values.factor(gradient.unit, slot) for gradient, slot in self._shown()]

    def _shown(self) -> list[tuple[UnitGradient, int]]:
        """The gradients that `step()` would use now."""
        return [(gradient, slot) for gradient in self._gradients.untaken() for slot in self._used(gradient)]

    def _square_sums(self, gradients: Iterable[UnitGradient], counts: Counts) -> list[list[float]]:
        """By param group, the sums of squares of the gradients that this step uses and a norm counts."""
        by_group: dict[int, list[float]] = {id(group): [] for group in self._groups.all}
        for gradient in gradients:
            for slot in self._used(gradient):
                if not counts(gradient.unit.spec, slot):
                    continue
                by_group[id(self._groups.of(gradient.unit, slot))].append(gradient.square_sums[slot])
        return list(by_group.values())

    def _used(self, gradient: UnitGradient) -> list[int]:
        """Slots of the parameters whose gradient this step uses."""
        if gradient.unit.updated:
            return list(gradient.hypers)
        return [slot for slot in range(gradient.unit.trainable) if gradient.unit.has_gradient(slot)]

    def _norm(self, square_sums: list[float]) -> float | None:
        """The norm for these sums of squares, without the scale of the loss, which is a power of two."""
        return math.sqrt(math.fsum(square_sums)) / self._scaler.scale if square_sums else None
