"""A self-contained HTML page with tables and matplotlib drawings, light or dark like the reader's system.

The colours of drawings become CSS variables. Every drawing's content is also in a table, for screen readers.
"""

import html
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pagoda.errors import needed

INK = "#123456"
"""Text and axes of a drawing."""
COLOURS = ("#123401", "#123402", "#123403", "#123404", "#123405", "#123406", "#123407")
"""Placeholders for the colours of drawings. The page defines each for light and dark. The last one is grey."""
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
nav a { margin-right: 1rem } a { color: var(--c0) } .table { overflow-x: auto }
table { border-collapse: collapse } th, td { border: 1px solid var(--line); padding: .2rem .6rem; text-align: left }
td.number { text-align: right; font-variant-numeric: tabular-nums }
figure { margin: 1rem 0 } svg { max-width: 100%; height: auto }
.units { display: flex; flex-wrap: wrap; gap: 3px } .units span { color: #fff; padding: 2px 6px; font-size: .75rem;
  border-radius: 3px } .tier-device { background: var(--device) } .tier-host { background: var(--host) }
.tier-ssd { background: var(--ssd) } .key { padding: 2px 6px; color: #fff; border-radius: 3px; margin-right: .5rem }
details { margin: .5rem 0 }
"""
BEGINNING = '<!DOCTYPE html><html lang="en" data-made-by="pagoda report">'
"""The beginning of every page. Only files that begin with it are overwritten."""


def page(title: str, sections: Mapping[str, str]) -> str:
    """A page of sections. Each has a heading, its HTML, and a link to it at the top."""
    anchors = {name: _anchor(name) for name in sections}
    links = "".join(f'<a href="#{anchors[name]}">{name}</a>' for name in sections)
    body = "".join(f'<h2 id="{anchors[name]}">{name}</h2>{content}' for name, content in sections.items())
    title = html.escape(title)
    return (
        f'{BEGINNING}<head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>'
        f'<body><h1>{title}</h1><nav aria-label="Sections">{links}</nav><main>{body}</main></body></html>\n'
    )


@contextmanager
def look() -> Iterator[None]:
    """Inside, matplotlib draws in the colours of the page. Raises ConfigError if matplotlib is not installed."""
    matplotlib = needed("matplotlib", "pagoda report needs matplotlib: pip install 'pagoda-train[plot]'")
    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color")
    settings = {
        **dict.fromkeys(inked, INK),
        "axes.prop_cycle": matplotlib.rcsetup.cycler(color=COLOURS),
        "axes.facecolor": "none",
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlelocation": "left",
        "axes.titlesize": 11,
        "figure.constrained_layout.use": True,
        "legend.frameon": False,
        "path.simplify_threshold": 1.0,  # a curve of many steps has its extremes in each pixel, not each step
        "svg.fonttype": "none",
        "text.parse_math": False,
        "svg.hashsalt": "pagoda",
    }
    with matplotlib.rc_context(settings):
        yield


def figure_of(height: float, rows: int = 1) -> tuple[Any, Any]:
    """A figure of matplotlib, as wide as the page, and the axes of its rows."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, height))
    return figure, figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]


def bars(
    axis: Any, works: Iterable[tuple[str, str, float, float]], lanes: Sequence[str], colours: Mapping[str, str]
) -> None:
    """Draw a bar for each piece of work: its lane, its group, its start and its end. Each group has its colour."""
    spans: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for lane, group, start, end in works:
        spans.setdefault((group, lane), []).append((start, end - start))
    for (group, lane), found in spans.items():
        axis.broken_barh(found, (lanes.index(lane) - 0.4, 0.8), facecolors=colours[group], linewidth=0)
    axis.set_yticks(range(len(lanes)), lanes)
    axis.set_ylim(len(lanes) - 0.5, -0.5)


def legend(figure: Any, colours: Mapping[str, str]) -> None:
    """Explain the colours of bars, on the right of a figure."""
    from matplotlib.patches import Patch

    patches = [Patch(color=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=patches, loc="outside right upper")


def drawing(figure: Any, title: str, said: str) -> str:
    """A figure as SVG in the colours of the page, with a sentence for readers who cannot see it."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :].replace(INK, "var(--ink)")
    for number, colour in enumerate(COLOURS):
        text = text.replace(colour, f"var(--c{number})")
    # Ids must be unique in a page. Titles of drawings are.
    text = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{_anchor(title)}-", text)
    text = text.replace("<svg", f'<svg role="img" aria-label="{html.escape(said)}"', 1)
    return f"<figure>{text}</figure>"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table with a header row. A wide table scrolls by itself, also with the keyboard."""
    titles = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td{_kind(cell)}>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    return _scrolling(", ".join(head), f"<thead><tr>{titles}</tr></thead><tbody>{body}</tbody>")


def pairs(found: Iterable[tuple[str, object]]) -> str:
    """A table of names and values."""
    rows = "".join(
        f'<tr><th scope="row">{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>' for name, value in found
    )
    return _scrolling("names and values", f"<tbody>{rows}</tbody>")


def listed(lines: Iterable[str]) -> str:
    """A list."""
    return "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>"


def folded(summary: str, content: str, *, shown: bool = False) -> str:
    """Content that the reader unfolds."""
    return f"<details{' open' * shown}><summary>{html.escape(summary)}</summary>{content}</details>"


def _scrolling(label: str, rows: str) -> str:
    label = html.escape(label)
    return f'<div class="table" tabindex="0" role="region" aria-label="Table: {label}"><table>{rows}</table></div>'


def _anchor(name: str) -> str:
    return re.sub(r"\W+", "-", name.lower())


def _kind(cell: object) -> str:
    return ' class="number"' if re.match(r"-?[\d.,]+( ?[KMGT]?i?B| m?s|%)?$", str(cell)) else ""
