"""Predicted against measured: step time and peak bytes of many configurations, calibrated in the same run.

For each configuration the machine is calibrated and the model's modules are profiled (a shared machine's disk and cores
drift within minutes), the plan that `wrap` will make is simulated on that, and then trained for a few steps on real
text. Errors are (predicted - measured) / measured. Memory is predicted per tier from the simulated ledger.

    python benchmarks/predict.py --ssd DIR [--models llama-15m llama-110m llama-215m] [--steps 5] [--out FILE]
"""

import gc
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.table import Table

import pagoda
from pagoda.calibrate import Effort, calibrate, profile_compute
from pagoda.errors import BudgetError
from pagoda.models import build_model
from pagoda.plan.compute import Compute
from pagoda.plan.hardware import Hardware
from pagoda.plan.placement import GRAD, RING_SLOTS, WEIGHT, Budgets
from pagoda.plan.planner import Options, make_plan
from pagoda.plan.simulate import simulate
from pagoda.plan.timeline import Timeline
from pagoda.plan.units import ModuleSpec
from pagoda.runtime.construct import describe
from pagoda.train.data import Batches, ByteText

RAM, SSD_STATE, ALL_ON_SSD, ARENA = "RAM", "SSD state", "all on SSD", "arena"
PLACEMENTS = (RAM, SSD_STATE, ALL_ON_SSD, ARENA)
SEQ_LEN = 512
LARGE = 1 << 40
SSD_ROOM = 20 << 30
EFFORT = Effort(figure_s=0.3, file_bytes=1 << 30)
PROFILE_S = 6.0
WARM_UP = 3
"""Steps before those that count: the first is traced, the second planned, the third finds its updates under way."""


@dataclass(frozen=True)
class Case:
    """One configuration."""

    model: str
    batch_size: int
    clip: float | None
    placement: str

    @property
    def options(self) -> Options:
        return Options(accumulation_steps=1, clipping=self.clip is not None)


@dataclass(frozen=True)
class Result:
    """What was predicted for a configuration, and what came."""

    model: str
    tokens: int
    clipping: bool
    placement: str
    predicted_s: float
    measured_s: float
    fastest_s: float
    slowest_s: float
    predicted_stall_s: dict[str, float]
    measured_stall_s: dict[str, float]
    predicted_bytes: dict[str, int]
    measured_bytes: dict[str, int]

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def bytes_error(self) -> float:
        """Of the tier where it is largest."""
        errors = [self.predicted_bytes[tier] / nbytes - 1 for tier, nbytes in self.measured_bytes.items()]
        return max(errors, key=abs)


def cases(model: str, batch_size: int) -> Iterator[Case]:
    """Half of all combinations, such that any two of placement, tokens and clipping take all their values."""
    for (index, placement), clip in itertools.product(enumerate(PLACEMENTS), (None, 1.0)):
        if (index + (batch_size > 1) + (clip is not None)) % 2 == 0:
            yield Case(model, batch_size, clip, placement)


def budgets(root: ModuleSpec, case: Case) -> Budgets:
    """Budgets under which state lies where the placement says, and no tighter than they need be."""
    states = pagoda.AdamW().states("bf16")
    if case.placement == RAM:
        return Budgets(LARGE)
    layout = make_plan(root, states, Budgets(LARGE), case.options).layout
    if case.placement == ARENA:
        return Budgets(LARGE, layout.lease_pages(ahead=2) * layout.page_bytes)
    if case.placement == SSD_STATE:
        ring = 2 * RING_SLOTS * sum(layout.block_pages(state.name) for state in layout.moments)
        pages = layout.total_pages(WEIGHT) + layout.total_pages(GRAD) + ring
        return Budgets(pages * layout.page_bytes, None, SSD_ROOM)
    try:
        make_plan(root, states, Budgets(1, None, SSD_ROOM), case.options)
    except BudgetError as refused:
        return Budgets(int((refused.needed_bytes or 0) * 1.2), None, SSD_ROOM)
    raise AssertionError("a byte of RAM is not enough")


def predict(root: ModuleSpec, case: Case, limits: Budgets, hardware: Hardware, compute: Compute) -> Timeline:
    plan = make_plan(root, pagoda.AdamW().states("bf16"), limits, case.options)
    return simulate(plan, hardware, compute.of_step(root, plan))


def measure(case: Case, limits: Budgets, ssd: Path, steps: int) -> tuple[list[float], dict[str, float], dict[str, int]]:
    """(seconds of each step, median stall per lane, peak bytes per tier)."""
    torch.manual_seed(0)
    with pagoda.init():
        model = build_model(case.model, seq_len=SEQ_LEN, gradient_checkpointing=True)
    memory = pagoda.Memory(
        host=min(limits.host, 20 << 30),
        device=None if limits.device is None else f"cpu:{limits.device}",
        ssd=None if limits.ssd is None else f"{ssd}:{limits.ssd}",
    )
    model, optimizer = pagoda.wrap(
        model, pagoda.AdamW(lr=1e-4), memory=memory, clip_grad_norm=case.clip, accumulation_steps=1
    )
    batches = Batches(text=ByteText.open("stdlib"), batch_size=case.batch_size, seq_len=SEQ_LEN)
    seconds: list[float] = []
    stalls: list[dict[str, float]] = []
    try:
        for step in range(WARM_UP + steps):
            ids, labels = batches.batch(step, 0)
            start = time.perf_counter()
            model(input_ids=ids, labels=labels).loss.backward()
            optimizer.step()
            seconds.append(time.perf_counter() - start)
            stalls.append(dict(optimizer.stats.stall_s))
        peak = dict(optimizer.stats.peak_bytes)
    finally:
        optimizer.close()
    del model, optimizer
    gc.collect()
    usual = {lane: statistics.median(s[lane] for s in stalls[WARM_UP:]) for lane in stalls[0]}
    return seconds[WARM_UP:], usual, peak


def main(
    ssd: Path,
    models: tuple[str, ...] = ("llama-15m", "llama-110m", "llama-215m"),
    placements: tuple[str, ...] = PLACEMENTS,
    steps: int = 5,
    out: Path | None = None,
) -> None:
    """Calibrate, then predict and measure every configuration."""
    console = Console()
    results: list[Result] = []
    machines: list[Hardware] = []
    for name, batch_size in itertools.product(models, (1, 4)):
        with pagoda.init():
            root = describe(build_model(name, seq_len=SEQ_LEN, gradient_checkpointing=True))
        for case in (case for case in cases(name, batch_size) if case.placement in placements):
            limits = budgets(root, case)
            hardware = calibrate(ssd if limits.ssd else None, torch.device("cpu"), effort=EFFORT)
            profile = profile_compute(name, batch_size=batch_size, seq_len=SEQ_LEN, budget_s=PROFILE_S)
            compute = Compute.from_profile(profile, root)
            machines.append(hardware)
            timeline = predict(root, case, limits, hardware, compute)
            seconds, stalls, peak = measure(case, limits, ssd, steps)
            result = Result(
                model=name,
                tokens=batch_size * SEQ_LEN,
                clipping=case.clip is not None,
                placement=case.placement,
                predicted_s=timeline.step_s,
                measured_s=statistics.median(seconds),
                fastest_s=min(seconds),
                slowest_s=max(seconds),
                predicted_stall_s={lane: s for lane, s in timeline.stall_s.items() if s > 0.001},
                measured_stall_s={lane: s for lane, s in stalls.items() if s > 0.001},
                predicted_bytes={tier: max(n for _, n in line) for tier, line in timeline.ledger.items()},
                measured_bytes=peak,
            )
            results.append(result)
            console.print(
                f"{name} {result.tokens} {case.placement} clip {case.clip}: predicted {result.predicted_s:.3f} s, "
                f"measured {result.measured_s:.3f} ({result.fastest_s:.3f} to {result.slowest_s:.3f}), "
                f"{result.error:+.1%}, bytes {result.bytes_error:+.1%}",
                highlight=False,
            )
            if out is not None:  # after each: the last may be interrupted
                data = [
                    {**asdict(r), "hardware": asdict(machine)} for r, machine in zip(results, machines, strict=True)
                ]
                out.write_text(json.dumps(data, indent=1) + "\n")
    console.print(_table(results))
    errors = sorted(abs(r.error) for r in results)
    nbytes = max(abs(r.bytes_error) for r in results)
    console.print(
        f"step time: median error {statistics.median(errors):.1%} (target 5%), worst {errors[-1]:.1%} (target 15%); "
        f"peak bytes: worst {nbytes:.1%} (target 2%)"
    )


def _table(results: list[Result]) -> Table:
    table = Table("model", "tokens", "placement", "clipping", "predicted s", "measured s", "error", "bytes error")
    for r in results:
        row = (f"{r.predicted_s:.3f}", f"{r.measured_s:.3f}", f"{r.error:+.1%}", f"{r.bytes_error:+.1%}")
        table.add_row(r.model, str(r.tokens), r.placement, "on" if r.clipping else "off", *row)
    return table


if __name__ == "__main__":
    tyro.cli(main)
