"""Activations: what graphs keep against the plan, and the estimate of `pagoda plan` against resident memory.

    python benchmarks/activations.py [peak estimate] [--ssd DIR] [--out FILE]

`peak`: for every policy and place at three shapes, the most that graphs kept against what follows from the sizes that
a step with everything kept has shown; with "auto", of the policies that it chose. `estimate`: what `pagoda plan` says
before a run, against what a process grows by, with malloc as it is and without what it keeps. benchmarks/sequence.py
has the longest sequences.
"""

import ctypes
import gc
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import tyro

import pagoda
from beyond_memory import resident_bytes
from pagoda.config.training import ActivationMode
from pagoda.forecast.activations import activations_of, chunking_helps
from pagoda.forecast.config import PlanConfig
from pagoda.forecast.model_description import describe_model, widths
from pagoda.models.build import build_model
from pagoda.plan.activations import Policy, peak_of
from pagoda.prepare.deferred_logits import chunked_loss
from script import write
from training import Paged, Workload

MIB = 1 << 20
POLICIES: tuple[ActivationMode, ...] = ("keep", "recompute", "offload", "recompute+offload", "auto")
PLACES = ("host", "ssd")
"""Where offloaded activations go: from a CPU arena that stands in for a device, or from RAM."""
SHAPES = (Workload("llama-15m", 1, 256), Workload("llama-15m", 4, 256), Workload("gpt2", 1, 256))
LAYERS = 4
"""Layers of the models whose activations are estimated, so that a step takes seconds."""
ESTIMATED: tuple[tuple[Workload, ActivationMode], ...] = (
    (Workload("smollm2-135m", 4, 256), "recompute"),
    (Workload("smollm2-360m", 4, 256), "recompute"),
    (Workload("qwen3-0.6b", 2, 256), "recompute"),
    (Workload("llama-110m", 4, 256), "recompute"),
    (Workload("llama3.2-1b", 1, 256), "recompute"),
    (Workload("gpt2", 4, 256), "recompute"),
    (Workload("llama-110m", 8, 256), "recompute"),
)
"""Of the last, a layer that is recomputed takes most, and of the others, gradients at the end of backward."""
EXACT = "glibc.malloc.mmap_threshold=131072"
"""With this, malloc returns every freed block of 128 KiB or more to the system."""


def steps(case: Workload, memory: pagoda.Memory, activations: ActivationMode, count: int) -> Paged:
    """A run after some steps."""
    paged = Paged(case, memory, activations=activations)
    batches = case.batches()
    for _ in range(count):
        paged.step(next(batches))
    paged.optimizer.synchronize()
    return paged


def peak(ssd: Path) -> list[dict[str, object]]:
    """MiB that graphs kept, by where, against the plan, in the last of three steps."""
    rows: list[dict[str, object]] = []
    for case in SHAPES:
        kept: dict[str, int] = {}
        sizes = None
        for activations in POLICIES:
            for place in PLACES if "offload" in activations or activations == "auto" else PLACES[1:]:
                most = (kept["keep"] + kept["recompute"]) // 2 if activations == "auto" else None
                paged = steps(case, memory_for(place, ssd, most), activations, 3)
                planned, measured = pagoda.plan_of(paged.model).activations, paged.optimizer.stats.activation_bytes
                paged.close()
                kept[activations] = measured.kept
                sizes = sizes or planned.sizes
                assert sizes is not None
                policies = planned.policies if activations == "auto" else [Policy(activations)] * len(sizes.blocks)
                expected = peak_of(sizes, policies, 1 << 40 if place == "host" else 0)
                rows.append(
                    {
                        "model": case.model,
                        "tokens": case.tokens,
                        "activations": f"{activations} ({planned})" if activations == "auto" else activations,
                        "place": place,
                        **{f"{tier}_mib": getattr(measured, tier) / MIB for tier in ("kept", *PLACES)},
                        **{f"planned_{tier}_mib": getattr(expected, tier) / MIB for tier in ("kept", *PLACES)},
                        "measured_of_planned": measured.total / expected.total,
                        "kept_of_planned": measured.kept / expected.kept,
                    }
                )
                print({k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
    return rows


def memory_for(place: str, ssd: Path, activations: int | None) -> pagoda.Memory:
    """Room for everything, and where to offload to."""
    if place == "host":
        return pagoda.Memory(device="cpu:512MiB", host="3GiB", activations=activations)
    return pagoda.Memory(host="3GiB", ssd=f"{ssd}:8GiB", activations=activations)


def estimate(ssd: Path) -> list[dict[str, object]]:
    """The estimate of `pagoda plan` against what a process grows by in a step, each case in processes of its own: one
    in which malloc returns every freed block at once, so that it grows by activations alone, and a usual one."""
    rows: list[dict[str, object]] = []
    for case in ESTIMATED:
        row: dict[str, object] = {"model": case[0].model, "tokens": case[0].tokens, "activations": case[1]}
        for name, tunables in (("measured_mib", EXACT), ("with_malloc_mib", "")):
            os.environ["GLIBC_TUNABLES"] = tunables  # read when a process starts
            with multiprocessing.get_context("spawn").Pool(1) as fresh:
                row["estimated_mib"], row[name] = fresh.apply(_grown, case)
        rows.append(row)
        print(row, flush=True)
    return rows


def _grown(case: Workload, activations: ActivationMode) -> tuple[int, int]:
    """MiB of activations that are estimated, and by which the process grows in a step of a few layers."""
    torch.manual_seed(0)
    with pagoda.deferred_init():
        model: Any = build_model(case.model, seq_len=case.seq_len, layers=LAYERS)
    sizes = widths(model.config.get_text_config())
    config = PlanConfig(
        model=case.model,
        max_length=case.seq_len,
        per_device_train_batch_size=case.batch_size,
        precision="fp32",
        activations=activations,
    )
    chunked = chunking_helps(config, sizes)
    if chunked:
        chunked_loss(model)
    model, optimizer = pagoda.wrap(
        model, pagoda.AdamW(), memory=pagoda.Memory(host="10GiB"), precision="fp32", activations=activations
    )

    def step(batch_size: int, seq_len: int) -> None:
        ids = torch.randint(sizes.vocab, (batch_size, seq_len))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.synchronize()

    step(1, 32)
    step(1, 32)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident_bytes("self", "VmRSS")
    step(case.batch_size, case.seq_len)
    grown = resident_bytes("self", "VmHWM") - before
    described = replace(describe_model(config, count_flops=False), layers=LAYERS)
    expected = activations_of(replace(config, chunked_loss=chunked), described)
    optimizer.close()
    return expected.total // MIB, grown // MIB


SECTIONS: dict[str, Callable[[Path], list[dict[str, object]]]] = {"peak": peak, "estimate": estimate}


def main(
    sections: tyro.conf.Positional[tuple[str, ...]] = ("peak",), ssd: Path | None = None, out: Path | None = None
) -> None:
    with tempfile.TemporaryDirectory() as spare:
        results = {name: SECTIONS[name](ssd or Path(spare)) for name in sections}
    write(out, results)


if __name__ == "__main__":
    tyro.cli(main)
