"""What clipping costs: step time with it over step time without, in one run, with state in RAM and on SSD.

Both train the same model on the same tokens. Rounds alternate them, so that a noisy machine hurts both alike; in each
round, of steps back to back, the first is not timed: it waits for nothing of a step before it. The ratio is the
median over rounds. No norm reaches the limit, so that updates during backward, where there are any, stand; with
`--limit` a small one, every step clips.

    python benchmarks/clipping.py --ssd DIR --out benchmarks/results/clipping.json

With `--forecast` it simulates llama-8b on an H100 instead, whose memory and RAM are home to the state: without
clipping, with clipping where every update waits for the norm, and with clipping as planned by default.
"""

import statistics
import time
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

import pagoda
from pagoda.config.memory import Split
from pagoda.forecast.config import PlanConfig
from pagoda.forecast.machine import find_machine_for
from pagoda.forecast.model_description import describe_model
from pagoda.forecast.problem import problem_of
from pagoda.plan.tiers import Budgets
from pagoda.simulate.hardware import Figure, Hardware
from script import begin, machine, write
from step_time import state_on_ssd
from training import Paged, Workload

BUDGETS = Budgets(host=112 << 30, device=52 << 30)
"""Of the forecast."""


@dataclass(frozen=True)
class Figures:
    """One placement; seconds are those of a step, medians over rounds."""

    state_in: str
    off_s: float
    on_s: float
    ratio: float
    """Of both, in the same round: the median over rounds."""
    lowest: float
    highest: float
    updates_kept: int
    """Of the last step with clipping: units that were updated during backward."""
    updates_called_off: int


def seconds_of(trainer: Paged, workload: Workload, steps: int) -> float:
    """Of a step, back to back with one before it, whose updates run under its forward as its own run on."""
    batches = workload.batches()
    trainer.step(next(batches))
    start = time.perf_counter()
    for _ in range(steps):
        trainer.step(next(batches))
    elapsed = time.perf_counter() - start
    trainer.optimizer.synchronize()
    return elapsed / steps


def measure(
    state_in: str,
    memory: dict[bool, pagoda.Memory],
    workload: Workload,
    limit: float,
    rounds: int,
    steps: int,
    console: Console,
) -> Figures:
    """Alternate steps without and with clipping, each with the memory that is given for it."""
    trainers = {on: Paged(replace(workload, clip=limit if on else None), memory[on]) for on in (False, True)}
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds + 1):
        for on in (False, True) if number % 2 else (True, False):
            took = seconds_of(trainers[on], workload, steps)
            if number:  # the first round compiles, and finds out what a step uses
                seconds[on].append(took)
    stats = trainers[True].optimizer.stats
    kept, undone = stats.updates_kept, stats.updates_called_off
    for trainer in trainers.values():
        trainer.close()
    ratios = [on / off for off, on in zip(seconds[False], seconds[True], strict=True)]
    off_s, on_s = (statistics.median(seconds[on]) for on in (False, True))
    figure = Figures(state_in, off_s, on_s, statistics.median(ratios), min(ratios), max(ratios), kept, undone)
    console.print(figure)
    return figure


def forecast() -> None:
    """Print what docs/internals/design.md says of speculation."""
    print("| RAM | tokens | compute alone | no clipping | clipping, updates wait | clipping, speculative |")
    print("|---|---|---|---|---|---|")
    for ram, batch_size in product((180e9, 100e9), (2, 4, 8)):
        seconds = []
        for clip, speculate in ((0.0, True), (1.0, False), (1.0, True)):
            config = PlanConfig(
                model="llama-8b",
                hardware="h200",  # which computes as an H100 does
                per_device_train_batch_size=batch_size,
                max_length=2048,
                gradient_accumulation_steps=1,
                activations="recompute",
                max_grad_norm=clip,
                speculate=speculate,
                precision="bf16",
            )
            problem, _ = problem_of(config, find_machine_for(config), describe_model(config))
            options = replace(problem.options, split=Split(device_home_share=1.0))
            asked = replace(problem, hardware=lent(problem.hardware, ram), budgets=BUDGETS, options=options)
            seconds.append(asked.simulated(asked.plan()).step_s)
        times = " | ".join(f"{each:.2f}" for each in (asked.bound_s, *seconds))
        print(f"| {ram / 1e9:.0f} GB/s | {config.tokens:,} | {times} |")


def lent(hardware: Hardware, ram: float) -> Hardware:
    """A machine with less RAM bandwidth, in bytes per second, and slower links."""
    assert hardware.link is not None
    figures = {name: Figure(value, "assumed") for name, value in (("ram", ram), ("update", ram / 26), ("link", 55e9))}
    cpu = replace(hardware.cpu, memory_bytes_per_s=figures["ram"], update_params_per_s=figures["update"])
    link = replace(
        hardware.link,
        h2d_bytes_per_s=figures["link"],
        d2h_bytes_per_s=figures["link"],
        both_bytes_per_s=Figure(100e9, "assumed"),
    )
    return replace(hardware, cpu=cpu, link=link)


def main(
    ssd: str | None = None,
    model: str = "llama-110m",
    batch_size: int = 4,
    seq_len: int = 512,
    rounds: int = 5,
    steps: int = 2,
    limit: float = 1e6,
    forecast_only: Annotated[bool, tyro.conf.arg(name="forecast")] = False,
    out: Path | None = None,
) -> None:
    """Print the ratios (target: 1.03), and write them to `out`."""
    if forecast_only:
        forecast()
        return
    assert ssd is not None, "--ssd DIR"
    begin()
    console = Console(width=120)
    workload = Workload(model, batch_size, seq_len)
    with TemporaryDirectory(dir=ssd) as off, TemporaryDirectory(dir=ssd) as on:
        places = {
            "RAM": dict.fromkeys((False, True), pagoda.Memory(host="4GiB")),
            "SSD": {
                used: state_on_ssd(folder, workload, speculate=True) for used, folder in ((False, off), (True, on))
            },
        }
        figures = [measure(name, memory, workload, limit, rounds, steps, console) for name, memory in places.items()]
    table = Table("state in", "off s", "on s", "ratio", "lowest - highest", "updates kept, undone")
    for f in figures:
        counts = f"{f.updates_kept}, {f.updates_called_off}"
        table.add_row(
            f.state_in, f"{f.off_s:.3f}", f"{f.on_s:.3f}", f"{f.ratio:.3f}", f"{f.lowest:.3f} - {f.highest:.3f}", counts
        )
    console.print(table)
    settings = {"model": model, "tokens": workload.tokens, "rounds": rounds, "steps": steps, "limit": limit}
    write(out, {**machine(), "settings": settings, "figures": [asdict(figure) for figure in figures]})


if __name__ == "__main__":
    tyro.cli(main)
