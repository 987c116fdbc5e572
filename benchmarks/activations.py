"""Activations, estimated and measured: peak resident memory of a training process beside its pages.

python benchmarks/activations.py [--out FILE]
"""

import ctypes
import gc
import json
import multiprocessing
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import tyro

import pagoda
from pagoda.forecast.activations import estimate_activations
from pagoda.forecast.subject import find_subject
from pagoda.models import build_model

WARM_UP = ("llama-15m", 1, 32, True)
CASES = (
    ("llama-15m", 8, 512, True),
    ("llama-15m", 8, 512, False),
    ("llama-110m", 4, 256, True),
    ("gpt2", 2, 512, True),
    ("gpt2", 2, 512, False),
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


def one_step(model: str, batch_size: int, seq_len: int, checkpointing: bool) -> int:
    """Bytes of pages that a step took."""
    with pagoda.init():
        built = build_model(model, seq_len=seq_len, gradient_checkpointing=checkpointing)
    built, optimizer = pagoda.wrap(built, pagoda.AdamW(), memory=pagoda.Memory(host="6GiB"), clip_grad_norm=1.0)
    ids = torch.randint(256, (batch_size, seq_len))
    built(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.drain()
    pages = optimizer.stats.peak_bytes["host"]
    optimizer.close()
    return pages


def measure(case: tuple[str, int, int, bool]) -> Result:
    model, batch_size, seq_len, checkpointing = case
    subject = find_subject(model, batch_size=batch_size, seq_len=seq_len, count_flops=False)
    estimate = estimate_activations(subject, batch_size * seq_len, 2, checkpointing)
    one_step(*WARM_UP)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = status("VmRSS")
    pages = one_step(*case)
    beside = status("VmHWM") - before - pages
    return Result(model, batch_size * seq_len, checkpointing, estimate.total // MIB, beside // MIB)


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
