"""Advice: what to change, each from a plan that was made and simulated with the change."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

from pagoda.errors import BudgetError
from pagoda.forecast.activations import estimate_activations
from pagoda.forecast.forecast import Forecast, Setting
from pagoda.forecast.machine import budgets_for
from pagoda.memory.sizes import format_bytes
from pagoda.plan.compute import Compute
from pagoda.plan.hardware import Drive, Figure, Hardware, Link
from pagoda.plan.ops import SSD
from pagoda.plan.planner import Plan, make_plan

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
    if not forecast.fits:
        return tuple(_what_would_fit(forecast, forecast.setting))[:_MOST_LINES]
    now = forecast.timeline.step_s
    free: list[str] = []
    gains: list[tuple[float, str]] = []
    for change in _changes(forecast, forecast.setting):
        gain = change.tokens * now / _step_s(change.setting) - 1
        if gain > _WORTH:
            tokens_per_s = forecast.tokens_per_s * (1 + gain)
            gains.append((gain, f"{change.name}: {gain:+.0%}, {tokens_per_s:,.0f} tokens/s."))
    if forecast.config.plan == "usual" and forecast.choice is not None and forecast.choice.others:
        fastest = forecast.choice.others[0]
        gain = now / fastest.timeline.step_s - 1
        if gain > _WORTH:
            free = [f"Another plan, {fastest.name} (--plan search): {gain:+.0%}."]
    if not (free or gains):
        return (
            f"Compute binds: neither more memory, nor faster copies or drives, nor more tokens per step give "
            f"{_WORTH:.0%}.",
        )
    return (*free, *(line for _, line in sorted(gains, reverse=True)))[:_MOST_LINES]


def _step_s(setting: Setting) -> float:
    """Seconds of a step; infinite where nothing fits."""
    try:
        return setting.search().best.timeline.step_s
    except BudgetError:
        return inf


def _changes(forecast: Forecast, setting: Setting) -> Iterator[_Change]:
    hardware, budgets = setting.hardware, setting.budgets
    config = forecast.config
    if SSD in forecast.bytes:
        host = 2 * budgets.host
        yield _Change(
            f"Twice the RAM for pages ({format_bytes(host)})", replace(setting, budgets=replace(budgets, host=host))
        )
    if hardware.ssd is not None and SSD in forecast.bytes:
        faster = replace(hardware, ssd=_faster_drive(hardware.ssd))
        yield _Change("An SSD twice as fast", replace(setting, hardware=faster))
    if hardware.link is not None:
        faster = replace(hardware, link=_faster_link(hardware.link))
        yield _Change("A link to the GPU twice as fast", replace(setting, hardware=faster))
    if setting.ranks is not None:
        yield _Change("Collectives twice as fast", replace(setting, hardware=_faster_network(hardware)))
    yield _Change("Updates twice as fast", replace(setting, hardware=_faster_update(hardware)))
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
    itemsize = setting.states[0].dtype.itemsize
    activations = estimate_activations(setting.subject, 2 * config.tokens, itemsize, config.gradient_checkpointing)
    try:
        budgets, _ = budgets_for(forecast.machine, config.memory, activations)
    except BudgetError:
        return None
    compute = _scaled(setting.compute, 2.0)
    from_flops = compute if setting.from_flops is setting.compute else _scaled(setting.from_flops, 2.0)
    return replace(setting, budgets=budgets, from_flops=from_flops, compute=compute)


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
            yield f"It would fit with {text.format(format_bytes(needed))}."
    if setting.options.clipping and (without := _planned(_without_clipping(setting))) is not None:
        yield f"It would fit without clipping (--clip-grad-norm None), in {_amounts(without)}."


def _without_clipping(setting: Setting) -> Setting:
    return replace(setting, options=replace(setting.options, clipping=False))


def _planned(setting: Setting) -> Plan | None:
    try:
        return make_plan(setting.subject.root, setting.states, setting.budgets, setting.options, setting.ranks)
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
    return " and ".join(f"{format_bytes(nbytes)} of {tier}" for tier, nbytes in plan.peak_bytes.items() if nbytes)


def _twice(figure: Figure) -> Figure:
    return replace(figure, value=2 * figure.value)


def _faster_drive(drive: Drive) -> Drive:
    return replace(
        drive,
        read_bytes_per_s=_twice(drive.read_bytes_per_s),
        write_bytes_per_s=_twice(drive.write_bytes_per_s),
        both_bytes_per_s=_twice(drive.both_bytes_per_s),
    )


def _faster_link(link: Link) -> Link:
    return replace(
        link,
        h2d_bytes_per_s=_twice(link.h2d_bytes_per_s),
        d2h_bytes_per_s=_twice(link.d2h_bytes_per_s),
        both_bytes_per_s=_twice(link.both_bytes_per_s),
    )


def _faster_network(hardware: Hardware) -> Hardware:
    inside, across = hardware.intra_node_bytes_per_s, hardware.inter_node_bytes_per_s
    return replace(
        hardware,
        intra_node_bytes_per_s=inside and _twice(inside),
        inter_node_bytes_per_s=across and _twice(across),
    )


def _faster_update(hardware: Hardware) -> Hardware:
    cpu = hardware.cpu
    return replace(hardware, cpu=replace(cpu, update_params_per_s=_twice(cpu.update_params_per_s)))


def _scaled(compute: Compute, factor: float) -> Compute:
    return Compute(
        {module: factor * seconds for module, seconds in compute.forward_s.items()},
        {module: factor * seconds for module, seconds in compute.backward_s.items()},
    )
