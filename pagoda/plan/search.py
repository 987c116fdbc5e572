"""The search: several plans for one model and machine, each simulated, and the fastest one that fits."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from pagoda.errors import BudgetError
from pagoda.memory.sizes import format_bytes
from pagoda.optim.adamw import StateSpec
from pagoda.plan.compute import Compute
from pagoda.plan.hardware import Hardware
from pagoda.plan.placement import Budgets, Split
from pagoda.plan.planner import Options, Plan, make_plan
from pagoda.plan.ranks import Ranks
from pagoda.plan.simulate import simulate
from pagoda.plan.timeline import Timeline
from pagoda.plan.units import ModuleSpec

_SPLITS = {
    "weights first, then gradients, then moments": Split(),
    "gradients stay on SSD for moments": Split(grad_share=0.0),
    "half of the weights stay on SSD for moments": Split(weight_share=0.5),
    "all weights stay on SSD for moments": Split(weight_share=0.0),
    "more leases, so that weights are fetched earlier": Split(leases_ahead=4),
}
_LIMIT_FACTORS = (0.5, 2.0)
"""Unit limits that are tried beside the usual one."""
_WORTH = 0.005
"""A plan must be this much faster than the usual one to be taken instead: below that, it is the model's noise."""


@dataclass(frozen=True)
class Candidate:
    """One plan, and the step that the simulator gives it."""

    name: str
    options: Options
    plan: Plan
    timeline: Timeline


@dataclass(frozen=True)
class Choice:
    """What the search found."""

    best: Candidate
    others: tuple[Candidate, ...]
    """The other plans that fit, fastest first."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why this plan: what binds it, and what the next best would cost."""
        best = self.best
        lane = best.timeline.binding_lane
        bound = f"A step takes {best.timeline.step_s:.3g} s; the lane that binds is {lane}"
        stall = best.timeline.stall_s.get(lane)
        chosen = [f"{bound} (compute waits {stall:.3g} s for it)." if stall else f"{bound}."]
        if self.others:
            second = self.others[0]
            more = second.timeline.step_s / best.timeline.step_s - 1
            chosen.append(
                f"Of {len(self.others) + 1} plans that fit: {best.name}. Next best, {more:+.1%}: {second.name}."
            )
        return (*best.plan.reasons, *chosen)


def search(
    root: ModuleSpec,
    states: tuple[StateSpec, ...],
    budgets: Budgets,
    options: Options,
    hardware: Hardware,
    compute: Compute,
    ranks: Ranks | None = None,
    exchanges: Mapping[str, int] | None = None,
) -> Choice:
    """The fastest of the plans that fit `budgets`, by simulation on `hardware`; `ranks` and `exchanges` as for
    `make_plan`.

    What `options` fixes stays fixed. The usual plan, which `make_plan` gives, is always among those that are tried, and
    stays unless another is clearly faster. Raises BudgetError where the usual plan does.
    """

    def candidate(name: str, tried: Options) -> Candidate:
        plan = make_plan(root, states, budgets, tried, ranks, exchanges)
        return Candidate(name, tried, plan, simulate(plan, hardware, compute.of_step(root, plan)))

    usual = candidate("the usual plan", options)
    found = [usual]
    for name, tried in _variations(usual.plan, options):
        try:
            found.append(candidate(name, tried))
        except BudgetError:
            continue
    fastest = min(found, key=lambda candidate: candidate.timeline.step_s)
    best = fastest if fastest.timeline.step_s < usual.timeline.step_s * (1 - _WORTH) else usual
    others = sorted((c for c in found if c is not best), key=lambda candidate: candidate.timeline.step_s)
    return Choice(best, tuple(others))


def _variations(usual: Plan, options: Options) -> Iterator[tuple[str, Options]]:
    """Other unit limits, and other ways to divide RAM where not everything fits it."""
    if options.unit_limit is None:
        largest = max(unit.numel for unit in usual.units) * usual.layout.weight.dtype.itemsize
        for factor in _LIMIT_FACTORS:
            limit = int(largest * factor)
            yield f"units of at most {format_bytes(limit)}", replace(options, unit_limit=limit)
    if len(usual.placement.lines) > 1:
        for name, split in _SPLITS.items():
            if split != options.split:
                yield name, replace(options, split=split)
