"""Loss and state of optimizers beside AdamW's.

The same model, data and seed with each optimizer at a learning rate of its own, on the built-in text. Figures of a run:
the mean loss over its last tenth, what the plan says that a parameter takes, and what the ledger has for it.

    python benchmarks/optimizers.py --out benchmarks/results/optimizers.json --plot docs/optimizers.png

With `--only NAME`, one optimizer is run, and what `--out` has of the others, with the same settings, stays.
"""

import argparse
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console

import pagoda
from pagoda.calibrate.meter import cpu_name
from pagoda.models.build import build_model
from pagoda.process import keep_freed_memory, restart_spinning_briefly
from pagoda.train.config import OptimConfig
from pagoda.train.data import Batches, Rows
from pagoda.train.sources import STDLIB
from pagoda.train.tokens import open_tokens
from training import WINDOW, smoothed, train_on_text

OPTIMIZERS = {
    "adamw": OptimConfig(lr=1e-3),
    "adafactor": OptimConfig(lr=3e-2),
    "lion": OptimConfig(lr=2e-4, weight_decay=0.5),
    "muon": OptimConfig(lr=1e-3, betas=(0.9, 0.95)),
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


def figure_of(name: str, arguments: argparse.Namespace, batches: Batches) -> Figure:
    optim = OPTIMIZERS[name]
    torch.manual_seed(arguments.seed)
    with pagoda.init():
        model = build_model(arguments.model, seq_len=arguments.seq_len, gradient_checkpointing=False)
    rule = optim.build(arguments.seed, name)
    model, optimizer = pagoda.wrap(model, rule, memory=pagoda.Memory(host="2GiB"), clip_grad_norm=1.0)
    plan = pagoda.plan_of(model)
    warmup = arguments.steps // 20
    losses, seconds = train_on_text(
        model, optimizer, batches, lambda step: min(1.0, (step + 1) / max(1, warmup)), arguments.steps
    )
    homes = sum(of_tier.get(state.name, 0) for of_tier in plan.bytes.values() for state in plan.layout.states)
    return Figure(
        name,
        optim.lr,
        statistics.fmean(losses[-max(1, len(losses) // 10) :]),
        sum(plan.layout.bytes_per_parameter.values()),
        homes / plan.parameters,
        seconds,
        [round(loss, 5) for loss in losses],
    )


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


def main() -> None:
    restart_spinning_briefly()
    keep_freed_memory()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-15m")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", choices=list(OPTIMIZERS), help="run this one alone")
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    parser.add_argument("--plot", type=Path, help="draw the curves into this PNG (needs the extra `plot`)")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    console = Console(width=120)
    rows = Rows.of(open_tokens(STDLIB), arguments.seq_len)
    batches = Batches(rows=rows, batch_size=arguments.batch_size, seed=arguments.seed)
    settings = {k: v for k, v in vars(arguments).items() if k not in ("out", "plot", "only", "threads")}
    found = figures_in(arguments.out, settings) if arguments.only else {}
    for name in [arguments.only] if arguments.only else OPTIMIZERS:
        figure = found[name] = figure_of(name, arguments, batches)
        console.print(f"{name}: {figure.last_tenth:.4f}, {figure.stated:.2f} bytes, {figure.step_s:.2f} s a step")
    figures = [found[name] for name in OPTIMIZERS if name in found]
    if arguments.plot is not None:
        draw(figures, arguments.plot)
    if arguments.out is not None:
        report = {
            "machine": f"{cpu_name()}, {arguments.threads} threads",
            "torch": torch.__version__,
            "settings": settings,
            "figures": [asdict(figure) for figure in figures],
        }
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
