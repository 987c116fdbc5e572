"""Asynchronous updates against synchronous ones on a slow SSD: throughput and loss.

Both runs train the same model on the same batches, moments on SSD. The SSD is made slow: every transfer takes as long
as it would at a given rate, one rate for each direction. The rate is chosen from a measured step in memory such that
one pass over the moments takes `--stream-steps` of it; a synchronous step then takes about 2.5 times as long as in
memory.

Synchronous updates give the same bits wherever states live. So the losses of the synchronous run are taken from the
run in memory, and on the slow SSD only `--sync-steps` of it are timed; their losses must be equal.

    python benchmarks/async_update.py --ssd DIR [--steps 300] [--out FILE.json] [--plot FILE.png]
"""

import gc
import json
import statistics
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import tyro

import pagoda
from pagoda.plan.buffers import LEAST_RING_SLOTS
from pagoda.plan.layout import GRAD, WEIGHT
from pagoda.plan.options import Options
from pagoda.plan.planner import make_plan
from pagoda.plan.tiers import Budgets
from pagoda.prepare.construct import describe
from pagoda.train.config import OptimConfig
from script import begin, machine, write
from slow_ssd import slow_ssd
from text import batch_of, batches_of_text, built

FINAL_STEPS = 10
"""The final loss is the mean over so many last steps."""
_UNMEASURED_STEPS = 5


@dataclass(frozen=True)
class Settings:
    """Compare update="async" with update="sync"."""

    ssd: Path
    model: str = "llama-15m"
    steps: int = 300
    seq_len: int = 512
    sync_steps: int = 30
    lr: float = 3e-4
    """Peak learning rate, after 20 steps of warm-up and before a cosine."""
    stream_steps: float = 1.9
    """Seconds of one pass over the moments, in steps of training in memory."""
    out: Path | None = None
    plot: Path | None = None


@dataclass
class Run:
    """What one way of updating gave."""

    step_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @property
    def median_step_s(self) -> float:
        return statistics.median(self.step_s[_UNMEASURED_STEPS:])

    @property
    def final_loss(self) -> float:
        return statistics.fmean(self.losses[-FINAL_STEPS:])


def budget(settings: Settings, asynchronous: bool) -> tuple[pagoda.Memory, int]:
    """Memory in which weights and gradients live in RAM and moments on SSD, and bytes of the moments in use."""
    options = Options(clipping=True, asynchronous=asynchronous)
    root = describe(built(settings.model, settings.seq_len))
    layout = make_plan(root, pagoda.AdamW().states("bf16"), Budgets(1 << 40), options).layout
    moved = (layout.total_pages(WEIGHT) + layout.total_pages(GRAD)) * (1 + asynchronous)
    ring = LEAST_RING_SLOTS * sum(layout.block_pages(state.name) for state in layout.moments)
    moments = sum(unit.trainable_numel * s.dtype.itemsize for unit in layout.units for s in layout.moments)
    host = (moved + ring + layout.piece_pages) * layout.page_bytes
    return pagoda.Memory(host=host, ssd=str(settings.ssd)), moments


def train(settings: Settings, memory: pagoda.Memory, steps: int, **wrap: Any) -> Run:
    model, optim = built(settings.model, settings.seq_len), OptimConfig(learning_rate=settings.lr, warmup_steps=20)
    model, optimizer = pagoda.wrap(
        model, optim.build_rule(0), memory=memory, max_grad_norm=1.0, **{"precision": "bf16", **wrap}
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: optim.lr_factor(step, settings.steps))
    batches = batches_of_text(settings.seq_len, 1)
    run = Run()
    for step in range(steps):
        start = time.perf_counter()
        loss = model(**batch_of(batches, step)).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        run.losses.append(loss.item())
        run.step_s.append(time.perf_counter() - start)
    optimizer.close()
    del model, optimizer
    gc.collect()
    return run


def draw(runs: dict[str, Run], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    for (name, run), colour in zip(runs.items(), ("#4c78a8", "#e45756"), strict=True):
        smooth = [statistics.fmean(run.losses[max(0, i - 9) : i + 1]) for i in range(len(run.losses))]
        elapsed = [sum(run.step_s[: i + 1]) for i in range(len(run.step_s))]
        by_step.plot(smooth, label=name, color=colour, linewidth=1.2)
        by_time.plot(elapsed, smooth, label=name, color=colour, linewidth=1.2)
    by_step.set(xlabel="step", ylabel="loss (mean of 10 steps)")
    by_time.set(xlabel="seconds")
    by_step.legend()
    figure.savefig(path, dpi=90)


def main() -> None:
    begin()
    settings = tyro.cli(Settings, description=__doc__)
    resident = train(settings, pagoda.Memory(host="1GiB"), settings.steps)
    print(f"in memory: {resident.median_step_s:.3f} s a step, final loss {resident.final_loss:.4f}", flush=True)
    memory, moments = budget(settings, asynchronous=False)
    rate = moments / (settings.stream_steps * resident.median_step_s)
    with slow_ssd(rate):
        sync = train(settings, memory, settings.sync_steps)
        print(f"sync: {sync.median_step_s:.3f} s a step", flush=True)
        assert sync.losses == resident.losses[: settings.sync_steps]
        memory, _ = budget(settings, asynchronous=True)
        async_ = train(settings, memory, settings.steps, update="async")
    sync = Run([sync.median_step_s] * settings.steps, resident.losses)
    report = {
        **machine(),
        "settings": {name: value for name, value in asdict(settings).items() if name not in ("ssd", "out", "plot")},
        "ssd_bytes_per_s": rate,
        "in_memory_step_s": resident.median_step_s,
        "sync_step_s": sync.median_step_s,
        "async_step_s": async_.median_step_s,
        "sync_over_in_memory": sync.median_step_s / resident.median_step_s,
        "throughput_over_sync": sum(sync.step_s) / sum(async_.step_s),
        "sync_final_loss": sync.final_loss,
        "async_final_loss": async_.final_loss,
        "final_loss_difference": async_.final_loss / sync.final_loss - 1,
    }
    print(json.dumps(report, indent=2))
    curves = {name: [round(loss, 4) for loss in run.losses] for name, run in (("sync", sync), ("async", async_))}
    write(settings.out, {**report, "losses": curves})
    if settings.plot is not None:
        draw({"async": async_, "sync": sync}, settings.plot)


if __name__ == "__main__":
    main()
