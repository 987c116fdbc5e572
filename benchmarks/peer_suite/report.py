"""The figures of benchmarks/peers.py as Markdown, and as two plots."""

import statistics
from pathlib import Path
from typing import Any

from pagoda.memory.sizes import parse_bytes
from turns import shown

Figures = dict[str, Any]
MIB, GIB = 1 << 20, 1 << 30
NOTHING = "-"


def tables(result: Figures) -> str:
    """All figures that there are."""
    lines: list[str] = []
    for variant, part in result.get("speed", {}).items():
        lines += _speed(variant, part)
    if "speed" in result:
        lines += _systems(result["speed"])
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


def _speed(variant: str, part: Figures) -> list[str]:
    settings = part["settings"]
    tokens = [str(count) for count in sorted(settings["tokens"])]
    lines = [f"{_machine(part, variant)}; {settings['rounds']} rounds."]
    lines += ["Seconds of a step over those of plain PyTorch with checkpointing in the same round: the median, and the"]
    lines += ["quartiles in brackets."]
    of_micro_batch = " of a micro-batch" if settings["micro_batches"] > 1 else ""
    lines += _head("system", *(f"{int(count):,} tokens{of_micro_batch}" for count in tokens))
    ran = [one for one in part["figures"].values() if "error" not in one]
    for one in ran:
        lines.append(_row(one["label"], *(shown(one["tokens"][count]["ratio"]) for count in tokens)))
    middle = tokens[len(tokens) // 2]
    lines += _head(
        "system",
        f"a step, {middle} tokens{of_micro_batch}",
        "most RAM of the process",
        "written a step",
        "first step ended after",
        "save; RAM in addition",
        "load; RAM in addition",
    )
    for one in ran:
        at = one["tokens"][middle]
        cells = [f"{statistics.median(at['step_s']):.2f} s", f"{at['peak_bytes'] / MIB:,.0f} MiB"]
        cells += [f"{at['written_bytes'] / MIB:,.0f} MiB"]
        cells += [f"{one['start_s']:.1f} s", _seconds_and_ram(one, "save"), _seconds_and_ram(one, "load")]
        lines.append(_row(one["label"], *cells))
    return [*lines, ""]


def _seconds_and_ram(figures: Figures, turn: str) -> str:
    if f"{turn}_s" not in figures:
        return NOTHING
    return f"{figures[f'{turn}_s']:.1f} s; {max(0, figures[f'{turn}_bytes']) / MIB:,.0f} MiB"


def _systems(variants: Figures) -> list[str]:
    """What every variant shares, once: why a system did not run, and the settings of all."""
    systems = [one for part in variants.values() for one in part["figures"].values()]
    lines = []
    if failed := {(one["label"], one["error"].replace("|", "\\|")): None for one in systems if "error" in one}:
        lines += _head("system that did not run", "why")
        lines += [_row(*each) for each in failed]
    lines += _head("system", "settings")
    return lines + [_row(*each) for each in {one["label"]: one["settings"] for one in systems}.items()] + [""]


def _largest(part: Figures) -> list[str]:
    settings = part["settings"]
    limits = dict(sorted(part["figures"].items(), key=lambda of: parse_bytes(of[0])))
    lines = [
        f"{_machine(part, settings['precision'])}, more or fewer layers, {settings['tokens']} tokens, three steps,"
    ]
    lines += [f"no turn longer than {settings['turn_s']:.0f} s. Memory is limited by {settings['limited_by']}."]
    lines += ["Where nothing else is said, a larger model takes more RAM than that."]
    lines += _head("system", *(f"largest model in {parse_bytes(limit) / GIB:g} GiB" for limit in limits))
    labels = {name: one["label"] for of in limits.values() for name, one in of.items()}
    for name, label in labels.items():
        lines.append(_row(label, *(_most(of.get(name)) for of in limits.values())))
    return [*lines, ""]


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
        _draw_largest(result["largest"]["figures"], folder / "peers_largest.png")


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
