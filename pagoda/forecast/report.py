"""Prints a plan and a forecast for people, and converts a forecast to JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from math import isfinite
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from pagoda.forecast.activations import MALLOC
from pagoda.forecast.forecast import Forecast
from pagoda.forecast.pipeline import PipelineForecast
from pagoda.forecast.record import plan_record, timeline_record
from pagoda.forecast.wear import wear
from pagoda.memory.sizes import format_bytes, format_rate
from pagoda.plan.lanes import ALL_LANES, LaneName
from pagoda.plan.placement import MEANING
from pagoda.plan.planner import Plan
from pagoda.schedule.served import summary
from pagoda.simulate.timeline import TierUse


def plan_table(plan: Plan, parameters: int | None = None, explained: bool = True) -> RenderableType:
    """A table with a row per state and a column per tier, with sums and budgets; then, if it is to be `explained`, what
    lines mean, and the reasons. `parameters`: how many the model has, if the plan counts fewer elements for quantized
    ones."""
    tiers = [tier for tier, lines in plan.bytes.items() if lines]
    states = list(dict.fromkeys(state for tier in tiers for state in plan.bytes[tier]))
    title = Text(
        f"Plan: {_millions(parameters or plan.parameters)} parameters in {len(plan.units)} units,"
        f" pages of {format_bytes(plan.page_bytes)}"
    )
    table = Table("state", *(Column(tier, justify="right") for tier in tiers))
    for state in states:
        cells = (plan.bytes[tier].get(state) for tier in tiers)
        table.add_row(state, *(format_bytes(cell) if cell else "-" for cell in cells))
    table.add_section()
    table.add_row("in all", *(format_bytes(sum(plan.bytes[tier].values())) for tier in tiers), style="bold")
    budgets = (getattr(plan.budgets, tier) for tier in tiers)
    table.add_row("budget", *("-" if budget is None else format_bytes(budget) for budget in budgets))
    if not explained:
        return Group(title, table)
    lines = [f"{line} = {MEANING[line]}" for line in states if line in MEANING]
    meaning = [Text(f"Here, {'; '.join(lines)}.")] if lines else []
    return Group(title, table, *meaning, *(Text(f"- {reason}") for reason in plan.reasons))


def as_json(forecast: Forecast, advice: Sequence[str]) -> dict[str, Any]:
    """The keys that docs/plan.md describes. Values that need a plan are None or empty if nothing fits."""
    fits = forecast.fits
    timeline = forecast.timeline if fits else None
    plan = plan_record(forecast.plan) if fits else {}
    problem = forecast.problem
    plan_reasons = forecast.plan.reasons if fits else ()
    simulated = forecast.choice.simulated if forecast.choice else ()
    return {
        "fits": fits,
        "model": forecast.described.name,
        "hardware": forecast.machine.hardware.name,
        "params": forecast.described.params,
        "page_bytes": plan.get("page_bytes"),
        "bytes": plan.get("bytes", {}),
        "budgets": asdict(problem.budgets) if problem else {},
        "state_bytes_per_parameter": dict(forecast.plan.layout.bytes_per_parameter) if fits else {},
        "degrees": forecast.config.degrees,
        "activations": forecast.config.activations,
        "batch_tiles": forecast.config.batch_tiles,
        "sequence_tiles": forecast.config.sequence_tiles,
        "activation_bytes": forecast.activations.total,
        "tokens_per_step": forecast.tokens_per_step,
        "step_s": timeline.step_s if timeline else None,
        "tokens_per_s": forecast.tokens_per_s if fits else None,
        "tflops_per_gpu": forecast.flop_per_s / 1e12 if fits else None,
        "share_of_peak": forecast.share_of_peak if fits else None,
        "binding_lane": timeline.binding_lane if timeline else None,
        "lanes": _lanes(forecast) if fits else {},
        "accesses": timeline.access_counts if timeline else {},
        "tier_use": {tier: asdict(use) for tier, use in _tier_use(forecast).items()} if fits else {},
        "ssd_bytes_written_per_step": forecast.ssd_bytes_written_per_step if fits else None,
        "steps_until_worn": forecast.steps_until_worn if fits and isfinite(forecast.steps_until_worn) else None,
        "measured": forecast.machine.hardware.measured,
        "reasons": [*forecast.notes, *forecast.machine.doubts(), *forecast.resolved, *plan_reasons, *simulated],
        "refusal": str(forecast.refusal) if forecast.refusal else None,
        "advice": list(advice),
        "units": plan.get("units", []),
        "timeline": timeline_record(timeline) if timeline else None,
    }


def pipeline_table(pipeline: PipelineForecast) -> RenderableType:
    """A table with a row per stage, and the sums of the pipeline. `show` prints the slowest stage."""
    said = pipeline.as_json()
    tiers = list(dict.fromkeys(tier for stage in said["stages"] for tier in stage["bytes"]))
    table = Table(*(Column(name, justify="right") for name in ("stage", "parameters", *tiers, "step")))
    for number, stage in enumerate(said["stages"]):
        cells = (format_bytes(stage["bytes"][tier]) if tier in stage["bytes"] else "-" for tier in tiers)
        step = format_seconds(stage["step_s"]) if stage["fits"] else "does not fit"
        table.add_row(str(number), _millions(stage["params"]), *cells, step)
    slowest = f"stage {said['slowest']}"
    if said["step_s"] is None:
        return Group(table, Text(f"The pipeline does not fit: see {slowest}.", style="bold red"))
    text = (
        f"The pipeline's step takes {format_seconds(said['step_s'])}, {said['tokens_per_s']:,.1f} tokens/s: that of "
        f"{slowest}, the slowest, and {said['bubble']:.0%} in which stages wait for micro-batches. Below is {slowest}."
    )
    return Group(table, Text(text))


def show(forecast: Forecast, advice: Sequence[str], console: Console) -> None:
    """Print the forecast."""
    console.print(Group(*_parts(forecast, advice)), highlight=False)


def _parts(forecast: Forecast, advice: Sequence[str]) -> Iterator[RenderableType]:
    described, config = forecast.described, forecast.config
    ranks = f", {forecast.machine.ranks.count} ranks" if forecast.machine.ranks.count > 1 else ""
    passes = f" x {config.gradient_accumulation_steps} passes" if config.gradient_accumulation_steps > 1 else ""
    yield Text(
        f"{described.name}, {_millions(described.params)} parameters, on {forecast.machine.hardware.name}{ranks}: "
        f"{config.per_device_train_batch_size} x {config.seq_len} tokens{passes}"
    )
    if forecast.choice is None:
        yield Text(f"Does not fit. {forecast.refusal}", style="bold red")
    else:
        yield Text("Fits.", style="bold green")
        yield plan_table(forecast.plan, described.params if config.quantized_format else None)
    yield Text(f"Besides pages, activations take {forecast.activations}.")
    if forecast.machine.hardware.device is None:
        kept = format_bytes((MALLOC - 1) * forecast.activations.total)
        yield Text(f"malloc may keep up to {kept} more, in freed blocks that it cannot reuse.")
    yield from (Text(f"- {note}") for note in (*forecast.notes, *forecast.resolved))
    if forecast.choice is not None:
        yield _figures(forecast)
        yield from (Text(f"- {doubt}") for doubt in forecast.machine.doubts())
        yield _lane_table(forecast)
        yield from (Text(f"- {reason}") for reason in forecast.choice.simulated)
    if advice:
        yield Text("What would help:")
        yield from (Text(f"- {line}") for line in advice)


def _figures(forecast: Forecast) -> RenderableType:
    written, steps = forecast.ssd_bytes_written_per_step, forecast.config.max_steps
    table = Table.grid(padding=(0, 2))
    takes = timedelta(seconds=round(steps * forecast.timeline.step_s))
    table.add_row("step", f"{format_seconds(forecast.timeline.step_s)}; {steps:,} steps take {takes}")
    table.add_row("tokens/s", f"{format_rate(forecast.tokens_per_s)}")
    table.add_row(
        "TFLOP/s per " + ("GPU" if forecast.machine.hardware.device else "process"),
        f"{forecast.flop_per_s / 1e12:.3g}, {forecast.share_of_peak:.1%} of peak "
        "(6 FLOPs per parameter and token, 4 if it is frozen, and attention; recomputing not counted)",
    )
    table.add_row("binding lane", forecast.timeline.binding_lane)
    table.add_row("weights", summary(forecast.timeline.access_counts))
    used = (f"{tier} {use.mean:.0%} on average, {use.peak:.0%} at most" for tier, use in _tier_use(forecast).items())
    table.add_row("of the budget", "; ".join(used))
    if written and (drive := forecast.machine.hardware.ssd) is not None:
        table.add_row("drive wear", wear(written, steps, drive.endurance_bytes))
    return table


def _lane_table(forecast: Forecast) -> RenderableType:
    names = ("busy", "of the step", "compute waits", "bytes")
    table = Table("lane", *(Column(name, justify="right") for name in names))
    timeline = forecast.timeline
    for lane, figures in _lanes(forecast).items():
        table.add_row(
            lane,
            format_seconds(figures["busy_s"]),
            f"{figures['busy_s'] / timeline.step_s:.0%}",
            "-" if lane == LaneName.COMPUTE else format_seconds(figures["stall_s"]),
            format_bytes(timeline.bytes_moved.get(lane, 0)),
        )
    return table


def _tier_use(forecast: Forecast) -> dict[str, TierUse]:
    return forecast.timeline.tier_use(asdict(forecast.plan.budgets))


def _lanes(forecast: Forecast) -> dict[str, dict[str, float]]:
    timeline = forecast.timeline
    return {
        lane: {"busy_s": timeline.busy_s.get(lane, 0.0), "stall_s": timeline.stall_s.get(lane, 0.0)}
        for lane in ALL_LANES
        if lane == LaneName.COMPUTE or timeline.busy_s.get(lane)
    }


def _millions(count: int) -> str:
    """A number of parameters."""
    return f"{count / 1e6:,.1f} M" if count >= 1_000_000 else f"{count:,}"


def format_seconds(seconds: float) -> str:
    """Seconds, or milliseconds below one second."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
