"""Loss and state of optimizers beside AdamW's.

The same model, data and seed with each optimizer at a learning rate of its own, on the built-in text. Figures of a run:
the mean loss over its last tenth, what the plan says that a parameter takes, and what the ledger has for it.

    python benchmarks/optimizers.py --out benchmarks/results/optimizers.json --plot docs/optimizers.png

With `--only NAME`, one optimizer is run, and what `--out` has of the others, with the same settings, stays.
"""

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro

from pagoda.train.config import OptimConfig
from script import begin, machine, write
from text import WINDOW, batches_of_text, built, smoothed, train_on_text

Name = Literal["adamw", "adafactor", "lion", "muon"]
OPTIMIZERS: dict[Name, OptimConfig] = {
    "adamw": OptimConfig(learning_rate=1e-3),
    "adafactor": OptimConfig(learning_rate=3e-2),
    "lion": OptimConfig(learning_rate=2e-4, weight_decay=0.5),
    "muon": OptimConfig(learning_rate=1e-3, betas=(0.9, 0.95)),
}


@dataclass(frozen=True)
class Figure:
    """One optimizer's run."""

    optimizer: str
    lr: float
    last_tenth: float
    """Mean loss over the last tenth of the steps."""
    stated: float
    """Bytes a parameter, as the plan says."""
    ledger: float
    """Bytes of the homes of states, padding included, by parameter."""
    step_s: float
    losses: list[float]
    """Of every step."""


def figures_in(path: Path | None, settings: dict[str, object]) -> dict[str, Figure]:
    """The figures of an earlier run with the same settings, by optimizer."""
    if path is None or not path.exists():
        return {}
    report = json.loads(path.read_text())
    return {f["optimizer"]: Figure(**f) for f in report["figures"]} if report["settings"] == settings else {}


def draw(figures: list[Figure], path: Path) -> None:
    from matplotlib.figure import Figure as Drawing

    drawing = Drawing(figsize=(6, 3.5), dpi=100, layout="constrained")
    axes = drawing.subplots()
    for figure in figures:
        label = f"{figure.optimizer}, {figure.stated:.1f} bytes a parameter"
        axes.plot(range(1, len(figure.losses) + 1), smoothed(figure.losses), label=label, linewidth=1)
    axes.set(xlabel="step", ylabel=f"loss, mean of {WINDOW} steps", yscale="log")
    axes.legend()
    drawing.savefig(path)


def main(
    model: str = "llama-15m",
    steps: int = 300,
    batch_size: int = 2,
    seq_len: int = 128,
    seed: int = 0,
    threads: int = torch.get_num_threads(),
    only: Name | None = None,
    out: Path | None = None,
    plot: Path | None = None,
) -> None:
    """Train with each optimizer. `plot` is a PNG with the curves, which needs the extra `plot`."""
    begin()
    torch.set_num_threads(threads)
    batches = batches_of_text(seq_len, batch_size, seed)
    settings = {"model": model, "steps": steps, "batch_size": batch_size, "seq_len": seq_len, "seed": seed}
    found = figures_in(out, settings) if only else {}
    warmup = max(1, steps // 20)
    for name in (only,) if only else OPTIMIZERS:
        lr = OPTIMIZERS[name].learning_rate
        assert lr is not None
        rule, net = OPTIMIZERS[name].build_rule(seed, name), built(model, seq_len, checkpointing=False, seed=seed)
        losses, step_s, plan = train_on_text(net, rule, batches, lambda step: min(1.0, (step + 1) / warmup), steps)
        homes = sum(of_tier.get(state.name, 0) for of_tier in plan.bytes.values() for state in plan.layout.states)
        figure = found[name] = Figure(
            name,
            lr,
            statistics.fmean(losses[-max(1, len(losses) // 10) :]),
            sum(plan.layout.bytes_per_parameter.values()),
            homes / plan.parameters,
            step_s,
            [round(loss, 5) for loss in losses],
        )
        print(f"{name}: {figure.last_tenth:.4f}, {figure.stated:.2f} bytes, {step_s:.2f} s a step", flush=True)
    figures = [found[name] for name in OPTIMIZERS if name in found]
    write(out, {**machine(), "settings": settings, "figures": [asdict(figure) for figure in figures]})
    if plot is not None:
        draw(figures, plot)


if __name__ == "__main__":
    tyro.cli(main)
