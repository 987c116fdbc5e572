"""Activations: what graphs keep against the plan, and the estimate of `pagoda plan` against resident memory.

    python benchmarks/activations.py [peak estimate] [--ssd DIR] [--out FILE]

`peak`: for every policy and place at three shapes, the most that graphs kept against what follows from the sizes that
a step with everything kept has shown; with "auto", of the policies that it chose. `estimate`: what `pagoda plan` says
before a run, against the peak resident memory of a process less its pages. benchmarks/sequence.py has the longest
sequences.
"""

import ctypes
import gc
import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path

import tyro

import pagoda
from beyond_memory import resident_bytes
from pagoda.config.training import ActivationMode
from pagoda.forecast.activations import estimate_activations
from pagoda.forecast.config import PlanConfig
from pagoda.forecast.model_description import describe_model
from pagoda.plan.activations import Policy, peak_of
from script import write
from training import Paged, Workload

MIB = 1 << 20
WARM_UP = Workload("llama-15m", 1, 32)
POLICIES: tuple[ActivationMode, ...] = ("keep", "recompute", "offload", "recompute+offload", "auto")
PLACES = ("host", "ssd")
"""Where offloaded activations go: from a CPU arena that stands in for a device, or from RAM."""
SHAPES = (Workload("llama-15m", 1, 256), Workload("llama-15m", 4, 256), Workload("gpt2", 1, 256))
ESTIMATED: tuple[tuple[Workload, ActivationMode], ...] = (
    (Workload("llama-15m", 8, 512), "recompute"),
    (Workload("llama-15m", 8, 512), "keep"),
    (Workload("llama-15m", 8, 512), "offload"),
    (Workload("llama-110m", 4, 256), "recompute"),
    (Workload("gpt2", 2, 512), "recompute"),
    (Workload("gpt2", 2, 512), "keep"),
)


def steps(case: Workload, memory: pagoda.Memory, activations: ActivationMode, count: int) -> Paged:
    """A run after some steps."""
    paged = Paged(case, memory, activations=activations)
    batches = case.batches()
    for _ in range(count):
        paged.step(next(batches))
    paged.optimizer.drain()
    return paged


def peak(ssd: Path) -> list[dict[str, object]]:
    """MiB that graphs kept, by where, against the plan, in the last of three steps."""
    rows: list[dict[str, object]] = []
    for case in SHAPES:
        kept, sizes = {}, None
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
    """The estimate of `pagoda plan` against resident memory, each case in a process of its own."""
    rows: list[dict[str, object]] = []
    for case, activations in ESTIMATED:
        with multiprocessing.get_context("spawn").Pool(1) as fresh:
            rows.append(fresh.apply(_beside_pages, (case, activations, ssd)))
        print(rows[-1])
    return rows


def _beside_pages(case: Workload, activations: ActivationMode, ssd: Path) -> dict[str, object]:
    described = describe_model(PlanConfig(model=case.model, seq_len=case.seq_len), count_flops=False)
    expected = estimate_activations(described, case.tokens, 2, activations, chunked_loss=False)
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


SECTIONS: dict[str, Callable[[Path], list[dict[str, object]]]] = {"peak": peak, "estimate": estimate}


def main(
    sections: tyro.conf.Positional[tuple[str, ...]] = ("peak",), ssd: Path | None = None, out: Path | None = None
) -> None:
    with tempfile.TemporaryDirectory() as spare:
        results = {name: SECTIONS[name](ssd or Path(spare)) for name in sections}
    write(out, results)


if __name__ == "__main__":
    tyro.cli(main)
