"""The plots of the papers' experiments: Pagoda in black, as in the peers' plots."""

from pathlib import Path
from typing import Any

from paper_tables.experiments import Plot

_STYLES = ("o-", "o--", "o:", "o-.")


def draw(plot: Plot, folder: Path) -> None:
    """NAME.png."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(6, 4), dpi=80, layout="constrained")
    axes = drawing.subplots()
    (_bars if plot.bars else _lines)(plot, axes)
    axes.set(xlabel=plot.xlabel, ylabel=plot.ylabel)
    if plot.log:
        axes.set(xscale="log")
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    axes.legend(fontsize="x-small")
    drawing.savefig(folder / f"{plot.name}.png", metadata={"Software": None})


def _lines(plot: Plot, axes: Any) -> None:
    for label, points in plot.theirs.items():
        axes.plot(*zip(*points, strict=True), "s-", label=label)
    for style, (label, points) in zip(_STYLES, plot.ours.items(), strict=False):
        axes.plot(*zip(*points, strict=True), style, label=label, color="black")


def _bars(plot: Plot, axes: Any) -> None:
    series = [*plot.theirs.items(), *plot.ours.items()]
    width = 0.8 / len(series) if len(series[0][1]) > 1 else 0.8
    for index, (label, points) in enumerate(series):
        shift = (index - (len(series) - 1) / 2) * width if len(points) > 1 else 0.0
        color = "black" if label in plot.ours else None
        axes.bar([x + shift for x, _ in points], [y for _, y in points], width, label=label, color=color)
    axes.set_xticks(range(len(plot.categories)), plot.categories)
