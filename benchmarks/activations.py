"""Activations, estimated and measured: peak resident memory of a training process beside its pages.

python benchmarks/activations.py [--out FILE]
"""

import ctypes
import gc
import json
import multiprocessing
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro

import pagoda
from pagoda.forecast.activations import estimate_activations
from pagoda.forecast.subject import find_subject
from training import Paged, Workload

WARM_UP = Workload("llama-15m", 1, 32)
CASES = (
    Workload("llama-15m", 8, 512),
    Workload("llama-15m", 8, 512, checkpointing=False),
    Workload("llama-110m", 4, 256),
    Workload("gpt2", 2, 512),
    Workload("gpt2", 2, 512, checkpointing=False),
)
MIB = 1 << 20


@dataclass(frozen=True)
class Result:
    model: str
    tokens: int
    checkpointing: bool
    estimated_mib: int
    measured_mib: int


def status(name: str) -> int:
    """A memory figure of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def one_step(case: Workload) -> int:
    """Bytes of pages that a step took."""
    paged = Paged(case, pagoda.Memory(host="6GiB"))
    paged.step(next(case.batches()))
    paged.optimizer.drain()
    pages = paged.optimizer.stats.peak_bytes["host"]
    paged.close()
    return pages


def measure(case: Workload) -> Result:
    subject = find_subject(case.model, batch_size=case.batch_size, seq_len=case.seq_len, count_flops=False)
    estimate = estimate_activations(subject, case.tokens, 2, case.checkpointing)
    one_step(WARM_UP)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = status("VmRSS")
    pages = one_step(case)
    beside = status("VmHWM") - before - pages
    return Result(case.model, case.tokens, case.checkpointing, estimate.total // MIB, beside // MIB)


def main(out: Path | None = None) -> None:
    results = []
    for case in CASES:
        with multiprocessing.get_context("spawn").Pool(1) as fresh:
            results.append(asdict(fresh.apply(measure, (case,))))
        print(results[-1])
    if out is not None:
        out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    tyro.cli(main)
