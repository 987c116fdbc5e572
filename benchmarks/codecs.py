"""Loss curves of compressed moments beside exact ones.

The same model, data, seed and settings with fp32, bf16 and 8-bit moments, for 500 steps on the built-in text.
Figures of a run: its last loss, the mean over its last tenth, and how far its curve, averaged over windows of 20
steps, is from the exact one's.

    python benchmarks/codecs.py --out benchmarks/results/codecs.json --plot docs/codecs.png
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

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

CODECS = ("fp32", "bf16", "8bit")


def losses_of(codec: str, arguments: argparse.Namespace, batches: Batches) -> tuple[list[float], float]:
    """(loss of every step, seconds a step)."""
    optim = OptimConfig(lr=arguments.lr, warmup_steps=arguments.steps // 20, moments=codec)  # type: ignore[arg-type]
    torch.manual_seed(arguments.seed)
    with pagoda.init():
        model = build_model(arguments.model, seq_len=arguments.seq_len, gradient_checkpointing=False)
    model, optimizer = pagoda.wrap(
        model, optim.build(arguments.seed), memory=pagoda.Memory(host="2GiB"), clip_grad_norm=1.0
    )
    return train_on_text(
        model, optimizer, batches, lambda step: optim.lr_factor(step, arguments.steps), arguments.steps
    )


def figures(curves: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    exact = smoothed(curves["fp32"])
    last = max(1, len(exact) // 10)
    found = {}
    for codec, losses in curves.items():
        away = [abs(a / b - 1) for a, b in zip(smoothed(losses)[WINDOW:], exact[WINDOW:], strict=True)]
        found[codec] = {
            "last_loss": losses[-1],
            "mean_of_last_tenth": statistics.fmean(losses[-last:]),
            "furthest_from_exact": max(away, default=0.0),
        }
    return found


def draw(curves: dict[str, list[float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5), dpi=100, layout="constrained")
    left, right = figure.subplots(1, 2)
    exact = smoothed(curves["fp32"])
    for codec, losses in curves.items():
        steps = range(1, len(losses) + 1)
        left.plot(steps, smoothed(losses), label=codec, linewidth=1)
        if codec != "fp32":
            away = [100 * (a / b - 1) for a, b in zip(smoothed(losses), exact, strict=True)]
            right.plot(steps, away, label=codec, linewidth=1, color=left.lines[-1].get_color())
    left.set(xlabel="step", ylabel=f"loss, mean of {WINDOW} steps", yscale="log")
    right.set(xlabel="step", ylabel="% above the loss with fp32 moments")
    right.axhline(0, color="black", linewidth=0.5)
    left.legend()
    figure.savefig(path)


def main() -> None:
    restart_spinning_briefly()
    keep_freed_memory()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-15m")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="write curves and figures here as JSON")
    parser.add_argument("--plot", type=Path, help="draw the curves into this PNG (needs the extra `plot`)")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    console = Console(width=120)
    rows = Rows.of(open_tokens(STDLIB), arguments.seq_len)
    batches = Batches(rows=rows, batch_size=arguments.batch_size, seed=arguments.seed)
    curves: dict[str, list[float]] = {}
    seconds: dict[str, float] = {}
    for codec in CODECS:
        curves[codec], seconds[codec] = losses_of(codec, arguments, batches)
        console.print(f"{codec}: {curves[codec][0]:.4f} -> {curves[codec][-1]:.4f}, {seconds[codec]:.2f} s a step")
    found = figures(curves)
    console.print(found)
    report: dict[str, Any] = {
        "machine": f"{cpu_name()}, {arguments.threads} threads",
        "torch": torch.__version__,
        "settings": {k: v for k, v in vars(arguments).items() if k not in ("out", "plot", "threads")},
        "text_bytes": len(rows.tokens),
        "figures": found,
        "curves": {codec: [round(loss, 5) for loss in losses] for codec, losses in curves.items()},
    }
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    if arguments.plot is not None:
        draw(curves, arguments.plot)


if __name__ == "__main__":
    main()
