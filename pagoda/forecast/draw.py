"""Draws a step: the work of every lane over time, and below it the bytes that each tier holds."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pagoda.errors import ConfigError, needed
from pagoda.memory.sizes import format_bytes
from pagoda.plan.exchanges import GRADIENTS, SEND, SUM, TOKENS
from pagoda.simulate.timeline import ALL_LANES, Timeline

COLLECTIVE_KINDS = ("gather", "reduce", "share", TOKENS, SUM, GRADIENTS, SEND)
"""Kinds of work between ranks."""
KINDS = (
    *("forward", "backward", "step", "fetch", "offload", "spill", "read", "gradient"),
    *("update", "write", "save", "return", *COLLECTIVE_KINDS),
)
"""Kinds of work. Each kind has a colour of matplotlib's tab20."""
_GIB = 1 << 30


def check_plotting() -> None:
    """Raises ConfigError if matplotlib is missing."""
    needed("matplotlib", "--plot needs matplotlib: pip install 'pagoda-train[plot]'")


def draw(timeline: Timeline, budgets: Mapping[str, int], title: str, path: Path) -> None:
    """Write `timeline` to a PNG file. `budgets` gives the bytes that each tier may hold.

    Raises ConfigError if matplotlib is missing or the file cannot be written.
    """
    check_plotting()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tiers = list(timeline.held_bytes)
    lanes = [lane for lane in ALL_LANES if lane in {span.lane for span in timeline.spans}]
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


def colour(kind: str) -> Any:
    """The RGB colour of a kind of work."""
    from matplotlib import colormaps

    return colormaps["tab20"](KINDS.index(kind))[:3]


def draw_bars(
    axis: Any, works: Iterable[tuple[str, str, float, float]], lanes: Sequence[str], colour: Callable[[str], Any]
) -> set[str]:
    """Draw a bar for each piece of work: its lane, its kind, its start and its end. Returns the kinds."""
    bars: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for lane, kind, start, end in works:
        bars.setdefault((kind, lane), []).append((start, end - start))
    for (kind, lane), spans in bars.items():
        axis.broken_barh(spans, (lanes.index(lane) - 0.4, 0.8), facecolors=colour(kind), linewidth=0)
    axis.set_yticks(range(len(lanes)), lanes)
    axis.set_ylim(len(lanes) - 0.5, -0.5)
    return {kind for kind, _ in bars}


def _draw_lanes(axis: Any, timeline: Timeline, lanes: list[str]) -> None:
    works = ((span.lane, span.kind, max(0.0, span.start_s), max(0.0, span.end_s)) for span in timeline.spans)
    drawn = draw_bars(axis, works, lanes, colour)
    swatches = [axis.bar(0, 0, color=[colour(kind)], label=kind) for kind in KINDS if kind in drawn]
    axis.legend(handles=swatches, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def _draw_ledger(axis: Any, timeline: Timeline, tier: str, budget: int | None) -> None:
    points = timeline.held_bytes[tier]
    times = [max(0.0, seconds) for seconds, _ in points] + [timeline.step_s]
    held = [nbytes / _GIB for _, nbytes in points]
    axis.fill_between(times, [*held, held[-1]], step="post", color="#4c78a8", alpha=0.5)
    if budget is not None:
        most = max(held)
        # A line for a much larger budget would flatten the curve, so only the text states it.
        if budget / _GIB <= 3 * most:
            axis.axhline(budget / _GIB, color="#e45756", linestyle="--", linewidth=1)
        axis.text(1.005, 0.5, f"budget\n{format_bytes(budget)}", transform=axis.transAxes, va="center", color="#e45756")
    axis.set_ylim(bottom=0)
    axis.set_ylabel(f"{tier}, GiB")
