"""Which threads take the cores in a step, for each home of the state.

Linux counts for every thread how long it ran, in the kernel and outside, how often it gave its core up, and how often
the core was taken from it. This script reads these counters around steps and adds them up by what the threads are for:
compute (the main thread, and OpenMP's), and each lane. Processor time means something on a busy machine too, unlike the
time of a step.

    python benchmarks/core_seconds.py --ssd DIR [--model llama-110m] [--seq-len 512] [--out FILE]
"""

import os
import tempfile
import threading
from collections import defaultdict
from contextlib import closing
from pathlib import Path

import tyro

from pagoda.runtime.lanes import THREAD_NAMES
from peer_suite.systems import SYSTEMS
from script import begin, machine, write
from training import Plain, Trainer, Workload

STATES = ("pagoda-ram", "pagoda-moments", "pagoda-ssd")
_WARM_UP = 3
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_TASKS = Path("/proc/self/task")


def counters() -> defaultdict[tuple[str, str], float]:
    """(what threads are for, what is counted) -> how much of it so far."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    total: defaultdict[tuple[str, str], float] = defaultdict(float)
    for task in _TASKS.iterdir():
        name = names.get(int(task.name), "OpenMP")
        kind = name.removeprefix(THREAD_NAMES).rpartition("-")[0] if name.startswith(THREAD_NAMES) else name
        try:
            stat = (task / "stat").read_text().rpartition(") ")[2].split()
            ran = int((task / "schedstat").read_text().split()[0])
            status = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines())
        except FileNotFoundError:  # the thread has ended
            continue
        total[kind, "ran_s"] += ran / 1e9
        total[kind, "in_kernel_s"] += int(stat[12]) * _TICK_S
        total[kind, "page_faults"] += int(stat[7])
        total[kind, "slept"] += int(status["voluntary_ctxt_switches"])
        total[kind, "preempted"] += int(status["nonvoluntary_ctxt_switches"])
    return total


def of_a_step(trainer: Trainer, workload: Workload, steps: int) -> dict[str, dict[str, float]]:
    """What threads are for -> what they took for a step, in the mean; "all": of all threads."""
    batches = workload.batches()
    for _ in range(_WARM_UP):
        trainer.step(next(batches))
    trainer.drain()
    before = counters()
    for _ in range(steps):
        trainer.step(next(batches))
    trainer.drain()
    after = counters()
    table: dict[str, dict[str, float]] = {"all": {}}
    for (kind, what), amount in sorted(after.items()):
        taken = (amount - before[kind, what]) / steps
        if taken > 0:
            table.setdefault(kind, {})[what] = taken
            table["all"][what] = table["all"].get(what, 0.0) + taken
    return table


def main(
    ssd: Path,
    model: str = "llama-110m",
    batch_size: int = 1,
    seq_len: int = 512,
    steps: int = 4,
    states: tuple[str, ...] = STATES,
    out: Path | None = None,
) -> None:
    """Print a table for plain PyTorch, and one for each home of the state."""
    begin()
    workload = Workload(model, batch_size, seq_len)
    figures: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(dir=ssd) as folder:
        for state in ("plain", *states):
            trainer = Plain(workload) if state == "plain" else SYSTEMS[state].build(workload, Path(folder))
            with closing(trainer):
                figures[state] = of_a_step(trainer, workload, steps)
            print(f"{state}, {workload.tokens} tokens", flush=True)
            for kind, row in figures[state].items():
                print(f"  {kind:16}", *(f"{what} {amount:.4f}" for what, amount in row.items()), flush=True)
    write(out, {**machine(), "model": model, "tokens": workload.tokens, "steps": steps, "figures": figures})


if __name__ == "__main__":
    tyro.cli(main)
