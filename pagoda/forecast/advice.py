"""Advice: what to change, each from a plan that was made and simulated with the change."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Any, TypeVar

from pagoda.errors import BudgetError
from pagoda.forecast.compute import Compute
from pagoda.forecast.forecast import Forecast
from pagoda.forecast.machine import budgets_for
from pagoda.forecast.problem import Problem
from pagoda.forecast.search import Candidate
from pagoda.forecast.setting import Setting, activations_of
from pagoda.memory.sizes import format_at_least, format_bytes
from pagoda.plan.ops import SSD
from pagoda.plan.planner import Plan
from pagoda.simulate.hardware import Cpu, Drive, Figure, Hardware, Link, SmallTransfers

_Part = TypeVar("_Part", Hardware, Cpu, Link, Drive, SmallTransfers)
_MOST_LINES = 3
_WORTH = 0.02
"""A change that gives less is not worth a line."""
_ROOM = 1 << 60


@dataclass(frozen=True)
class _Change:
    """Something that could be different."""

    name: str
    setting: Setting
    tokens: float = 1.0
    """Tokens per step, as a multiple of what they are."""


def advise(forecast: Forecast) -> tuple[str, ...]:
    """At most three lines: a plan that costs nothing, then the best first."""
    if forecast.setting is None:
        return ()
    if forecast.choice is None:
        return tuple(_what_would_fit(forecast, forecast.setting))[:_MOST_LINES]
    best, setting = forecast.choice.best, forecast.setting
    now = best.timeline.step_s
    free: list[str] = []
    gains: list[tuple[float, str]] = []
    changes = [(_estimated_gain(change, setting, best), change) for change in _changes(forecast, setting)]
    promising = sorted((change for change in changes if change[0] > _WORTH), key=lambda change: -change[0])
    for _, change in promising[:_MOST_LINES]:
        # What is said comes from the step that the forecast itself simulates, with the change.
        gain = change.tokens * now / _step_s(change.setting.problem, change.setting, best) - 1
        if gain > _WORTH:
            tokens_per_s = forecast.tokens_per_s * (1 + gain)
            gains.append((gain, f"{change.name}: {gain:+.0%}, {tokens_per_s:,.0f} tokens/s."))
    if forecast.config.plan == "usual" and forecast.choice.others:
        fastest = forecast.choice.others[0]
        gain = best.timeline.step_s / fastest.timeline.step_s - 1
        if gain > _WORTH:
            free = [f"Another plan, {fastest.name} (--plan search): {gain:+.0%}."]
    if not (free or gains):
        return (
            f"Compute binds: neither more memory, nor faster copies or drives, nor more tokens per step give "
            f"{_WORTH:.0%}.",
        )
    return (*free, *(line for _, line in sorted(gains, reverse=True)))[:_MOST_LINES]


def _estimated_gain(change: _Change, setting: Setting, best: Candidate) -> float:
    """What a change gives: of a plan of many units on a part of the layers, if there is one with the change and one
    without, since a part says nothing of the whole. Both may not fit their part of a tier: then of the whole."""
    before, after = setting.problem, change.setting.problem
    parts = before.to_compare(best.plan), after.to_compare(best.plan)
    if parts[0] is not before and parts[1] is not after:
        seconds = _step_s(parts[0], setting, best), _step_s(parts[1], change.setting, best)
        if max(seconds) < inf:
            return change.tokens * seconds[0] / seconds[1] - 1
    return change.tokens * best.timeline.step_s / _step_s(after, change.setting, best) - 1


def _step_s(problem: Problem, setting: Setting, best: Candidate) -> float:
    """Seconds of a step of the plan that was chosen and of the usual one, made for the problem of another setting, or
    for a part of it, whichever is shorter: no search, so there may be a faster one. Infinite where neither fits."""
    chosen, options = best.options, setting.options
    as_chosen = replace(options, unit_limit=chosen.unit_limit, split=chosen.split, page_bytes=chosen.page_bytes)
    seconds = [inf]
    for tried in dict.fromkeys((as_chosen, options)):
        try:
            seconds.append(problem.simulated(problem.plan(tried)).step_s)
        except BudgetError:
            continue
    return min(seconds)


def _changes(forecast: Forecast, setting: Setting) -> Iterator[_Change]:
    hardware, budgets = setting.hardware, setting.budgets
    config = forecast.config
    if SSD in forecast.bytes:
        host = 2 * budgets.host
        yield _Change(
            f"Twice the RAM for pages ({format_bytes(host)})", replace(setting, budgets=replace(budgets, host=host))
        )
    if hardware.ssd is not None and SSD in forecast.bytes:
        rates = ("read_bytes_per_s", "write_bytes_per_s", "both_bytes_per_s")
        drive = _twice_as_fast(hardware.ssd, *rates)
        if drive.small is not None:
            drive = replace(drive, small=_twice_as_fast(drive.small, *rates))
        yield _Change("An SSD twice as fast", replace(setting, hardware=replace(hardware, ssd=drive)))
    if hardware.link is not None:
        link = _twice_as_fast(hardware.link, "h2d_bytes_per_s", "d2h_bytes_per_s", "both_bytes_per_s")
        yield _Change("A link to the GPU twice as fast", replace(setting, hardware=replace(hardware, link=link)))
    if setting.ranks is not None:
        network = _twice_as_fast(hardware, "intra_node_bytes_per_s", "inter_node_bytes_per_s")
        yield _Change("Collectives twice as fast", replace(setting, hardware=network))
    cpu = _twice_as_fast(hardware.cpu, "update_params_per_s")
    yield _Change("Updates twice as fast", replace(setting, hardware=replace(hardware, cpu=cpu)))
    if (larger := _twice_the_batch(forecast, setting)) is not None:
        yield _Change(f"Twice the sequences per pass (--batch-size {2 * config.batch_size})", larger, tokens=2.0)
    passes = 2 * config.accumulation_steps
    yield _Change(
        f"Twice the passes per step (--accumulation-steps {passes})",
        replace(setting, options=replace(setting.options, accumulation_steps=passes)),
        tokens=2.0,
    )
    if setting.options.clipping:
        yield _Change(
            "No clipping (--clip-grad-norm None), so that updates run under backward",
            replace(setting, options=replace(setting.options, clipping=False)),
        )


def _twice_the_batch(forecast: Forecast, setting: Setting) -> Setting | None:
    """The setting with what twice the activations leave to pages; None where they leave nothing."""
    config = forecast.config
    twice = replace(config, batch_size=2 * config.batch_size)
    activations = activations_of(twice, setting.subject)
    try:
        budgets, _ = budgets_for(forecast.machine, config.memory, activations)
    except BudgetError:
        return None
    subject = replace(setting.subject, exchanged={at: 2 * n for at, n in setting.subject.exchanged.items()})
    compute = _scaled(setting.compute, 2.0)
    from_flops = compute if setting.from_flops is setting.compute else _scaled(setting.from_flops, 2.0)
    saved = setting.saved and replace(setting.saved, sizes=setting.saved.sizes.scaled(2.0))
    return replace(setting, subject=subject, budgets=budgets, saved=saved, from_flops=from_flops, compute=compute)


def _what_would_fit(forecast: Forecast, setting: Setting) -> Iterator[str]:
    """Changes of one budget with which a plan fits, with what the plan then takes."""
    budgets = setting.budgets
    flag = "--memory.ssd DIR:SIZE" if forecast.machine.here else "--memory.ssd SIZE"
    for tier, text in (
        ("host", "RAM for pages of {} (--memory.host)"),
        (SSD, f"an SSD with room for {{}} ({flag})"),
        ("device", "memory on the device of {} for pages (--memory.device)"),
    ):
        before = getattr(budgets, tier)
        if before is None and tier != SSD:
            continue
        plan = _planned(replace(setting, budgets=replace(budgets, **{tier: _ROOM})))
        if plan is not None:
            needed = _least(forecast, setting, tier, plan.peak_bytes[tier])
            yield f"It would fit with {text.format(format_at_least(needed))}."
    if setting.options.clipping and (without := _planned(_without_clipping(setting))) is not None:
        yield f"It would fit without clipping (--clip-grad-norm None), in {_amounts(without)}."


def _without_clipping(setting: Setting) -> Setting:
    return replace(setting, options=replace(setting.options, clipping=False))


def _planned(setting: Setting) -> Plan | None:
    try:
        return setting.usual_plan()
    except BudgetError:
        return None


def _least(forecast: Forecast, setting: Setting, tier: str, enough: int) -> int:
    """Bytes of one tier with which a plan fits: what the refusal asks for, if the other tiers have room for it."""
    refusal = forecast.refusal
    if refusal is not None and refusal.tier == tier and refusal.needed_bytes is not None:
        least = replace(setting, budgets=replace(setting.budgets, **{tier: refusal.needed_bytes}))
        if _planned(least) is not None:
            return refusal.needed_bytes
    return enough


def _amounts(plan: Plan) -> str:
    return " and ".join(f"{format_at_least(nbytes)} of {tier}" for tier, nbytes in plan.peak_bytes.items() if nbytes)


def _twice_as_fast(part: _Part, *rates: str) -> _Part:
    """A part of a machine with twice these rates, of which some may not be there."""
    figures: dict[str, Figure | None] = {rate: getattr(part, rate) for rate in rates}
    twice: dict[str, Any] = {
        rate: figure and replace(figure, value=2 * figure.value) for rate, figure in figures.items()
    }
    return replace(part, **twice)


def _scaled(compute: Compute, factor: float) -> Compute:
    return Compute(
        {module: factor * seconds for module, seconds in compute.forward_s.items()},
        {module: factor * seconds for module, seconds in compute.backward_s.items()},
    )
