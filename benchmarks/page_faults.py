"""What a step of plain PyTorch on the CPU costs in page faults: with malloc as it is, and with freed memory kept.

Processes take turns, two of each kind. Of each: seconds and system seconds of a step, faults, and resident memory.

    python benchmarks/page_faults.py [--model llama-15m] [--batch-size 4] [--seq-len 512] [--out FILE]
"""

import json
import multiprocessing
import resource
import statistics
import time
from pathlib import Path

import tyro

from pagoda.process import keep_freed_memory, restart_spinning_briefly
from script import machine, write
from training import Plain, Workload

_WARM_UP = 3


def measure(workload: Workload, steps: int, kept: bool) -> dict[str, float]:
    """Medians over the steps of one process."""
    if kept:
        keep_freed_memory()
    plain = Plain(workload)
    rows = []
    for ids, _ in zip(workload.batches(), range(_WARM_UP + steps), strict=False):
        before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        plain.step(ids)
        seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
        rows.append((seconds, after.ru_stime - before.ru_stime, after.ru_minflt - before.ru_minflt))
    step_s, system_s, faults = map(statistics.median, zip(*rows[_WARM_UP:], strict=True))
    return {"step_s": step_s, "system_s": system_s, "faults": faults, "rss_mib": after.ru_maxrss / 1024}


def main(
    model: str = "llama-15m", batch_size: int = 4, seq_len: int = 512, steps: int = 8, out: Path | None = None
) -> None:
    """Print both."""
    restart_spinning_briefly()
    workload = Workload(model, batch_size, seq_len, clip=None)
    runs: dict[str, list[dict[str, float]]] = {"given back": [], "kept": []}
    for _ in range(2):
        for kind, of in runs.items():
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                of.append(pool.apply(measure, (workload, steps, kind == "kept")))
    result = {**machine(), "model": model, "tokens": workload.tokens, "runs": runs}
    print(json.dumps(result, indent=1))
    write(out, result)


if __name__ == "__main__":
    tyro.cli(main)
