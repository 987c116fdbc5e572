"""`pagoda report`: one page about a run or a plan: losses, speed, the lanes of a step, tiers, units and settings."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from pagoda.errors import ConfigError
from pagoda.forecast.report import format_seconds
from pagoda.forecast.wear import wear
from pagoda.memory.files import read_regular
from pagoda.memory.forms import FormError, whole
from pagoda.memory.sizes import format_bytes, format_rate
from pagoda.plan.exchanges import GRADIENTS, SEND, SUM, TOKENS
from pagoda.plan.tiers import LaneName
from pagoda.simulate.hardware import Figure
from pagoda.simulate.timeline import ALL_LANES
from pagoda.train.config import flat
from pagoda.train.metrics import STEP_FORM, read_evaluations, read_metrics
from pagoda.train.page import COLOURS, bars, drawing, figure_of, folded, legend, listed, look, page, pairs, table
from pagoda.train.run_dir import RunDir

_TIERS = {"device": "tier-device", "host": "tier-host", "ssd": "tier-ssd"}
_WORK = {
    "forward": ("forward",),
    "backward": ("backward",),
    "read": ("fetch", "read", "gradient", "return"),
    "write": ("offload", "spill", "write", "save"),
    "update": ("update", "step"),
    "ranks": ("gather", "reduce", "share", TOKENS, SUM, GRADIENTS, SEND),
    "other": (),
}
"""Group of kinds of work -> the kinds in it. Each group has a colour."""
_Record = Mapping[str, Any]
_NO_PLAN = "is not a plan: write one with pagoda plan ... --json > plan.json"


def report(source: Path) -> str:
    """The HTML page of a run's directory, or of a file that `pagoda plan --json` wrote.

    Raises ConfigError if there is no run or plan, or if matplotlib is not installed.
    """
    with look():
        return _plan_page(source) if source.is_file() else _run_page(source)


def _run_page(directory: Path) -> str:
    run = RunDir(directory)
    config = run.started_config().settings()
    steps, evals = read_metrics(run.metrics, STEP_FORM), read_evaluations(run.evals)
    if not steps:
        raise ConfigError(f"{directory} has no steps to report yet")
    plan, measured = (_read(file) if file.exists() else None for file in (run.plan, run.timeline))
    predicted, why = (plan["timeline"], plan["not_predicted"]) if plan else (None, "")
    sections = {
        "Summary": _summary(config, steps, evals),
        "Loss": _curves(steps, evals),
        "Speed": _speed(steps, plan),
        **({"One step": _lanes(predicted, measured, why)} if predicted or measured else {}),
    }
    if plan:
        sections |= {"Memory": _memory(plan, steps), "Units": _units(plan), "Why this plan": listed(plan["reasons"])}
    sections["Settings"] = pairs(flat(config))
    return page(f"Run {directory.resolve().name}", sections)


def _plan_page(file: Path) -> str:
    plan = _read(file, _NO_PLAN)
    if "fits" not in plan:
        raise ConfigError(f"{file} {_NO_PLAN}")
    found = [
        ("Model", plan["model"]),
        ("Parameters", f"{plan['params']:,}"),
        ("Machine", plan["hardware"]),
        ("Fits", "yes" if plan["fits"] else f"no. {plan['refusal']}"),
        ("Activations, an estimate", format_bytes(plan["activation_bytes"])),
    ]
    sections = {}
    if plan["fits"]:
        found += [
            ("Step", f"{format_seconds(plan['step_s'])}, {plan['tokens_per_step']:,} tokens"),
            ("Tokens per second", f"{plan['tokens_per_s']:,.1f}"),
            ("Binding lane", plan["binding_lane"]),
        ]
        sections = {"One step": _lanes(plan["timeline"], None), "Memory": _memory(plan, []), "Units": _units(plan)}
    helps = {"What would help": listed(plan["advice"])} if plan["advice"] else {}
    return page(
        f"Plan for {plan['model']} on {plan['hardware']}",
        {"Summary": pairs(found), **sections, **helps, "Why this plan": listed(plan["reasons"])},
    )


def _read(file: Path, otherwise: str = "was edited or damaged, or another version wrote it") -> dict[str, Any]:
    """The content of a file that a run or `pagoda plan` wrote. Raises ConfigError if it cannot be read, or what it is
    `otherwise` if it was changed since."""
    try:
        return whole(read_regular(file))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    except FormError as error:
        raise ConfigError(f"{file} {otherwise} ({error})") from error


def _lanes(predicted: _Record | None, measured: _Record | None, why: str = "") -> str:
    """What compute and every lane do in a step. The prediction is above the measurement, on the same time axis. `why`:
    why nothing was predicted."""
    drawn = [("Predicted", predicted)] if predicted else []
    if measured:
        drawn.append((f"Measured, step {measured['step']}" if "step" in measured else "Measured, a step", measured))
    lanes = [lane for lane in ALL_LANES if any(lane in timeline["busy_s"] for _, timeline in drawn)]
    figure, axes = figure_of(0.7 + len(drawn) * (0.5 + 0.28 * len(lanes)), rows=len(drawn))
    colours = dict(zip(_WORK, COLOURS, strict=True))
    group_of = {kind: group for group, kinds in _WORK.items() for kind in kinds}
    groups: set[str] = set()
    for axis, (title, timeline) in zip(axes, drawn, strict=True):
        works = [
            (lane, group_of.get(kind, "other"), start, end)
            for lane, kind, start, end in timeline["spans"]
            if lane in lanes
        ]
        bars(axis, works, lanes, colours)
        groups |= {group for _, group, _, _ in works}
        axis.set_title(f"{title}: {format_seconds(timeline['step_s'])}")
    axes[-1].set_xlabel("seconds from the start of the step")
    axes[-1].set_xlim(0, max(timeline["step_s"] for _, timeline in drawn))
    legend(figure, {group: colour for group, colour in colours.items() if group in groups})
    head, rows = ["lane"], [[lane] for lane in lanes]
    for title, timeline in drawn:
        name = title.partition(",")[0].lower()
        head += [f"{name}: works", f"{name}: compute waits"]
        for row, lane in zip(rows, lanes, strict=True):
            waits = "" if lane == LaneName.COMPUTE else format_seconds(timeline["stall_s"].get(lane, 0.0))
            row += [format_seconds(timeline["busy_s"].get(lane, 0.0)), waits]
    said = "What compute and every lane do in a step; the table below has the seconds"
    page = drawing(figure, "One step", said) + table(head, rows)
    return page + (f"<p>Nothing was predicted: {html.escape(why)}.</p>" if why and not predicted else "")


def _summary(config: _Record, steps: Sequence[_Record], evals: Sequence[_Record]) -> str:
    seconds = sum(step["step_s"] for step in steps)
    tokens = sum(step["tokens_per_s"] * step["step_s"] for step in steps)
    found = [
        ("Model", config["model"]),
        ("Data", config["data"]),
        ("Steps", f"{steps[-1]['step']:,} of {config['max_steps']:,}"),
        ("Loss", f"{_figure(steps[0]['loss'])} → {_figure(steps[-1]['loss'])}"),
        ("Time in steps", f"{seconds / 3600:.2f} h"),
        ("Tokens", f"{tokens:,.0f}, {format_rate(tokens / seconds)} per second"),
    ]
    known = [line for line in evals if line["loss"] is not None]
    if known:
        best = min(known, key=lambda line: line["loss"])
        said = f"{_figure(known[0]['loss'])} → {_figure(known[-1]['loss'])}, lowest {_figure(best['loss'])}"
        found.append(("Evaluation loss", f"{said} after step {best['step']:,}"))
    return pairs(found)


def _curves(steps: Sequence[_Record], evals: Sequence[_Record]) -> str:
    lines = {"training": _points(steps, "loss")}
    if evals:
        lines["evaluation"] = _points(evals, "loss")
    page = _drawing("Loss", lines)
    page += _drawing("Gradient norm, before clipping", {"norm": _points(steps, "grad_norm")})
    page += _drawing("Learning rate", {"rate": _points(steps, "lr")})
    rows = [(e["step"], *(_figure(e[key]) for key in ("loss", "perplexity", "bits_per_byte"))) for e in evals]
    if rows:
        head = ("after step", "loss", "perplexity", "bits per byte")
        page += folded("Evaluations", table(head, rows), shown=True)
    return page


def _speed(steps: Sequence[_Record], plan: _Record | None) -> str:
    total = sum(step["step_s"] for step in steps)
    lanes = sorted({lane for step in steps for lane in step["stall_s"]})
    waited = {lane: sum(step["stall_s"].get(lane, 0.0) for step in steps) for lane in lanes}
    moved = {lane: sum(step["bytes_moved"].get(lane, 0) for step in steps) for lane in lanes}
    rows = [
        (lane, f"{waited[lane] / total:.1%}", f"{format_bytes(moved[lane] // len(steps))}" if moved[lane] else "-")
        for lane in sorted(lanes, key=lambda lane: -waited[lane])
    ]
    worn = ""
    if plan and plan["endurance"] and (written := moved.get(LaneName.SSD_WRITE, 0)):
        rated = Figure(plan["endurance"]["value"], plan["endurance"]["source"])
        worn = listed([f"SSD: {wear(written // len(steps), len(steps), rated)}."])
    return (
        _drawing("Tokens per second", {"tokens/s": _points(steps, "tokens_per_s")})
        + "<p>Share of the steps' time that compute waited for a lane or for data, and bytes a step moved:</p>"
        + table(("lane", "waited", "bytes a step"), rows)
        + _tier_use(steps)
        + worn
    )


def _tier_use(steps: Sequence[_Record]) -> str:
    """How much of each tier's budget pages took. Runs of earlier versions do not say."""
    uses: dict[str, list[Mapping[str, float]]] = {}
    for step in steps:
        for tier, use in step.get("tier_use", {}).items():
            uses.setdefault(tier, []).append(use)
    rows = [
        (tier, f"{fmean(use['mean'] for use in of):.1%}", f"{max(use['peak'] for use in of):.1%}")
        for tier, of in uses.items()
    ]
    head = ("tier", "on average", "at most")
    return "<p>Share of each tier's budget that pages took:</p>" + table(head, rows) if rows else ""


def _memory(plan: _Record, steps: Sequence[_Record]) -> str:
    rows = []
    for tier, lines in plan["bytes"].items():
        budget = plan["budgets"].get(tier)
        measured = format_bytes(max(step["peak_bytes"].get(tier, 0) for step in steps)) if steps else ""
        rows += [(tier, state, format_bytes(nbytes), "", "") for state, nbytes in lines.items() if nbytes]
        limit = "-" if budget is None else format_bytes(budget)
        rows.append((tier, "in all", format_bytes(sum(lines.values())), measured, limit))
    return table(("tier", "state", "planned", "measured peak", "budget"), rows)


def _units(plan: _Record) -> str:
    """All units: as squares in the colour of the tier that has their weights, and as a table."""
    cells, rows = [], []
    for unit in plan["units"]:
        homes = unit["homes"]
        home = homes.get("weight") or homes.get("weight_low") or next(iter(homes.values()), "host")
        places = ", ".join(f"{state} on {tier}" for state, tier in homes.items())
        rows.append((unit["name"], f"{unit['parameters']:,}", places))
        said = f"{unit['name']}: {unit['parameters']:,} parameters; {places}"
        cells.append(
            f'<span class="{_TIERS.get(home, "tier-host")}" title="{html.escape(said)}">'
            f"{html.escape(unit['name'])}</span>"
        )
    key = "".join(f'<span class="key {name}">{tier}</span>' for tier, name in _TIERS.items())
    shown = f'<p>Coloured by the home of their weights: {key}</p><div class="units">{"".join(cells)}</div>'
    return shown + folded("All units", table(("unit", "parameters", "homes"), rows))


def _points(lines: Sequence[_Record], key: str) -> list[tuple[int, float]]:
    """(step, value) pairs of one key."""
    return [(line["step"], line[key]) for line in lines if line.get(key) is not None]


def _drawing(title: str, lines: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """Curves over steps as SVG, with a description for screen readers."""
    figure, (axes,) = figure_of(2.8)
    for name, points in lines.items():
        marker = "o" if len(points) < 30 else None
        axes.plot(*zip(*points, strict=True), label=name, marker=marker, markersize=3, linewidth=1.2)
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.locator_params(axis="x", integer=True)
    if len(lines) > 1:
        axes.legend()
    said = "; ".join(
        f"{name} from {_figure(points[0][1])} to {_figure(points[-1][1])}" for name, points in lines.items() if points
    )
    return drawing(figure, title, f"{title} by step: {said}")


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}" if abs(value) < 1e-3 or abs(value) >= 1e5 else f"{value:.4f}"
