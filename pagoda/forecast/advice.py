"""Advice: what to change, each from a plan that was made and simulated with the change."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Any, TypeVar

from pagoda.errors import BudgetError
from pagoda.forecast.forecast import Forecast
from pagoda.forecast.inputs import PlanInputs, activations_of
from pagoda.forecast.machine import budgets_for
from pagoda.forecast.search import Candidate
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
    inputs: PlanInputs
    tokens: float = 1.0
    """Tokens per step, as a multiple of what they are."""


def advise(forecast: Forecast) -> tuple[str, ...]:
    """At most three lines: a plan that costs nothing, then the best first."""
    if forecast.inputs is None:
        return ()
    if forecast.choice is None:
        return tuple(_what_would_fit(forecast, forecast.inputs))[:_MOST_LINES]
    best, inputs = forecast.choice.best, forecast.inputs
    now = best.timeline.step_s
    free: list[str] = []
    gains: list[tuple[float, str]] = []
    changes = [(_estimated_gain(change, inputs, best), change) for change in _changes(forecast, inputs)]
    promising = sorted((change for change in changes if change[0] > _WORTH), key=lambda change: -change[0])
    for _, change in promising[:_MOST_LINES]:
        # What is said comes from the step that the forecast itself simulates, with the change.
        gain = change.tokens * now / _step_s(change.inputs, best) - 1
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


def _estimated_gain(change: _Change, inputs: PlanInputs, best: Candidate) -> float:
    """What a change gives: of a plan of many units on a part of the layers, if there is one with the change and one
    without, since a part says nothing of the whole. Both may not fit their part of a tier: then of the whole."""
    parts = inputs.to_compare(best.plan), change.inputs.to_compare(best.plan)
    if parts[0] is not inputs and parts[1] is not change.inputs:
        before, after = (_step_s(part, best) for part in parts)
        if max(before, after) < inf:
            return change.tokens * before / after - 1
    return change.tokens * best.timeline.step_s / _step_s(change.inputs, best) - 1


def _step_s(inputs: PlanInputs, best: Candidate) -> float:
    """Seconds of a step of the plan that was chosen and of the usual one, made for other inputs, whichever is
    shorter: no search, so there may be a faster one. Infinite where neither fits."""
    chosen, options = best.options, inputs.options
    as_chosen = replace(options, unit_limit=chosen.unit_limit, split=chosen.split, page_bytes=chosen.page_bytes)
    seconds = [inf]
    for tried in dict.fromkeys((as_chosen, options)):
        try:
            seconds.append(inputs.simulated(inputs.plan(tried)).step_s)
        except BudgetError:
            continue
    return min(seconds)


def _changes(forecast: Forecast, inputs: PlanInputs) -> Iterator[_Change]:
    hardware, budgets = inputs.hardware, inputs.budgets
    config = forecast.config
    if SSD in forecast.bytes:
        host = 2 * budgets.host
        yield _Change(
            f"Twice the RAM for pages ({format_bytes(host)})", replace(inputs, budgets=replace(budgets, host=host))
        )
    if hardware.ssd is not None and SSD in forecast.bytes:
        rates = ("read_bytes_per_s", "write_bytes_per_s", "both_bytes_per_s")
        drive = _twice_as_fast(hardware.ssd, *rates)
        if drive.small is not None:
            drive = replace(drive, small=_twice_as_fast(drive.small, *rates))
        yield _Change("An SSD twice as fast", replace(inputs, hardware=replace(hardware, ssd=drive)))
    if hardware.link is not None:
        link = _twice_as_fast(hardware.link, "h2d_bytes_per_s", "d2h_bytes_per_s", "both_bytes_per_s")
        yield _Change("A link to the GPU twice as fast", replace(inputs, hardware=replace(hardware, link=link)))
    if inputs.ranks is not None:
        network = _twice_as_fast(hardware, "intra_node_bytes_per_s", "inter_node_bytes_per_s")
        yield _Change("Collectives twice as fast", replace(inputs, hardware=network))
    cpu = _twice_as_fast(hardware.cpu, "update_params_per_s")
    yield _Change("Updates twice as fast", replace(inputs, hardware=replace(hardware, cpu=cpu)))
    if (larger := _twice_the_batch(forecast, inputs)) is not None:
        yield _Change(f"Twice the sequences per pass (--batch-size {2 * config.batch_size})", larger, tokens=2.0)
    passes = 2 * config.accumulation_steps
    yield _Change(
        f"Twice the passes per step (--accumulation-steps {passes})",
        replace(inputs, options=replace(inputs.options, accumulation_steps=passes)),
        tokens=2.0,
    )
    if inputs.options.clipping:
        yield _Change(
            "No clipping (--clip-grad-norm None), so that updates run under backward", _without_clipping(inputs)
        )


def _twice_the_batch(forecast: Forecast, inputs: PlanInputs) -> PlanInputs | None:
    """The inputs with what twice the activations leave to pages; None where they leave nothing."""
    config = forecast.config
    twice = replace(config, batch_size=2 * config.batch_size)
    activations = activations_of(twice, inputs.described)
    try:
        budgets, _ = budgets_for(forecast.machine, config.memory, activations)
    except BudgetError:
        return None
    exchanges = {module: 2 * nbytes for module, nbytes in inputs.exchanges.items()}
    saved = inputs.saved and replace(inputs.saved, sizes=inputs.saved.sizes.scaled(2.0))
    compute = inputs.compute.scaled(2.0)
    return replace(inputs, exchanges=exchanges, budgets=budgets, saved=saved, compute=compute)


def _what_would_fit(forecast: Forecast, inputs: PlanInputs) -> Iterator[str]:
    """Changes of one budget with which a plan fits, with what the plan then takes."""
    budgets = inputs.budgets
    flag = "--memory.ssd DIR:SIZE" if forecast.machine.here else "--memory.ssd SIZE"
    for tier, text in (
        ("host", "RAM for pages of {} (--memory.host)"),
        (SSD, f"an SSD with room for {{}} ({flag})"),
        ("device", "memory on the device of {} for pages (--memory.device)"),
    ):
        before = getattr(budgets, tier)
        if before is None and tier != SSD:
            continue
        plan = _planned(replace(inputs, budgets=replace(budgets, **{tier: _ROOM})))
        if plan is not None:
            needed = _least(forecast, inputs, tier, plan.peak_bytes[tier])
            yield f"It would fit with {text.format(format_at_least(needed))}."
    if inputs.options.clipping and (without := _planned(_without_clipping(inputs))) is not None:
        yield f"It would fit without clipping (--clip-grad-norm None), in {_amounts(without)}."


def _without_clipping(inputs: PlanInputs) -> PlanInputs:
    return replace(inputs, options=replace(inputs.options, clipping=False))


def _planned(inputs: PlanInputs) -> Plan | None:
    try:
        return inputs.usual_plan()
    except BudgetError:
        return None


def _least(forecast: Forecast, inputs: PlanInputs, tier: str, enough: int) -> int:
    """Bytes of one tier with which a plan fits: what the refusal asks for, if the other tiers have room for it."""
    refusal = forecast.refusal
    if refusal is not None and refusal.tier == tier and refusal.needed_bytes is not None:
        least = replace(inputs, budgets=replace(inputs.budgets, **{tier: refusal.needed_bytes}))
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
