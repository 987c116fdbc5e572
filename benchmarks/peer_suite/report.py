"""The figures of benchmarks/peers.py as Markdown, and as two plots."""

import statistics
from pathlib import Path
from typing import Any

from pagoda.memory.sizes import parse_bytes

Figures = dict[str, Any]
MIB, GIB = 1 << 20, 1 << 30
NOTHING = "-"


def tables(result: Figures) -> str:
    """The main figures. Quartiles, saving, loading, starting and settings are in the file of results only."""
    lines: list[str] = []
    if variants := result.get("speed"):
        lines += [*_speed(variants), *_failures(variants)]
    if "largest" in result:
        lines += _largest(result["largest"])
    return "\n".join(lines).strip()


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _head(*cells: str) -> list[str]:
    return ["", _row(*cells), "|" + "---|" * len(cells)]


def _machine(part: Figures, variant: str) -> str:
    settings = part["settings"]
    text = f"{settings['machine']}, load average {part['load_average']:.1f} before the run. `{settings['model']}`"
    return f"{text} in {variant}, clipping at {settings['clip']}"


def _speed(variants: Figures) -> list[str]:
    """A step over that of plain PyTorch, of all variants; seconds, RAM and bytes written of the first variant, with its
    middle number of tokens."""
    lines: list[str] = []
    labels: dict[str, str] = {}
    for variant, part in variants.items():
        lines.append(f"- {_machine(part, variant)}; {part['settings']['rounds']} rounds.")
        labels |= {name: one["label"] for name, one in part["figures"].items() if "error" not in one}
    columns = [(variant, str(count)) for variant, part in variants.items() for count in part["settings"]["tokens"]]
    first, part = next(iter(variants.items()))
    middle = str(sorted(part["settings"]["tokens"])[len(part["settings"]["tokens"]) // 2])
    lines += ["", "Median of a step's seconds over those of plain PyTorch with checkpointing in the same round. The"]
    lines += [f"last columns are of {first} with {middle} tokens."]
    heads = [f"{variant}: {int(count):,} tokens" for variant, count in columns]
    lines += _head("system", *heads, "a step", "most RAM of the process", "written a step")
    for name, label in labels.items():
        figures = [_at(variants[variant], name, count) for variant, count in columns]
        cells = [NOTHING if at is None else f"{at['ratio']['median']:.2f}" for at in figures]
        lines.append(_row(label, *cells, *_costs(_at(part, name, middle))))
    return lines


def _at(part: Figures, name: str, tokens: str) -> Figures | None:
    """The figures of a system with a number of tokens, if it ran."""
    figures: Figures = part["figures"].get(name, {}).get("tokens", {})
    return figures.get(tokens)


def _costs(at: Figures | None) -> list[str]:
    """Seconds of a step, RAM and bytes written of a system that ran."""
    if at is None:
        return [NOTHING] * 3
    return [
        f"{statistics.median(at['step_s']):.2f} s",
        f"{at['peak_bytes'] / MIB:,.0f} MiB",
        f"{at['written_bytes'] / MIB:,.0f} MiB",
    ]


def _failures(variants: Figures) -> list[str]:
    """Why a system did not run."""
    failed: dict[tuple[str, str], list[str]] = {}
    for variant, part in variants.items():
        for one in part["figures"].values():
            if "error" in one:
                failed.setdefault((one["label"], one["error"]), []).append(variant)
    lines = [""]
    for (label, error), of in failed.items():
        where = "" if len(of) == len(variants) else f" ({'; '.join(of)})"
        lines.append(f"- {label} did not run{where}: `{error}`")
    return [*lines, ""]


def _largest(part: Figures) -> list[str]:
    settings = part["settings"]
    limits = by_ram(part["figures"])
    lines = [
        f"{_machine(part, settings['precision'])}, more or fewer layers, {settings['tokens']} tokens, three steps."
    ]
    lines += [f"Limited by {settings['limited_by']}; no turn is longer than {settings['turn_s']:.0f} s."]
    lines += _head("system", *(f"largest model in {parse_bytes(limit) / GIB:g} GiB" for limit in limits))
    labels = {name: one["label"] for of in limits.values() for name, one in of.items()}
    for name, label in labels.items():
        lines.append(_row(label, *(_most(of.get(name)) for of in limits.values())))
    return [*lines, ""]


def by_ram(limits: Figures) -> dict[str, Figures]:
    """The largest models by limit, the least first. What trains in less RAM trains in more, if a search ended early."""
    grown: dict[str, Figures] = {}
    largest: Figures = {}
    for limit in sorted(limits, key=parse_bytes):
        for name, figures in limits[limit].items():
            if name not in largest or figures["parameters"] >= largest[name]["parameters"]:
                largest[name] = figures
        grown[limit] = {name: largest[name] for name in limits[limit]}
    return grown


def _most(figures: Figures | None) -> str:
    """The largest model of a system, and what stopped larger ones if it was not their RAM."""
    if figures is None:
        return NOTHING
    most = f"{figures['parameters'] / 1e6:,.0f} M" if figures["parameters"] else "none"
    return most if _ends_by_ram(figures) else f"{most}; {figures['stopped_by']}".replace("|", "\\|")


def _ends_by_ram(figures: Figures) -> bool:
    return str(figures["stopped_by"]).endswith("of RAM")


def draw(result: Figures, folder: Path) -> None:
    """peers_time.png: a step against RAM, of the first variant. peers_tokens.png: its cost of a token.
    peers_largest.png: the largest model against RAM."""
    if part := next(iter(result.get("speed", {}).values()), None):
        _draw_time(part, folder / "peers_time.png")
        _draw_tokens(part, folder / "peers_tokens.png")
    if "largest" in result:
        _draw_largest(by_ram(result["largest"]["figures"]), folder / "peers_largest.png")


def _draw_time(part: Figures, path: Path) -> None:
    from matplotlib.figure import Figure

    tokens = [str(count) for count in sorted(part["settings"]["tokens"])]
    drawing = Figure(figsize=(3.2 * len(tokens), 4.2), dpi=100, layout="constrained")
    for index, (axes, count) in enumerate(zip(drawing.subplots(1, len(tokens), squeeze=False)[0], tokens, strict=True)):
        ours = []
        for name, one in part["figures"].items():
            if "error" in one:
                continue
            at = one["tokens"][count]
            point = (at["peak_bytes"] / GIB, at["ratio"]["median"])
            paged = name.startswith("pagoda")
            axes.plot(
                *point, "o" if paged else "s", color="black" if paged else None, label=None if paged else one["label"]
            )
            if paged:
                ours.append(point)
        if ours:
            axes.plot(*zip(*sorted(ours), strict=True), color="black", label="Pagoda, more or less on SSD")
        axes.set(title=f"{int(count):,} tokens", xlabel="RAM of the process, GiB")
        axes.set(xlim=(0, 1.05 * axes.get_xlim()[1]), ylim=(0, 1.05 * axes.get_ylim()[1]))
        if not index:
            axes.set_ylabel("time of a step, over plain PyTorch")
            drawing.legend(loc="outside lower center", ncols=2, fontsize="small")
    drawing.savefig(path)


def _draw_tokens(part: Figures, path: Path) -> None:
    from matplotlib.figure import Figure

    tokens = sorted(part["settings"]["tokens"])
    drawing = Figure(figsize=(6, 4.6), dpi=100, layout="constrained")
    axes = drawing.subplots()
    for name, one in part["figures"].items():
        if "error" not in one:
            costs = [statistics.median(one["tokens"][str(count)]["step_s"]) / count * 1000 for count in tokens]
            paged = name.startswith("pagoda")
            axes.plot(tokens, costs, "o-" if paged else "s--", label=one["label"])
    axes.set(xscale="log", ylim=(0, None), xlabel="tokens of a step", ylabel="milliseconds a token")
    axes.set_xticks(tokens, [f"{count:,}" for count in tokens])
    axes.minorticks_off()
    drawing.legend(loc="outside lower center", ncols=2, fontsize="x-small")
    drawing.savefig(path)


def _draw_largest(figures: Figures, path: Path) -> None:
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(6, 4), dpi=100, layout="constrained")
    axes = drawing.subplots()
    lines: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for limit, of in figures.items():
        for one in of.values():
            if one["parameters"]:
                kind = (one["label"], "o-") if _ends_by_ram(one) else (f"{one['label']}: at least", "^")
                lines.setdefault(kind, []).append((parse_bytes(limit) / GIB, one["parameters"] / 1e6))
    for (label, style), points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), style, label=label)
    axes.set(xlabel="RAM of the process, GiB", ylabel="largest model, M parameters", yscale="log")
    axes.legend(fontsize="x-small")
    drawing.savefig(path)
