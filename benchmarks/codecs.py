"""Loss curves of compressed moments beside exact ones.

The same model, data, seed and settings with fp32, bf16 and 8-bit moments, for 500 steps on the built-in text.
Figures of a run: its last loss, the mean over its last tenth, and how far its curve, averaged over windows of 20
steps, is from the exact one's.

    python benchmarks/codecs.py --out benchmarks/results/codecs.json --plot docs/codecs.png
"""

import statistics
from dataclasses import replace
from pathlib import Path

import torch
import tyro

from pagoda.optim.codecs import Moments
from pagoda.train.config import OptimConfig
from script import begin, machine, write
from text import WINDOW, batches_of_text, built, smoothed, train_on_text

CODECS: tuple[Moments, ...] = ("fp32", "bf16", "8bit")


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


def main(
    model: str = "llama-15m",
    steps: int = 500,
    batch_size: int = 4,
    seq_len: int = 128,
    lr: float = 1e-3,
    seed: int = 0,
    threads: int = torch.get_num_threads(),
    out: Path | None = None,
    plot: Path | None = None,
) -> None:
    """Train with each format of moments. `plot` is a PNG with the curves, which needs the extra `plot`."""
    begin()
    torch.set_num_threads(threads)
    batches = batches_of_text(seq_len, batch_size, seed)
    optim = OptimConfig(lr=lr, warmup_steps=steps // 20)
    curves: dict[str, list[float]] = {}
    for codec in CODECS:
        rule, net = replace(optim, moments=codec).build(seed), built(model, seq_len, checkpointing=False, seed=seed)
        curves[codec], step_s, _ = train_on_text(net, rule, batches, lambda step: optim.lr_factor(step, steps), steps)
        print(f"{codec}: {curves[codec][0]:.4f} -> {curves[codec][-1]:.4f}, {step_s:.2f} s a step", flush=True)
    found = figures(curves)
    print(found)
    settings = {"model": model, "steps": steps, "batch_size": batch_size, "seq_len": seq_len, "lr": lr, "seed": seed}
    rounded = {codec: [round(loss, 5) for loss in losses] for codec, losses in curves.items()}
    text_bytes = len(batches.rows.tokens)
    write(out, {**machine(), "settings": settings, "text_bytes": text_bytes, "figures": found, "curves": rounded})
    if plot is not None:
        draw(curves, plot)


if __name__ == "__main__":
    tyro.cli(main)
