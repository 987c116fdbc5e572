"""Activations: what graphs keep against the plan, and the longest sequence under a memory limit.

    python benchmarks/activations.py [peak estimate longest] [--ssd DIR] [--out FILE]

`peak`: for every policy at three shapes, the most that graphs kept against what follows from the sizes that a step
with everything kept has shown. `estimate`: what `pagoda plan` says before a run, against the peak resident memory of a
process less its pages. `longest`: the longest sequence of which a step ends while the process stays below a limit, in
plain PyTorch with checkpointing and under Pagoda.
"""

import ctypes
import gc
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

import pagoda
from beyond_memory import resident_bytes
from pagoda.forecast.activations import estimate_activations
from pagoda.forecast.subject import find_subject
from pagoda.plan.activations import ActivationMode, Policy, peak_of
from training import Paged, Plain, Workload

MIB = 1 << 20
WARM_UP = Workload("llama-15m", 1, 32)
POLICIES: tuple[ActivationMode, ...] = ("keep", "recompute", "offload", "recompute+offload")
SHAPES = (Workload("llama-15m", 1, 256), Workload("llama-15m", 4, 256), Workload("gpt2", 1, 256))
ESTIMATED: tuple[tuple[Workload, ActivationMode], ...] = (
    (Workload("llama-15m", 8, 512), "recompute"),
    (Workload("llama-15m", 8, 512), "keep"),
    (Workload("llama-15m", 8, 512), "offload"),
    (Workload("llama-110m", 4, 256), "recompute"),
    (Workload("gpt2", 2, 512), "recompute"),
    (Workload("gpt2", 2, 512), "keep"),
)
LONGEST_MODEL, LIMIT = "gpt-4x256", 3 << 29
SHORTEST, OCTAVES = 256, 12


@dataclass(frozen=True)
class Contender:
    """A way to train; without a policy, plain PyTorch with checkpointing."""

    activations: ActivationMode | None = None
    chunked_loss: bool = False


CONTENDERS = {
    "plain": Contender(),
    "recompute": Contender("recompute"),
    "recompute+offload": Contender("recompute+offload"),
    "recompute+offload, chunked loss": Contender("recompute+offload", chunked_loss=True),
}


@dataclass(frozen=True)
class Settings:
    ssd: Path


def steps(case: Workload, memory: pagoda.Memory, activations: ActivationMode, count: int) -> Paged:
    """A run after some steps."""
    paged = Paged(case, memory, activations=activations)
    batches = case.batches()
    for _ in range(count):
        paged.step(next(batches))
    paged.optimizer.drain()
    return paged


def peak(settings: Settings) -> list[dict[str, object]]:
    """MiB that graphs kept, by where, against the plan made from the sizes of a step that kept everything."""
    rows: list[dict[str, object]] = []
    for case in SHAPES:
        sizes = None
        for activations in POLICIES:
            memory = pagoda.Memory(host="3GiB", ssd=f"{settings.ssd}:8GiB")
            paged = steps(case, memory, activations, 2)
            planned, measured = pagoda.plan_of(paged.model).activations, paged.optimizer.stats.activation_bytes
            paged.close()
            assert planned is not None
            sizes = sizes or planned.sizes
            assert sizes is not None
            expected = peak_of(sizes, [Policy(activations)] * len(sizes.blocks))
            row = {
                "model": case.model,
                "tokens": case.tokens,
                "activations": activations,
                "kept_mib": measured.kept / MIB,
                "ssd_mib": measured.ssd / MIB,
                "planned_kept_mib": expected.kept / MIB,
                "planned_ssd_mib": expected.ssd / MIB,
                "measured_of_planned": measured.total / expected.total,
            }
            print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()})
            rows.append(row)
    return rows


def estimate(settings: Settings) -> list[dict[str, object]]:
    """The estimate of `pagoda plan` against resident memory, each case in a process of its own."""
    rows: list[dict[str, object]] = []
    for case, activations in ESTIMATED:
        with multiprocessing.get_context("spawn").Pool(1) as fresh:
            rows.append(fresh.apply(_beside_pages, (case, activations, settings.ssd)))
        print(rows[-1])
    return rows


def _beside_pages(case: Workload, activations: ActivationMode, ssd: Path) -> dict[str, object]:
    subject = find_subject(case.model, batch_size=case.batch_size, seq_len=case.seq_len, count_flops=False)
    expected = estimate_activations(subject, case.tokens, 2, activations, chunked_loss=False)
    memory = pagoda.Memory(host="6GiB", ssd=f"{ssd}:8GiB" if "offload" in activations else None)
    steps(WARM_UP, memory, activations, 1).close()
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident_bytes("self", "VmRSS")
    paged = steps(case, memory, activations, 1)
    pages = paged.optimizer.stats.peak_bytes["host"]
    paged.close()
    beside = resident_bytes("self", "VmHWM") - before - pages
    return {
        "model": case.model,
        "tokens": case.tokens,
        "activations": activations,
        "estimated_mib": expected.total // MIB,
        "measured_mib": beside // MIB,
    }


def longest(settings: Settings) -> list[dict[str, object]]:
    """The longest sequence, in quarters of a power of two, and seconds of its second step."""
    rows: list[dict[str, object]] = []
    for contender in CONTENDERS:
        length, step_s = 0, 0.0
        for tokens in (SHORTEST << octave for octave in range(OCTAVES)):
            if (took := _ends(contender, tokens, settings.ssd)) is None:
                break
            length, step_s = tokens, took
        for tokens in [length * quarters // 4 for quarters in (5, 6, 7) if length]:
            if (took := _ends(contender, tokens, settings.ssd)) is None:
                break
            length, step_s = tokens, took
        row = {"model": LONGEST_MODEL, "limit_mib": LIMIT // MIB, "contender": contender, "tokens": length}
        rows.append({**row, "step_s": step_s})
        print(rows[-1])
    return rows


def _ends(contender: str, tokens: int, ssd: Path) -> float | None:
    """Seconds of the second step of a process that is killed when it passes the limit; None if it was."""
    command = [sys.executable, __file__, "--child", contender, str(tokens), str(ssd)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    while process.poll() is None:
        if resident_bytes(str(process.pid), "VmHWM") > LIMIT:
            process.kill()
        time.sleep(0.005)
    assert process.stdout is not None
    lines = process.stdout.read().splitlines()
    return float(lines[-1]) if process.returncode == 0 else None


def child(contender: str, tokens: int, ssd: str) -> None:
    """Two steps; prints the seconds of the second."""
    case, how = Workload(LONGEST_MODEL, 1, tokens), CONTENDERS[contender]
    trainer: Plain | Paged
    if how.activations is None:
        trainer = Plain(case)
    else:
        where = f"{ssd}:8GiB" if "offload" in how.activations else None
        trainer = Paged(case, pagoda.Memory(host="300MiB", ssd=where), activations=how.activations)
        if how.chunked_loss:
            pagoda.chunked_loss(trainer.model)
    ids = next(case.batches())
    for _ in range(2):
        start = time.perf_counter()
        trainer.step(ids)
    print(time.perf_counter() - start)
    trainer.close()


SECTIONS: dict[str, Callable[[Settings], list[dict[str, object]]]] = {
    "peak": peak,
    "estimate": estimate,
    "longest": longest,
}


def main(
    sections: tyro.conf.Positional[tuple[str, ...]] = ("peak",), ssd: Path | None = None, out: Path | None = None
) -> None:
    with tempfile.TemporaryDirectory() as spare:
        settings = Settings(ssd or Path(spare))
        results = {name: SECTIONS[name](settings) for name in sections}
    if out is not None:
        out.write_text(json.dumps({"threads": torch.get_num_threads(), **results}, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    else:
        tyro.cli(main)
