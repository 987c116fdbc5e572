"""`pagoda report`: a run as one page of HTML that needs nothing else: curves, memory, units, settings, checkpoints.

matplotlib draws; its colours become variables of the page, which is light or dark as the reader's system is. What a
drawing shows is also in a table, for screen readers.
"""

import html
import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pagoda.errors import ConfigError
from pagoda.memory.sizes import format_bytes
from pagoda.train.metrics import read_metrics
from pagoda.train.run_dir import RunDir

_MOST_POINTS = 1000
"""Of a curve: of more steps, the lowest and the highest of each part are drawn."""
_INK = "#123456"
"""Text and axes."""
_COLOURS = ("#123401", "#123402", "#123403", "#123404", "#123405", "#123406", "#123407")
"""What is drawn in; the page says what these are in light and in dark."""
_TIERS = {"device": "tier-device", "host": "tier-host", "ssd": "tier-ssd"}
_STYLE = """
:root { color-scheme: light dark; --back: #fff; --ink: #1f2328; --line: #d0d7de; --c0: #0550ae; --c1: #b35900;
  --c2: #116329; --c3: #a40e26; --c4: #6639ba; --c5: #7d4e00; --c6: #57606a; --device: #6639ba;
  --host: #0550ae; --ssd: #9a4a00 }
@media (prefers-color-scheme: dark) { :root { --back: #0d1117; --ink: #e6edf3; --line: #30363d; --c0: #79c0ff;
  --c1: #ffa657; --c2: #7ee787; --c3: #ff7b72; --c4: #d2a8ff; --c5: #e3b341; --c6: #8b949e; --device: #8957e5;
  --host: #1f6feb; --ssd: #bd561d } }
body { background: var(--back); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 70rem; padding: 0 1rem }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2.5rem; border-bottom: 1px solid var(--line) }
nav a { margin-right: 1rem } a { color: var(--c0) }
table { border-collapse: collapse } th, td { border: 1px solid var(--line); padding: .2rem .6rem; text-align: left }
td.number { text-align: right; font-variant-numeric: tabular-nums }
figure { margin: 1rem 0 } svg { max-width: 100%; height: auto }
.units { display: flex; flex-wrap: wrap; gap: 3px } .units span { color: #fff; padding: 2px 6px; font-size: .75rem;
  border-radius: 3px } .tier-device { background: var(--device) } .tier-host { background: var(--host) }
.tier-ssd { background: var(--ssd) } .key { padding: 2px 6px; color: #fff; border-radius: 3px; margin-right: .5rem }
details { margin: .5rem 0 } pre { overflow-x: auto }
"""

BEGINNING = '<!DOCTYPE html><html lang="en" data-made-by="pagoda report">'
"""Of every report: only files that begin so are written over."""


def report(directory: Path) -> str:
    """The page of a run, as HTML.

    Raises:
        ConfigError: there is no run in the directory, or matplotlib is not installed.
    """
    run = RunDir(directory)
    config = json.loads(run.started_config().to_json())
    steps = read_metrics(run.metrics) if run.metrics.exists() else []
    evals = read_metrics(run.evals) if run.evals.exists() else []
    if not steps:
        raise ConfigError(f"{directory} has no steps to report yet")
    plan = json.loads(run.plan.read_text()) if run.plan.exists() else None
    sections = {
        "Summary": _summary(config, steps, evals),
        "Loss": _curves(steps, evals),
        "Speed": _speed(steps),
        **({"Memory": _memory(plan, steps), "Units": _units(plan)} if plan else {}),
        "Checkpoints": _checkpoints(run, evals),
        **({"Why this plan": _list(plan["reasons"]), "Machine": _pairs(plan["machine"].items())} if plan else {}),
        "Settings": _pairs(_flat(config)),
    }
    anchors = {name: re.sub(r"\W+", "-", name.lower()) for name in sections}
    links = "".join(f'<a href="#{anchors[name]}">{name}</a>' for name in sections)
    body = "".join(f'<h2 id="{anchors[name]}">{name}</h2>{content}' for name, content in sections.items())
    title = html.escape(f"Run {directory.resolve().name}")
    return (
        f'{BEGINNING}<head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>'
        f'<body><h1>{title}</h1><nav aria-label="Sections">{links}</nav><main>{body}</main></body></html>\n'
    )


def _summary(config: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], evals: Sequence[Mapping[str, Any]]) -> str:
    seconds = sum(step["step_s"] for step in steps)
    tokens = sum(step["tokens_per_s"] * step["step_s"] for step in steps)
    found = [
        ("Model", config["model"]),
        ("Data", config["data"]),
        ("Steps", f"{steps[-1]['step']:,} of {config['steps']:,}"),
        ("Loss", f"{_figure(steps[0]['loss'])} → {_figure(steps[-1]['loss'])}"),
        ("Time in steps", f"{seconds / 3600:.2f} h"),
        ("Tokens", f"{tokens:,.0f}, {tokens / seconds:,.0f} per second"),
    ]
    known = [line for line in evals if line["loss"] is not None]
    if known:
        best = min(known, key=lambda line: line["loss"])
        said = f"{_figure(known[0]['loss'])} → {_figure(known[-1]['loss'])}, lowest {_figure(best['loss'])}"
        found.append(("Evaluation loss", f"{said} after step {best['step']:,}"))
    return _pairs(found)


def _curves(steps: Sequence[Mapping[str, Any]], evals: Sequence[Mapping[str, Any]]) -> str:
    lines = {"training": _points(steps, "loss")}
    if evals:
        lines["evaluation"] = _points(evals, "loss")
    drawn = [_drawing("Loss", "step", lines)]
    drawn.append(_drawing("Gradient norm, before clipping", "step", {"norm": _points(steps, "grad_norm")}))
    drawn.append(_drawing("Learning rate", "step", {"rate": _points(steps, "lr")}))
    rows = [(e["step"], *(_figure(e[key]) for key in ("loss", "perplexity", "bits_per_byte"))) for e in evals]
    table = _table(("after step", "loss", "perplexity", "bits per byte"), rows) if rows else ""
    return "".join(drawn) + (f"<details open><summary>Evaluations</summary>{table}</details>" if table else "")


def _speed(steps: Sequence[Mapping[str, Any]]) -> str:
    total = sum(step["step_s"] for step in steps)
    lanes = sorted({lane for step in steps for lane in step["stall_s"]})
    waited = {lane: sum(step["stall_s"].get(lane, 0.0) for step in steps) for lane in lanes}
    moved = {lane: sum(step["bytes_moved"].get(lane, 0) for step in steps) for lane in lanes}
    rows = [
        (lane, f"{waited[lane] / total:.1%}", f"{format_bytes(moved[lane] // len(steps))}" if moved[lane] else "-")
        for lane in sorted(lanes, key=lambda lane: -waited[lane])
    ]
    return (
        _drawing("Tokens per second", "step", {"tokens/s": _points(steps, "tokens_per_s")})
        + "<p>Share of the steps' time that compute waited for a lane or for data, and bytes a step moved:</p>"
        + _table(("lane", "waited", "bytes a step"), rows)
    )


def _memory(plan: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for tier, lines in plan["bytes"].items():
        budget = plan["budgets"].get(tier)
        measured = max(step["peak_bytes"].get(tier, 0) for step in steps)
        rows += [(tier, state, format_bytes(nbytes), "", "") for state, nbytes in lines.items() if nbytes]
        limit = "-" if budget is None else format_bytes(budget)
        rows.append((tier, "in all", format_bytes(sum(lines.values())), format_bytes(measured), limit))
    return _bars(plan) + _table(("tier", "state", "planned", "measured peak", "budget"), rows)


def _units(plan: Mapping[str, Any]) -> str:
    """Every unit, coloured by the home of its weights."""
    cells = []
    for unit in plan["units"]:
        homes = unit["homes"]
        home = homes.get("weight") or homes.get("weight_low") or next(iter(homes.values()), "host")
        said = f"{unit['name']}: {unit['parameters']:,} parameters; " + ", ".join(
            f"{state} on {tier}" for state, tier in homes.items()
        )
        cells.append(
            f'<span class="{_TIERS.get(home, "tier-host")}" title="{html.escape(said)}">'
            f"{html.escape(unit['name'])}</span>"
        )
    key = "".join(f'<span class="key {name}">{tier}</span>' for tier, name in _TIERS.items())
    return f'<p>Coloured by the home of their weights: {key}</p><div class="units">{"".join(cells)}</div>'


def _checkpoints(run: RunDir, evals: Sequence[Mapping[str, Any]]) -> str:
    losses = {line["step"]: line["loss"] for line in evals}
    rows = [(c.path.name, _figure(losses.get(c.step))) for c in run.all_checkpoints()]
    return _table(("checkpoint", "evaluation loss"), rows) if rows else "<p>None is saved.</p>"


def _points(lines: Sequence[Mapping[str, Any]], key: str) -> list[tuple[int, float]]:
    """Pairs of step and figure, thinned so that extremes stay."""
    found = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
    if len(found) <= _MOST_POINTS:
        return found
    size = math.ceil(len(found) / (_MOST_POINTS // 2))
    kept: list[tuple[int, float]] = []
    for at in range(0, len(found), size):
        part = found[at : at + size]
        low, high = min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])
        kept += sorted({low, high})
    return kept


def _figure_of(size: tuple[float, float]) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("pagoda report needs matplotlib: pip install 'pagoda-train[plot]'") from error
    return Figure(figsize=size, layout="constrained")


def _drawing(title: str, across: str, lines: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """Curves as SVG, with a sentence for who cannot see them."""
    figure = _figure_of((9, 2.8))
    axes = figure.subplots()
    for (name, points), colour in zip(lines.items(), _COLOURS, strict=False):
        marker = "o" if len(points) < 30 else None
        axes.plot(*zip(*points, strict=True), label=name, color=colour, marker=marker, markersize=3, linewidth=1.2)
    axes.set_xlabel(across)
    if len(lines) > 1:
        axes.legend(frameon=False, labelcolor=_INK)
    said = "; ".join(
        f"{name} from {_figure(points[0][1])} to {_figure(points[-1][1])}" for name, points in lines.items() if points
    )
    return _as_svg(figure, axes, title, f"{title} by {across}: {said}")


def _bars(plan: Mapping[str, Any]) -> str:
    """What each tier holds, state by state, as a share of its budget."""
    tiers = [tier for tier, lines in plan["bytes"].items() if lines]
    figure = _figure_of((9, 0.8 + 0.5 * len(tiers)))
    axes = figure.subplots()
    states = list(dict.fromkeys(state for tier in tiers for state in plan["bytes"][tier]))
    for at, tier in enumerate(tiers):
        left = 0.0
        budget = plan["budgets"].get(tier) or sum(plan["bytes"][tier].values())
        for state, nbytes in plan["bytes"][tier].items():
            colour = _COLOURS[states.index(state) % len(_COLOURS)]
            axes.barh(at, 100 * nbytes / budget, left=left, color=colour, edgecolor=_INK, linewidth=0.4)
            left += 100 * nbytes / budget
    axes.set_yticks(range(len(tiers)), tiers)
    axes.set_xlabel("percent of the budget; the table below says which state is which")
    return _as_svg(figure, axes, "Memory by tier and state", "What the table below says, as bars")


def _as_svg(figure: Any, axes: Any, title: str, said: str) -> str:
    """A drawing in the colours of the page."""
    import matplotlib

    for spine in axes.spines.values():
        spine.set_color(_INK)
    axes.tick_params(colors=_INK)
    axes.xaxis.label.set_color(_INK)
    axes.set_title(title, color=_INK, fontsize=11, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.patch.set_alpha(0)
    stream = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "var(--ink)")
    for number, colour in enumerate(_COLOURS):
        text = text.replace(colour, f"var(--c{number})")
    # Ids are unique in a page; titles of drawings are.
    prefix = re.sub(r"\W+", "-", title.lower())
    text = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{prefix}-", text)
    text = text.replace("<svg", f'<svg role="img" aria-label="{html.escape(said)}"', 1)
    return f"<figure>{text}</figure>"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    titles = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td{_kind(cell)}>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"


def _pairs(pairs: Iterable[tuple[str, object]]) -> str:
    rows = "".join(
        f'<tr><th scope="row">{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>' for name, value in pairs
    )
    return f"<table><tbody>{rows}</tbody></table>"


def _list(lines: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>"


def _kind(cell: object) -> str:
    return ' class="number"' if re.match(r"-?[\d.,]+( ?[KMGT]?i?B|%)?$", str(cell)) else ""


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, object]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}" if abs(value) < 1e-3 or abs(value) >= 1e5 else f"{value:.4f}"
