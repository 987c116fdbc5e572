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
    if "speed" in result:
        lines += _speed(result["speed"])
    if "largest" in result:
        lines += _largest(result["largest"])
    return "\n".join(lines).strip()


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _head(*cells: str) -> list[str]:
    return ["", _row(*cells), "|" + "---|" * len(cells)]


def _machine(part: Figures) -> str:
    settings = part["settings"]
    text = f"{settings['machine']}, load average {part['load_average']:.1f} before the run. `{settings['model']}`"
    text += f" in {settings.get('precision', 'bf16')}"
    if (rank := settings.get("lora_rank")) is not None:
        text += f", LoRA of rank {rank}"
    return f"{text}, clipping at {settings['clip']}"


def _speed(part: Figures) -> list[str]:
    settings, figures = part["settings"], part["figures"]
    tokens = [str(count) for count in sorted(settings["tokens"])]
    micro_batches = f"{count} micro-batches a step, " if (count := settings.get("micro_batches", 1)) > 1 else ""
    lines = [f"{_machine(part)}, {micro_batches}{settings['rounds']} rounds. Seconds of a step over those of plain"]
    lines += ["PyTorch with checkpointing in the same round: the median, and the quartiles in brackets."]
    lines += _head("system", *(f"{int(count):,} tokens" for count in tokens))
    ran = {name: one for name, one in figures.items() if "error" not in one}
    for one in ran.values():
        lines.append(_row(one["label"], *(shown(one["tokens"][count]["ratio"]) for count in tokens)))
    middle = tokens[len(tokens) // 2]
    lines += _head(
        "system",
        f"a step, {middle} tokens",
        "most RAM of the process",
        "written a step",
        "first step ended after",
        "save",
        "load",
    )
    for one in ran.values():
        at = one["tokens"][middle]
        cells = [f"{statistics.median(at['step_s']):.2f} s", f"{at['peak_bytes'] / MIB:,.0f} MiB"]
        cells += [f"{at['written_bytes'] / MIB:,.0f} MiB"]
        cells += [f"{one[key]:.1f} s" if key in one else NOTHING for key in ("start_s", "save_s", "load_s")]
        lines.append(_row(one["label"], *cells))
    if failed := [one for one in figures.values() if "error" in one]:
        lines += _head("system that did not run", "why")
        lines += [_row(one["label"], one["error"].replace("|", "\\|")) for one in failed]
    lines += _head("system", "settings")
    return lines + [_row(one["label"], one["settings"]) for one in figures.values()] + [""]


def _largest(part: Figures) -> list[str]:
    settings, figures = part["settings"], part["figures"]
    lines = [f"{_machine(part)} with more or fewer layers, {settings['tokens']} tokens, three steps, no turn longer"]
    lines += [f"than {settings['turn_s']:.0f} s. Memory is limited by {settings['limited_by']}."]
    if (most := settings.get("most_parameters")) is not None:
        lines += [f"Models of more than {most / 1e6:,.0f} M parameters were not tried."]
    lines += _head("RAM of the process", "system", "largest model", "why not more")
    for limit, of in figures.items():
        for one in of.values():
            most = f"{one['parameters'] / 1e6:,.0f} M parameters" if one["parameters"] else "none"
            lines.append(_row(limit, one["label"], most, one["stopped_by"].replace("|", "\\|")))
    return [*lines, ""]


def draw(result: Figures, folder: Path) -> None:
    """peers_time.png: a step against RAM. peers_largest.png: the largest model against RAM."""
    if "speed" in result:
        _draw_time(result["speed"], folder / "peers_time.png")
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


def _draw_largest(figures: Figures, path: Path) -> None:
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(6, 4), dpi=100, layout="constrained")
    axes = drawing.subplots()
    lines: dict[str, list[tuple[float, float]]] = {}
    for limit, of in figures.items():
        for one in of.values():
            if one["parameters"]:
                lines.setdefault(one["label"], []).append((parse_bytes(limit) / GIB, one["parameters"] / 1e6))
    for label, points in lines.items():
        axes.plot(
            *zip(*sorted(points), strict=True),
            "o-",
            label=label,
            color="black" if label == "Pagoda, all on SSD" else None,
        )
    axes.set(xlabel="RAM of the process, GiB", ylabel="largest model, M parameters", yscale="log")
    axes.legend(fontsize="x-small")
    drawing.savefig(path)
