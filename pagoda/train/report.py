"""`pagoda report`: a run in tables: losses, the lanes of a step, tiers and reasons. rich writes them as a page."""

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pagoda.console import say
from pagoda.errors import ConfigError
from pagoda.forecast.report import format_seconds
from pagoda.memory.files import read_regular
from pagoda.memory.forms import FormError, whole
from pagoda.memory.sizes import format_bytes, format_rate
from pagoda.plan.tiers import LaneName
from pagoda.simulate.timeline import ALL_LANES
from pagoda.train.metrics import STEP_FORM, read_evaluations, read_metrics
from pagoda.train.run_dir import RunDir

BEGINNING = '<!DOCTYPE html><html lang="en" data-made-by="pagoda report">'
"""The beginning of every page. Only files that begin with it are overwritten."""
_PAGE = (
    BEGINNING + '<head><meta charset="utf-8"><title>Run</title><style>{stylesheet}</style></head>'
    '<body><pre style="font-family: monospace; line-height: 1.2">{code}</pre></body></html>\n'
)
_MOST_STEPS = 20
"""Steps whose losses are shown."""
_Record = Mapping[str, Any]


def report(directory: Path) -> str:
    """The HTML page of a run's directory. Raises ConfigError if there is no run or no step yet."""
    run = RunDir(directory)
    config = run.started_config()
    steps, evals = read_metrics(run.metrics, STEP_FORM), read_evaluations(run.evals)
    if not steps:
        raise ConfigError(f"{directory} has no steps to report yet")
    plan, measured = (_read(file) if file.exists() else None for file in (run.plan, run.timeline))
    seconds = sum(step["step_s"] for step in steps)
    tokens = sum(step["tokens_per_s"] * step["step_s"] for step in steps)
    console = Console(record=True, file=io.StringIO(), width=160)
    say(
        console,
        f"Run {directory.resolve().name}: {config.model}, trained on {config.data}",
        f"{steps[-1]['step']:,} of {config.max_steps:,} steps in {seconds / 3600:.2f} h, loss "
        f"{_figure(steps[0]['loss'])} → {_figure(steps[-1]['loss'])}, {tokens:,.0f} tokens, "
        f"{format_rate(tokens / seconds)} per second",
    )
    every = -(-len(steps) // _MOST_STEPS)
    shown = [*steps[:-1:every], steps[-1]]
    console.print(_table("Loss", ("step", "loss"), ((line["step"], _figure(line["loss"])) for line in shown)))
    if evals:
        names = "loss", "perplexity", "bits_per_byte"
        rows = ((line["step"], *(_figure(line[name]) for name in names)) for line in evals)
        console.print(_table("Evaluations", ("after step", "loss", "perplexity", "bits per byte"), rows))
    if plan:
        _show_lanes(console, plan["timeline"], measured, plan["not_predicted"])
        _show_tiers(console, plan, steps)
        say(console, "Why this plan:", *(f"- {reason}" for reason in plan["reasons"]))
    return console.export_html(code_format=_PAGE)


def _read(file: Path) -> dict[str, Any]:
    """The content of a file that a run wrote. Raises ConfigError if it cannot be read, or was changed since."""
    try:
        return whole(read_regular(file))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    except FormError as error:
        raise ConfigError(f"{file} was edited or damaged, or another version wrote it ({error})") from error


def _show_lanes(console: Console, predicted: _Record | None, measured: _Record | None, why: str) -> None:
    """What compute and every lane do in a step. `why`: why nothing was predicted."""
    known = {"predicted": predicted} if predicted else {}
    if measured:
        known[f"measured, step {measured['step']}"] = measured
    lanes = [lane for lane in ALL_LANES if any(lane in timeline["busy_s"] for timeline in known.values())]
    head, rows = ["lane"], [[lane] for lane in lanes]
    for name, timeline in known.items():
        head += [f"{name}: works, of {format_seconds(timeline['step_s'])}", "compute waits"]
        for row, lane in zip(rows, lanes, strict=True):
            waits = "" if lane == LaneName.COMPUTE else format_seconds(timeline["stall_s"].get(lane, 0.0))
            row += [format_seconds(timeline["busy_s"].get(lane, 0.0)), waits]
    if known:
        console.print(_table("One step", head, rows))
    if not predicted:
        say(console, f"Nothing was predicted: {why}.")


def _show_tiers(console: Console, plan: _Record, steps: Sequence[_Record]) -> None:
    """What each tier holds by the plan, the measured peak, and where the states of each unit are."""
    rows: list[tuple[object, ...]] = []
    for tier, lines in plan["bytes"].items():
        budget = plan["budgets"].get(tier)
        measured = format_bytes(max(step["peak_bytes"].get(tier, 0) for step in steps))
        rows += [(tier, state, format_bytes(nbytes), "", "") for state, nbytes in lines.items() if nbytes]
        limit = "-" if budget is None else format_bytes(budget)
        rows.append((tier, "in all", format_bytes(sum(lines.values())), measured, limit))
    console.print(_table("Memory", ("tier", "state", "planned", "measured peak", "budget"), rows))
    homes = ((unit, ", ".join(f"{state} on {tier}" for state, tier in unit["homes"].items())) for unit in plan["units"])
    units = ((unit["name"], f"{unit['parameters']:,}", states) for unit, states in homes)
    console.print(_table("Units", ("unit", "parameters", "states"), units))


def _table(title: str, head: Iterable[str], rows: Iterable[Sequence[object]]) -> Table:
    table = Table(*head, title=title, title_justify="left")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    return table


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}" if abs(value) < 1e-3 or abs(value) >= 1e5 else f"{value:.4f}"
