"""Draws a step: what every lane does when, above what every tier holds."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagoda.errors import ConfigError
from pagoda.memory.sizes import format_bytes
from pagoda.plan.ops import COLLECTIVE, LANES
from pagoda.simulate.timeline import COMPUTE, Timeline

KINDS = {
    "forward": "#4c78a8",
    "backward": "#72b7b2",
    "fetch": "#f58518",
    "offload": "#54a24b",
    "spill": "#b279a2",
    "read": "#eeca3b",
    "gradient": "#ff9da6",
    "gather": "#2f6d4f",
    "reduce": "#8c564b",
    "tokens": "#17becf",
    "step": "#79706e",
    "update": "#e45756",
    "write": "#9d755d",
}
"""First word of a span's name -> colour."""
_OTHER = "#bab0ac"
_GIB = 1 << 30


def check_plotting() -> None:
    """Raises ConfigError if matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'pagoda-train[plot]'") from error


def draw(timeline: Timeline, budgets: Mapping[str, int], title: str, path: Path) -> None:
    """Write a PNG of `timeline`; `budgets` has the bytes that each tier may hold.

    Raises ConfigError if matplotlib is missing, or the file cannot be written.
    """
    check_plotting()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tiers = list(timeline.ledger)
    lanes = [lane for lane in (COMPUTE, *LANES, COLLECTIVE) if lane in {span.lane for span in timeline.spans}]
    heights = [0.5 + 0.4 * len(lanes), *(1.1 for _ in tiers)]
    figure = Figure(figsize=(12, 1.2 + sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    _draw_lanes(axes[0], timeline, lanes)
    axes[0].set_title(title)
    for axis, tier in zip(axes[1:], tiers, strict=True):
        _draw_ledger(axis, timeline, tier, budgets.get(tier))
    axes[-1].set_xlabel("seconds from the start of the step")
    axes[-1].set_xlim(0, timeline.step_s)
    try:
        figure.savefig(path, format="png", dpi=110)
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written: {error.strerror}; name another file") from error


def _draw_lanes(axis: Any, timeline: Timeline, lanes: list[str]) -> None:
    bars: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for span in timeline.spans:
        kind = span.name.partition(" ")[0]
        start = max(0.0, span.start_s)
        bars.setdefault((span.lane, kind), []).append((start, max(0.0, span.end_s - start)))
    for (lane, kind), spans in bars.items():
        if lane in lanes:
            axis.broken_barh(spans, (lanes.index(lane) - 0.4, 0.8), facecolors=KINDS.get(kind, _OTHER), linewidth=0)
    axis.set_yticks(range(len(lanes)), lanes)
    axis.set_ylim(len(lanes) - 0.5, -0.5)
    shown = [kind for kind in KINDS if any(kind == other for _, other in bars)]
    swatches = [axis.bar(0, 0, color=KINDS[kind], label=kind) for kind in shown]
    axis.legend(handles=swatches, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def _draw_ledger(axis: Any, timeline: Timeline, tier: str, budget: int | None) -> None:
    points = timeline.ledger[tier]
    times = [max(0.0, seconds) for seconds, _ in points] + [timeline.step_s]
    held = [nbytes / _GIB for _, nbytes in points]
    axis.fill_between(times, [*held, held[-1]], step="post", color="#4c78a8", alpha=0.5)
    if budget is not None:
        most = max(held)
        # A budget far above what is held would press that flat: say it in words then.
        if budget / _GIB <= 3 * most:
            axis.axhline(budget / _GIB, color="#e45756", linestyle="--", linewidth=1)
        axis.text(1.005, 0.5, f"budget\n{format_bytes(budget)}", transform=axis.transAxes, va="center", color="#e45756")
    axis.set_ylim(bottom=0)
    axis.set_ylabel(f"{tier}, GiB")
