"""Advice on what to change. Every line comes from a plan that was simulated with the change."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Any, TypeVar

from pagoda.errors import BudgetError
from pagoda.forecast.activations import activations_of
from pagoda.forecast.forecast import Forecast
from pagoda.forecast.machine import budgets_for
from pagoda.forecast.problem import Problem
from pagoda.forecast.search import Candidate
from pagoda.memory.sizes import format_at_least, format_bytes, format_rate
from pagoda.plan.lanes import LaneName
from pagoda.plan.planner import Plan
from pagoda.plan.tiers import SSD
from pagoda.simulate.hardware import Cpu, Drive, Figure, Hardware, Link, SmallTransfers

_Part = TypeVar("_Part", Hardware, Cpu, Link, Drive, SmallTransfers)
_MOST_LINES = 3
_WORTH = 0.02
"""A smaller gain gets no line."""
_ROOM = 1 << 60
_EIGHT_BIT = "8-bit moments (--moments 8bit)"


@dataclass(frozen=True)
class _Change:
    """A change to the machine or the settings."""

    name: str
    problem: Problem
    tokens: float = 1.0
    """Factor by which the change multiplies the tokens per step."""


def advise(forecast: Forecast) -> tuple[str, ...]:
    """At most three lines, the best first."""
    problem, choice = forecast.problem, forecast.choice
    if problem is None:
        return ()
    if choice is None:
        return tuple(_what_would_fit(forecast, problem))[:_MOST_LINES]
    best = choice.best
    gains: list[tuple[float, str]] = []
    for change in _changes(forecast, problem):
        if change.tokens * best.step_s / change.problem.bound_s - 1 <= _WORTH:
            continue  # compute alone takes too long
        gain = change.tokens * best.step_s / _step_s(change.problem, best) - 1
        if gain > _WORTH:
            rate = format_rate(forecast.tokens_per_s * (1 + gain))
            gains.append((gain, f"{change.name}: {gain:+.0%}, {rate} tokens/s."))
    lines = [line for _, line in sorted(gains, reverse=True)]
    return tuple(lines or [_nothing(forecast, problem)])[:_MOST_LINES]


def _nothing(forecast: Forecast, problem: Problem) -> str:
    """What was tried in vain."""
    tried = ", ".join(each.name.partition(" (")[0].lower() for each in _changes(forecast, problem))
    binds = "Compute binds: none" if forecast.timeline.binding_lane == LaneName.COMPUTE else "None"
    return f"{binds} of these gives {_WORTH:.0%} more tokens/s: {tried.replace('ssd', 'SSD').replace('ram', 'RAM')}."


def _step_s(problem: Problem, best: Candidate) -> float:
    """Seconds per step of a plan with the options of the chosen one or, if that does not fit, with the problem's own.
    Infinite if neither fits. There is no search, so a faster plan may exist."""
    chosen, options = best.options, problem.options
    as_chosen = replace(options, unit_limit=chosen.unit_limit, split=chosen.split, page_bytes=chosen.page_bytes)
    for kind in dict.fromkeys((as_chosen, options)):
        if (plan := _planned(replace(problem, options=kind))) is not None:
            return problem.simulated(plan).step_s
    return inf


def _changes(forecast: Forecast, problem: Problem) -> Iterator[_Change]:
    hardware, budgets, options, config = problem.hardware, problem.budgets, problem.options, forecast.config
    if SSD in forecast.plan.bytes:
        host = 2 * budgets.host
        more = replace(problem, budgets=replace(budgets, host=host))
        yield _Change(f"Twice the RAM for pages ({format_bytes(host)})", more)

    def faster(name: str, **parts: Any) -> _Change:
        return _Change(name, replace(problem, hardware=replace(hardware, **parts)))

    if hardware.ssd is not None and SSD in forecast.plan.bytes:
        rates = ("read_bytes_per_s", "write_bytes_per_s", "both_bytes_per_s")
        drive = _twice_as_fast(hardware.ssd, *rates)
        if drive.small is not None:
            drive = replace(drive, small=_twice_as_fast(drive.small, *rates))
        yield faster("An SSD twice as fast", ssd=drive)
    if hardware.link is not None:
        link = _twice_as_fast(hardware.link, "h2d_bytes_per_s", "d2h_bytes_per_s", "both_bytes_per_s")
        yield faster("A link to the GPU twice as fast", link=link)
    if problem.ranks.count > 1:
        network = _twice_as_fast(hardware, "intra_node_bytes_per_s", "inter_node_bytes_per_s")
        yield _Change("Collectives twice as fast", replace(problem, hardware=network))
    yield faster("Updates twice as fast", cpu=_twice_as_fast(hardware.cpu, "update_params_per_s"))
    if (larger := _twice_the_batch(forecast, problem)) is not None:
        yield _Change(
            f"Twice the sequences per pass (--per-device-train-batch-size {2 * config.per_device_train_batch_size})",
            larger,
            tokens=2.0,
        )
    passes = 2 * config.gradient_accumulation_steps
    twice = replace(problem, options=replace(options, gradient_accumulation_steps=passes))
    yield _Change(f"Twice the passes per step (--gradient-accumulation-steps {passes})", twice, tokens=2.0)
    if (eight := _with_8bit_moments(forecast, problem)) is not None:
        yield _Change(f"{_EIGHT_BIT}, which change the algorithm", eight)
    without = _without_clipping(problem)
    if options.clipping and without.options.update_during_backward and not _has_experts_of_others(problem):
        yield _Change("No clipping (--max-grad-norm 0), so that updates run during backward", without)


def _twice_the_batch(forecast: Forecast, problem: Problem) -> Problem | None:
    """The same problem with twice the batch, and with budgets that leave room for its activations. None if nothing is
    left for pages."""
    config = forecast.config
    activations = activations_of(
        replace(config, per_device_train_batch_size=2 * config.per_device_train_batch_size), forecast.described
    )
    try:
        budgets, _ = budgets_for(forecast.machine, config.memory, activations)
    except BudgetError:
        return None
    exchanges = tuple(exchange.scaled(2) for exchange in problem.exchanges)
    saved = replace(problem.saved, sizes=problem.saved.sizes.scaled(2.0))
    return replace(problem, exchanges=exchanges, budgets=budgets, saved=saved, compute=problem.compute.scaled(2.0))


def _what_would_fit(forecast: Forecast, problem: Problem) -> Iterator[str]:
    """For each tier, the budget with which a plan fits, and what that plan takes."""
    budgets = problem.budgets
    machine = forecast.machine
    flag = "--memory.ssd DIR:SIZE" if machine.here else "--memory.ssd SIZE"
    if machine.here and machine.hardware.ssd is None:
        flag += ", after pagoda calibrate --ssd DIR"
    for tier, text in (
        ("host", "RAM for pages of {} (--memory.host)"),
        (SSD, f"an SSD with room for {{}} ({flag})"),
        ("device", "memory on the device of {} for pages (--memory.device)"),
    ):
        before = getattr(budgets, tier)
        if before is None and (tier != SSD or not (machine.here or machine.hardware.ssd)):
            continue
        plan = _planned(replace(problem, budgets=replace(budgets, **{tier: _ROOM})))
        if plan is not None:
            needed = _least(forecast, problem, tier, plan.peak_bytes[tier])
            yield f"It would fit with {text.format(format_at_least(needed))}."
    eight = _with_8bit_moments(forecast, problem)
    if eight is not None and (smaller := _planned(eight)) is not None:
        yield f"It would fit with {_EIGHT_BIT}, in {_amounts(smaller)}."
    if problem.options.clipping and (without := _planned(_without_clipping(problem))) is not None:
        yield f"It would fit without clipping (--max-grad-norm 0), in {_amounts(without)}."


def _amounts(plan: Plan) -> str:
    return " and ".join(f"{format_at_least(nbytes)} of {tier}" for tier, nbytes in plan.peak_bytes.items() if nbytes)


def _with_8bit_moments(forecast: Forecast, problem: Problem) -> Problem | None:
    """The same problem with moments of 8 bits. None if the optimizer does not offer them, or has them."""
    config = forecast.config
    if config.optim != "adamw" or config.moments == "8bit":
        return None
    eight = replace(config, moments="8bit")
    return replace(problem, states=eight.states, work=eight.rule.work)


def _without_clipping(problem: Problem) -> Problem:
    return replace(problem, options=replace(problem.options, clipping=False))


def _has_experts_of_others(problem: Problem) -> bool:
    """Whether updates wait for the end of backward, because only it shows which experts other ranks use."""
    return problem.ranks.shares_experts and any(problem.root.experts())


def _planned(problem: Problem) -> Plan | None:
    try:
        return problem.plan()
    except BudgetError:
        return None


def _least(forecast: Forecast, problem: Problem, tier: str, enough: int) -> int:
    """Bytes of one tier with which a plan fits if the other tiers have enough room: the bytes that the refusal
    names."""
    refusal = forecast.refusal
    if refusal is not None and refusal.tier == tier and refusal.needed_bytes is not None:
        least = replace(problem, budgets=replace(problem.budgets, **{tier: refusal.needed_bytes}))
        if _planned(least) is not None:
            return refusal.needed_bytes
    return enough


def _twice_as_fast(part: _Part, *rates: str) -> _Part:
    """The same part of a machine with these rates doubled. A rate that the part lacks stays None."""
    figures: dict[str, Figure | None] = {rate: getattr(part, rate) for rate in rates}
    twice: dict[str, Any] = {
        rate: figure and replace(figure, value=2 * figure.value) for rate, figure in figures.items()
    }
    return replace(part, **twice)
