"""Searches for the fastest of several simulated plans for one model and machine."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pagoda.errors import BudgetError
from pagoda.forecast.problem import Problem
from pagoda.memory.page import PAGE_ALIGN, PAGE_BYTES
from pagoda.memory.sizes import format_bytes
from pagoda.plan.device_updates import why_not_on_device
from pagoda.plan.lanes import LaneName
from pagoda.plan.layout import GRAD
from pagoda.plan.options import DEFAULT_SPLIT, Options
from pagoda.plan.placement import VERSIONS
from pagoda.plan.planner import Plan
from pagoda.plan.tiers import DEVICE
from pagoda.simulate.rates import Rates
from pagoda.simulate.timeline import Timeline

USUAL = "the usual plan"
_HOME = "what the device has left is home to whole units"
_FACTORS = (0.5, 2)
"""Unit limits and page sizes that are tried, as multiples of the default."""
_MOST_UPDATES = 0.75
"""Share of updates on the device that is tried if the device is also home to a part of their states."""
_SPECULATED = 0.6, 0.4
"""Values of `split.device_speculated_share` that are tried beside the default."""
_WHOLE = 2
"""Number of kinds of plans that are tried on the whole model after the comparison on a part of the layers."""
_WORTH = 0.03
"""A plan replaces the default only if it is faster by this share. Forecasts are off by 4.5% in the median, so smaller
differences do not show which plan is faster."""


@dataclass(frozen=True)
class Candidate:
    """A plan and its simulated step."""

    name: str
    options: Options
    plan: Plan
    timeline: Timeline

    @property
    def step_s(self) -> float:
        return self.timeline.step_s


@dataclass(frozen=True)
class Choice:
    """The result of a search."""

    best: Candidate
    others: tuple[Candidate, ...]
    """The other plans that fit, fastest first."""

    @property
    def simulated(self) -> tuple[str, ...]:
        """Why this plan was chosen: which lane binds it, and how much slower the next best is."""
        best = self.best
        lane = best.timeline.binding_lane
        bound = f"A step takes {best.step_s:.3g} s; the lane that binds is {lane}"
        stall = best.timeline.stall_s.get(lane)
        chosen = [f"{bound} (compute waits {stall:.3g} s for it)." if stall else f"{bound}."]
        if self.others:
            fastest = self.others[0]
            more = fastest.step_s / best.step_s - 1
            takes = f"takes {abs(more):.1%} {'longer' if more > 0 else 'less'}" if abs(more) >= 0.0005 else "is as fast"
            kept = f", too little to leave {USUAL}" if best.name == USUAL and -_WORTH <= more <= -0.0005 else ""
            chosen.append(
                f"Of {len(self.others) + 1} plans that fit: {best.name}. The fastest other {takes}{kept}: "
                f"{fastest.name}."
            )
        return tuple(chosen)

    def with_times(self, problem: Problem) -> "Choice":
        """The same choice, simulated with the compute times of another problem."""
        plans = [replace(c, timeline=problem.simulated(c.plan)) for c in (self.best, *self.others)]
        return _chosen(plans, plans[0])


def usual(problem: Problem) -> Choice:
    """The default plan of `make_plan`, without a search. Raises BudgetError if it does not fit."""
    plan = problem.plan()
    return Choice(Candidate(USUAL, problem.options, plan, problem.simulated(plan)), ())


def search(problem: Problem) -> Choice:
    """Find the fastest plan that fits the problem's budgets, by simulation.

    Options that the problem fixes stay fixed. The default plan of `make_plan` is always tried, and stays unless another
    plan is clearly faster. Open options are tried one after another, each on top of the fastest plan so far: the unit
    limit, the page size, the share of updates on the device, the share of speculative ones among them, and in the end
    whether activations take RAM before old states do.
    The search ends once no plan can be clearly faster, because compute alone takes that long. Of plans that are about
    as fast, one in which a separate device is home to units is preferred: what its memory holds need not move.
    If there are many units, kinds of plans are compared on a part of the layers, and the fastest two are then tried on
    all layers.

    Raises BudgetError if the default plan does not fit.
    """
    default = usual(problem).best
    part = problem.to_compare(default.plan)
    may_be_home = _may_update_there(problem, default)
    found = [default]
    if _is_best(problem, default) or part is problem:
        _compare(problem, found)
    else:
        kinds: list[Candidate] = []
        _try(kinds, part, USUAL)
        if kinds:  # else not even the usual plan fits what the part has of the tiers
            _compare(part, kinds)
        for kind in sorted(kinds, key=lambda kind: kind.step_s)[:_WHOLE]:
            if kind.name != USUAL:
                _try(found, replace(problem, options=kind.options), kind.name)
    if may_be_home and all(candidate.name != _HOME for candidate in found):
        _try(found, replace(problem, options=_with_split(default, device_home_share=1.0)), _HOME)
    for name, options in _room_for_activations(problem, found):
        _try(found, replace(problem, options=options), name)
    fastest = _fastest(found)
    if fastest.step_s < default.step_s * (1 - _WORTH):
        return _chosen(found, fastest)
    home = next((candidate for candidate in found if candidate.name == _HOME), default)
    return _chosen(found, home if home.step_s <= default.step_s else default)


def _compare(problem: Problem, found: list[Candidate]) -> None:
    """Try all other plans and add them to the default one."""
    fastest = default = found[0]
    for variations in (_unit_limits, _page_sizes, _device_updates, _speculated_shares):
        for name, options in variations(problem, fastest):
            if _is_best(problem, _fastest(found)):
                return
            _try(found, replace(problem, options=options), name if fastest is default else f"{fastest.name}, {name}")
        fastest = _fastest(found)


def _is_best(problem: Problem, fastest: Candidate) -> bool:
    """Whether no plan can be faster than this one by more than `_WORTH`."""
    return problem.bound_s >= fastest.step_s * (1 - _WORTH)


def _try(found: list[Candidate], problem: Problem, name: str) -> None:
    """Add a plan if it fits and differs from the earlier ones."""
    try:
        plan = problem.plan()
    except BudgetError:
        return
    if all((c.plan.layout, c.plan.placement) != (plan.layout, plan.placement) for c in found):
        found.append(Candidate(name, problem.options, plan, problem.simulated(plan)))


def _with_split(candidate: Candidate, **changes: Any) -> Options:
    return replace(candidate.options, split=replace(candidate.options.split or DEFAULT_SPLIT, **changes))


def _may_update_there(problem: Problem, candidate: Candidate) -> bool:
    """Whether a separate device may update units and be home to some."""
    fixed, plan = problem.options, candidate.plan
    return fixed.split is None and why_not_on_device(plan.layout, fixed, plan.budgets.device) is None


def _unit_limits(problem: Problem, fastest: Candidate) -> Iterator[tuple[str, Options]]:
    if problem.options.unit_limit is None:
        largest = max(map(fastest.plan.layout.weight_bytes, fastest.plan.units))
        for factor in _FACTORS:
            limit = int(largest * factor)
            yield f"units of at most {format_bytes(limit)}", replace(fastest.options, unit_limit=limit)


def _device_updates(problem: Problem, fastest: Candidate) -> Iterator[tuple[str, Options]]:
    """Shares of the updates that run on a separate device: the share that it completes while the CPU does the rest, and
    smaller shares, because compute needs the link too."""
    plan = fastest.plan
    if not _may_update_there(problem, fastest):
        return
    rates, n = Rates(problem.hardware, work=problem.work), 1 << 20
    unit = max(plan.units, key=lambda unit: unit.trainable_numel)
    passing = int(n * sum(plan.layout.bytes_per_parameter.values()))
    on_device = max(
        rates.seconds(LaneName.H2D, passing + n * plan.layout.itemsize(unit, GRAD)),
        rates.seconds(LaneName.D2H, passing),
        rates.device_update_seconds(unit, n, -(-n // plan.layout.block_elements)),
    )
    on_cpu = rates.update_seconds(unit, n)
    even = on_cpu / (on_cpu + on_device)
    yield _HOME, _with_split(fastest, device_home_share=1.0)
    for share in filter(None, (round(even, 2), round(even / 2, 2))):
        yield f"{share:.0%} of the updates on the device", _with_split(fastest, device_update_share=share)
    for share in sorted({round(even, 2), _MOST_UPDATES, 1.0} - {0.0}):
        name = f"{share:.0%} of the updates on the device, which is home to what moves most of their states"
        yield name, _with_split(fastest, device_update_share=share, device_home_share=1.0)


def _speculated_shares(problem: Problem, fastest: Candidate) -> Iterator[tuple[str, Options]]:
    """Smaller shares of speculative updates. If the link binds, fewer are enough to keep it busy during backward."""
    if problem.options.split is None and fastest.plan.placement.pages(DEVICE, VERSIONS):
        for share in _SPECULATED:
            name = f"with room there for a second version of {share:.0%} of their weights"
            yield name, _with_split(fastest, device_speculated_share=share)


def _page_sizes(problem: Problem, fastest: Candidate) -> Iterator[tuple[str, Options]]:
    if problem.options.page_bytes is None:
        for factor in _FACTORS:
            page = int(fastest.plan.page_bytes * factor)
            if PAGE_ALIGN <= page <= PAGE_BYTES:
                yield f"pages of {format_bytes(page)}", replace(fastest.options, page_bytes=page)


def _room_for_activations(problem: Problem, found: Sequence[Candidate]) -> Iterator[tuple[str, Options]]:
    """If activations go to SSD, since RAM has old states for updates that may be called off: no such updates. The
    fastest plan of each split is tried."""
    of_split: dict[Any, Candidate] = {}
    for candidate in sorted(found, key=lambda candidate: candidate.step_s):
        of_split.setdefault(candidate.options.split, candidate)
    for candidate in of_split.values():
        plan = candidate.plan
        if problem.options.speculate and plan.placement.speculated and plan.activations.peak.ssd:
            named = "" if candidate.name == USUAL else f"{candidate.name}, "
            yield f"{named}activations in RAM in place of old states", replace(candidate.options, speculate=False)


def _fastest(candidates: Iterable[Candidate]) -> Candidate:
    return min(candidates, key=lambda candidate: candidate.step_s)


def _chosen(plans: Iterable[Candidate], best: Candidate) -> Choice:
    others = (candidate for candidate in plans if candidate is not best)
    return Choice(best, tuple(sorted(others, key=lambda candidate: candidate.step_s)))
