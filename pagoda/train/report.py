"""`pagoda report`: one HTML page about a run: losses, the lanes of a step, tiers and reasons."""

import html
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pagoda.errors import ConfigError, needed
from pagoda.forecast.report import format_seconds
from pagoda.memory.files import read_regular
from pagoda.memory.json_forms import FormError, whole
from pagoda.memory.sizes import format_bytes, format_rate
from pagoda.plan.exchanges import GRADIENTS, SEND, SUM, TOKENS
from pagoda.plan.lanes import ALL_LANES, LaneName
from pagoda.train.metrics import STEP_FORM, read_evaluations, read_metrics
from pagoda.train.run_dir import RunDir

BEGINNING = '<!DOCTYPE html><html lang="en" data-made-by="pagoda report">'
"""The beginning of every page. Only files that begin with it are overwritten."""
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2.5rem; border-bottom: 1px solid #d0d7de }
table { border-collapse: collapse } th, td { border: 1px solid #d0d7de; padding: .2rem .6rem; text-align: left }
figure { margin: 1rem 0 } svg { max-width: 100%; height: auto } .table { overflow-x: auto }
"""
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


def report(directory: Path) -> str:
    """The HTML page of a run's directory.

    Raises ConfigError if there is no run or no step yet, or if matplotlib is not installed.
    """
    matplotlib = needed("matplotlib", "pagoda report needs matplotlib: pip install 'pagoda-train[plot]'")
    look = {"svg.fonttype": "none", "text.parse_math": False, "figure.constrained_layout.use": True}
    with matplotlib.rc_context(look):
        return _page_of(directory)


def _page_of(directory: Path) -> str:
    run = RunDir(directory)
    config = run.started_config()
    steps, evals = read_metrics(run.metrics, STEP_FORM), read_evaluations(run.evals)
    if not steps:
        raise ConfigError(f"{directory} has no steps to report yet")
    plan, measured = (_read(file) if file.exists() else None for file in (run.plan, run.timeline))
    seconds = sum(step["step_s"] for step in steps)
    tokens = sum(step["tokens_per_s"] * step["step_s"] for step in steps)
    summary = [
        ("Model", config.model),
        ("Data", config.data),
        ("Steps", f"{steps[-1]['step']:,} of {config.max_steps:,}, in {seconds / 3600:.2f} h"),
        ("Loss", f"{_figure(steps[0]['loss'])} → {_figure(steps[-1]['loss'])}"),
        ("Tokens", f"{tokens:,.0f}, {format_rate(tokens / seconds)} per second"),
    ]
    sections = {"Summary": _table((), summary), "Loss": _losses(steps, evals)}
    if plan:
        sections["One step"] = _lanes(plan["timeline"], measured, plan["not_predicted"])
        sections |= {"Memory": _tiers(plan, steps), "Why this plan": _listed(plan["reasons"])}
    return _page(f"Run {directory.resolve().name}", sections)


def _read(file: Path) -> dict[str, Any]:
    """The content of a file that a run wrote. Raises ConfigError if it cannot be read, or was changed since."""
    try:
        return whole(read_regular(file))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    except FormError as error:
        raise ConfigError(f"{file} was edited or damaged, or another version wrote it ({error})") from error


def _losses(steps: Sequence[_Record], evals: Sequence[_Record]) -> str:
    """The curves of both losses, and a table of the evaluations."""
    figure, axes = _figure_of(3.0)
    for name, lines in (("training", steps), ("evaluation", evals)):
        points = [(line["step"], line["loss"]) for line in lines if line["loss"] is not None]
        if points:
            axes.plot(*zip(*points, strict=True), label=name, marker="o" if len(points) < 30 else None, markersize=3)
    axes.set_xlabel("step")
    axes.locator_params(axis="x", integer=True)
    axes.legend()
    rows = [(e["step"], *(_figure(e[key]) for key in ("loss", "perplexity", "bits_per_byte"))) for e in evals]
    evaluations = _table(("after step", "loss", "perplexity", "bits per byte"), rows) if rows else ""
    return _drawing(figure, "Loss of training and evaluation by step") + evaluations


def _lanes(predicted: _Record | None, measured: _Record | None, why: str) -> str:
    """What compute and every lane do in a step. The prediction is above the measurement, on the same time axis. `why`:
    why nothing was predicted."""
    drawn = [("Predicted", predicted)] if predicted else []
    if measured:
        drawn.append((f"Measured, step {measured['step']}", measured))
    missing = "" if predicted else f"<p>Nothing was predicted: {html.escape(why)}.</p>"
    if not drawn:
        return missing
    lanes = [lane for lane in ALL_LANES if any(lane in timeline["busy_s"] for _, timeline in drawn)]
    figure, axes = _figure_of(0.9 + len(drawn) * (0.5 + 0.28 * len(lanes)), rows=len(drawn))
    axes = axes if len(drawn) > 1 else [axes]
    for axis, (title, timeline) in zip(axes, drawn, strict=True):
        _bars(axis, timeline["spans"], lanes)
        axis.set_title(f"{title}: {format_seconds(timeline['step_s'])}", loc="left")
    axes[-1].set_xlabel("seconds from the start of the step")
    axes[-1].set_xlim(0, max(timeline["step_s"] for _, timeline in drawn))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper")
    head, rows = ["lane"], [[lane] for lane in lanes]
    for title, timeline in drawn:
        name = title.partition(",")[0].lower()
        head += [f"{name}: works", f"{name}: compute waits"]
        for row, lane in zip(rows, lanes, strict=True):
            waits = "" if lane == LaneName.COMPUTE else format_seconds(timeline["stall_s"].get(lane, 0.0))
            row += [format_seconds(timeline["busy_s"].get(lane, 0.0)), waits]
    return _drawing(figure, "What compute and every lane do in a step") + _table(head, rows) + missing


def _bars(axis: Any, spans: Iterable[Sequence[Any]], lanes: Sequence[str]) -> None:
    """Draw a bar for each piece of work in its lane, in the colour of its group."""
    group_of = {kind: group for group, kinds in _WORK.items() for kind in kinds}
    bars: dict[str, dict[str, list[tuple[float, float]]]] = {group: {} for group in _WORK}
    for lane, kind, start, end in spans:
        if lane in lanes:
            bars[group_of.get(kind, "other")].setdefault(lane, []).append((start, end - start))
    for number, (group, by_lane) in enumerate(bars.items()):
        axis.broken_barh([], (0, 0), facecolors=f"C{number}", label=group)
        for lane, found in by_lane.items():
            axis.broken_barh(found, (lanes.index(lane) - 0.4, 0.8), facecolors=f"C{number}", linewidth=0)
    axis.set_yticks(range(len(lanes)), lanes)
    axis.set_ylim(len(lanes) - 0.5, -0.5)


def _tiers(plan: _Record, steps: Sequence[_Record]) -> str:
    """What each tier holds by the plan, the measured peak, and where the states of each unit are."""
    rows = []
    for tier, lines in plan["bytes"].items():
        budget = plan["budgets"].get(tier)
        measured = format_bytes(max(step["peak_bytes"].get(tier, 0) for step in steps))
        rows += [(tier, state, format_bytes(nbytes), "", "") for state, nbytes in lines.items() if nbytes]
        limit = "-" if budget is None else format_bytes(budget)
        rows.append((tier, "in all", format_bytes(sum(lines.values())), measured, limit))
    units = [
        (
            unit["name"],
            f"{unit['parameters']:,}",
            ", ".join(f"{state} on {tier}" for state, tier in unit["homes"].items()),
        )
        for unit in plan["units"]
    ]
    shown = _table(("tier", "state", "planned", "measured peak", "budget"), rows)
    return f"{shown}<details><summary>Units</summary>{_table(('unit', 'parameters', 'states'), units)}</details>"


def _page(title: str, sections: Mapping[str, str]) -> str:
    """A page of sections, each with a heading and its HTML. It needs no other file."""
    body = "".join(f"<h2>{name}</h2>{content}" for name, content in sections.items())
    title = html.escape(title)
    head = f'<meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    return f"{BEGINNING}<head>{head}</head><body><h1>{title}</h1>{body}</body></html>\n"


def _figure_of(height: float, rows: int = 1) -> tuple[Any, Any]:
    """A figure of matplotlib, as wide as the page, and the axes of its rows, or its only axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, height))
    return figure, figure.subplots(rows, 1, sharex=True)


def _drawing(figure: Any, description: str) -> str:
    """A figure as SVG, with a sentence for readers who cannot see it."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{html.escape(description)}"', 1)
    return f"<figure>{text}</figure>"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table, with a header row if `head` is not empty. A wide one scrolls by itself."""
    titles = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="table"><table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>'


def _listed(lines: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}" if abs(value) < 1e-3 or abs(value) >= 1e5 else f"{value:.4f}"
