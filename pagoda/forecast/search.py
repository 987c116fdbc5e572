"""The search: several plans for one model and machine, each simulated, and the fastest one that fits."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from pagoda.config.memory import Split
from pagoda.errors import BudgetError
from pagoda.forecast.problem import Problem
from pagoda.memory.page import PAGE_ALIGN, PAGE_BYTES
from pagoda.memory.sizes import format_bytes
from pagoda.plan.device_updates import state_bytes, why_no_device_updates
from pagoda.plan.layout import GRAD
from pagoda.plan.options import DEFAULT_SPLIT, Options
from pagoda.plan.planner import Plan
from pagoda.simulate.rates import Rates
from pagoda.simulate.timeline import Timeline

USUAL = "the usual plan"
_SPLITS = {
    "gradients stay on SSD for moments": Split(grad_share=0.0),
    "half of the weights stay on SSD for moments": Split(weight_share=0.5),
    "all weights stay on SSD for moments": Split(weight_share=0.0),
    "one lease ahead of what is in use": Split(leases_ahead=1),
    "three leases ahead of what is in use": Split(leases_ahead=3),
    "four leases ahead of what is in use": Split(leases_ahead=4),
    "copies for undoing updates come before moments": Split(undo_first=True),
}
"""What is tried beside the usual split."""
_FACTORS = (0.5, 2)
"""Unit limits and page sizes that are tried, as multiples of what they would be."""
_WHOLE = 2
"""Kinds of plans, found on a part of the layers, that are then tried for all of them."""
_WORTH = 0.01
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
        """The plan's own, then why it was chosen."""
        return (*self.best.plan.reasons, *self.simulated)

    @property
    def simulated(self) -> tuple[str, ...]:
        """Why this plan: what binds it, and what the next best would cost."""
        best = self.best
        lane = best.timeline.binding_lane
        bound = f"A step takes {best.timeline.step_s:.3g} s; the lane that binds is {lane}"
        stall = best.timeline.stall_s.get(lane)
        chosen = [f"{bound} (compute waits {stall:.3g} s for it)." if stall else f"{bound}."]
        if self.others:
            fastest = self.others[0]
            more = fastest.timeline.step_s / best.timeline.step_s - 1
            takes = f"takes {abs(more):.1%} {'longer' if more > 0 else 'less'}" if abs(more) >= 0.0005 else "is as fast"
            kept = f", too little to leave {USUAL}" if best.name == USUAL and -_WORTH <= more <= -0.0005 else ""
            chosen.append(
                f"Of {len(self.others) + 1} plans that fit: {best.name}. The fastest other {takes}{kept}: "
                f"{fastest.name}."
            )
        return tuple(chosen)

    def usual(self) -> "Choice":
        """The same plans, with the one that the planner takes by itself as the best."""
        plans = (self.best, *self.others)
        taken = next(candidate for candidate in plans if candidate.name == USUAL)
        return Choice(taken, _fastest_first(candidate for candidate in plans if candidate is not taken))

    def with_times(self, problem: Problem) -> "Choice":
        """The same choice, simulated with the times of another problem."""
        best, *others = (replace(c, timeline=problem.simulated(c.plan)) for c in (self.best, *self.others))
        return Choice(best, _fastest_first(others))


def search(problem: Problem, options: Options) -> Choice:
    """The fastest of the plans that fit the problem's budgets, by simulation.

    What `options` fixes stays fixed. The usual plan, which `make_plan` gives, is always among those that are tried, and
    stays unless another is clearly faster. What is open is tried one after another, each beside the fastest so far:
    the unit limit, the split of RAM, the page size, how much is updated on the device. Where units are many, kinds of
    plans are compared on a part of the layers, and the fastest two are then made and simulated for all of them. Raises
    BudgetError where the usual plan does.
    """
    usual = _candidate(problem, USUAL, options)
    part = problem.to_compare(usual.plan)
    if part is problem:
        found = _compared(problem, usual)
    else:
        kinds = _kinds(part, options)
        found = [usual]
        for kind in sorted(kinds, key=_step_s)[:_WHOLE]:
            if kind.name != USUAL:
                _add(found, problem, kind.name, kind.options)
    fastest = min(found, key=_step_s)
    best = fastest if _step_s(fastest) < _step_s(usual) * (1 - _WORTH) else usual
    return Choice(best, _fastest_first(c for c in found if c is not best))


def _kinds(part: Problem, options: Options) -> list[Candidate]:
    """Plans for a part of a model; none where not even the usual one fits what it has of the tiers."""
    try:
        return _compared(part, _candidate(part, USUAL, options))
    except BudgetError:
        return []


def _compared(problem: Problem, usual: Candidate) -> list[Candidate]:
    """The usual plan and all others that are tried."""
    found = [usual]
    fastest = usual
    for variations in (_unit_limits, _splits, _copies, _page_sizes, _device_updates):
        for name, tried in variations(problem, usual.options, fastest):
            _add(found, problem, name if fastest is usual else f"{fastest.name}, {name}", tried)
        fastest = min(found, key=_step_s)
    return found


def _add(found: list[Candidate], problem: Problem, name: str, options: Options) -> None:
    """Try a plan, if it fits and is another than those found."""
    try:
        plan = problem.plan(options)
    except BudgetError:
        return
    if all((c.plan.layout, c.plan.placement) != (plan.layout, plan.placement) for c in found):
        found.append(Candidate(name, options, plan, problem.simulated(plan)))


def _candidate(problem: Problem, name: str, options: Options) -> Candidate:
    plan = problem.plan(options)
    return Candidate(name, options, plan, problem.simulated(plan))


def _unit_limits(_: Problem, fixed: Options, fastest: Candidate) -> Iterator[tuple[str, Options]]:
    if fixed.unit_limit is None:
        largest = max(unit.numel for unit in fastest.plan.units) * fastest.plan.layout.weight.dtype.itemsize
        for factor in _FACTORS:
            limit = int(largest * factor)
            yield f"units of at most {format_bytes(limit)}", replace(fastest.options, unit_limit=limit)


def _splits(_: Problem, fixed: Options, fastest: Candidate) -> Iterator[tuple[str, Options]]:
    """Other ways to divide RAM, where not everything fits it."""
    if fixed.split is None and len(fastest.plan.placement.lines) > 1:
        for name, split in _SPLITS.items():
            yield name, replace(fastest.options, split=split)


def _copies(_: Problem, fixed: Options, fastest: Candidate) -> Iterator[tuple[str, Options]]:
    """Speculative updates of what has all its states in RAM, where compute leaves the CPU time for copies of these."""
    split = fastest.options.split or DEFAULT_SPLIT
    if fixed.split is None and fastest.plan.options.may_speculate and not split.undo_in_ram:
        yield (
            "updates of states in RAM are speculative too",
            replace(fastest.options, split=replace(split, undo_in_ram=True)),
        )


def _device_updates(problem: Problem, fixed: Options, fastest: Candidate) -> Iterator[tuple[str, Options]]:
    """Shares of the updates that run on a device of its own: as many as it gets through while the CPU does the others,
    and fewer, since compute wants the link too."""
    plan = fastest.plan
    if fixed.split is not None or why_no_device_updates(plan.layout, fixed, plan.budgets.device) is not None:
        return
    rates, states, n = Rates(problem.hardware), plan.layout.states, 1 << 20
    passing = state_bytes(states, n)
    on_device = max(
        rates.seconds("h2d", passing + n * plan.layout.itemsize(GRAD)),
        rates.seconds("d2h", passing),
        rates.device_update_seconds(n),
    )
    on_cpu = rates.update_seconds(n)
    even = on_cpu / (on_cpu + on_device)
    yield (
        "what the device has left is home to units",
        replace(fastest.options, split=replace(fastest.options.split or DEFAULT_SPLIT, device_home_share=1.0)),
    )
    for share in (round(even, 2), round(even / 2, 2)):
        if not share:
            continue
        split = replace(fastest.options.split or DEFAULT_SPLIT, device_update_share=share)
        yield f"{split.device_update_share:.0%} of the updates on the device", replace(fastest.options, split=split)


def _page_sizes(_: Problem, fixed: Options, fastest: Candidate) -> Iterator[tuple[str, Options]]:
    if fixed.page_bytes is None:
        for factor in _FACTORS:
            page = int(fastest.plan.page_bytes * factor)
            if PAGE_ALIGN <= page <= PAGE_BYTES:
                yield f"pages of {format_bytes(page)}", replace(fastest.options, page_bytes=page)


def _step_s(candidate: Candidate) -> float:
    return candidate.timeline.step_s


def _fastest_first(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    return tuple(sorted(candidates, key=_step_s))
