"""What clipping costs: step time with it over step time without, in one run, with state in RAM and on SSD.

Both train the same model on the same tokens. Rounds alternate them, so that a noisy machine hurts both alike; in each
round, of steps back to back, the first is not timed: it waits for nothing of a step before it. The ratio is the
median over rounds. No norm reaches the limit, so that updates during backward, where there are any, stand; with
`--limit` a small one, every step clips.

    python benchmarks/clipping.py --ssd DIR --out benchmarks/results/clipping.json
"""

import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import tyro
from rich.console import Console
from rich.table import Table

import pagoda
from script import begin, machine, write
from step_time import state_on_ssd
from training import Paged, Workload


@dataclass(frozen=True)
class Figure:
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
    updates_undone: int


def seconds_of(trainer: Paged, workload: Workload, steps: int) -> float:
    """Of a step, back to back with one before it, whose updates run under its forward as its own run on."""
    batches = workload.batches()
    trainer.step(next(batches))
    start = time.perf_counter()
    for _ in range(steps):
        trainer.step(next(batches))
    elapsed = time.perf_counter() - start
    trainer.optimizer.drain()
    return elapsed / steps


def measure(
    state_in: str,
    memory: dict[bool, pagoda.Memory],
    workload: Workload,
    limit: float,
    rounds: int,
    steps: int,
    console: Console,
) -> Figure:
    """Alternate steps without and with clipping, each with the memory that is given for it."""
    trainers = {on: Paged(replace(workload, clip=limit if on else None), memory[on]) for on in (False, True)}
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds + 1):
        for on in (False, True) if number % 2 else (True, False):
            took = seconds_of(trainers[on], workload, steps)
            if number:  # the first round compiles, and finds out what a step uses
                seconds[on].append(took)
    stats = trainers[True].optimizer.stats
    kept, undone = stats.updates_kept, stats.updates_undone
    for trainer in trainers.values():
        trainer.close()
    ratios = [on / off for off, on in zip(seconds[False], seconds[True], strict=True)]
    off_s, on_s = (statistics.median(seconds[on]) for on in (False, True))
    figure = Figure(state_in, off_s, on_s, statistics.median(ratios), min(ratios), max(ratios), kept, undone)
    console.print(figure)
    return figure


def main(
    ssd: str,
    model: str = "llama-110m",
    batch_size: int = 4,
    seq_len: int = 512,
    rounds: int = 5,
    steps: int = 2,
    limit: float = 1e6,
    out: Path | None = None,
) -> None:
    """Print the ratios (target: 1.03), and write them to `out`."""
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
        counts = f"{f.updates_kept}, {f.updates_undone}"
        table.add_row(
            f.state_in, f"{f.off_s:.3f}", f"{f.on_s:.3f}", f"{f.ratio:.3f}", f"{f.lowest:.3f} - {f.highest:.3f}", counts
        )
    console.print(table)
    settings = {"model": model, "tokens": workload.tokens, "rounds": rounds, "steps": steps, "limit": limit}
    write(out, {**machine(), "settings": settings, "figures": [asdict(figure) for figure in figures]})


if __name__ == "__main__":
    tyro.cli(main)
