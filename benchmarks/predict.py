"""Predicted against measured: step time and peak bytes of many configurations, calibrated in the same run.

Each configuration is trained on real text in turns: the machine is calibrated and the model's modules are profiled for
a few seconds, then a few steps run, and so on, because a shared machine's disk and cores drift within seconds. Every
turn's calibration predicts the steps of that turn, by simulating the plan that runs. Predicted and measured are the
medians over turns; errors are (predicted - measured) / measured. Memory is predicted from the simulated ledger.
Kendall's tau says whether the forecast puts the configurations of a model and a batch in the right order: 1 if it does
for every two of them, -1 if for none. A CPU without instructions for bf16 trains in fp32.

    python benchmarks/predict.py --ssd DIR [--models llama-15m llama-110m llama-215m] [--batches 1 4] [--case-s 45]
        [--optimizers adamw adamw-8bit adafactor muon RMSprop] [--out FILE]
"""

import gc
import itertools
import math
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.table import Table

import pagoda
from pagoda.calibrate.machine import calibrate
from pagoda.calibrate.matmul import FAR_SLOWER, cpu_slowdown
from pagoda.calibrate.meter import Effort
from pagoda.calibrate.model import ComputeProfiler, profile_of
from pagoda.config.training import Precision
from pagoda.errors import BudgetError
from pagoda.forecast.compute import Compute
from pagoda.models import build_model
from pagoda.optim.named import rule_named
from pagoda.optim.rule import Rule
from pagoda.plan.buffers import LEAST_RING_SLOTS
from pagoda.plan.layout import GRAD, WEIGHT
from pagoda.plan.options import Options
from pagoda.plan.planner import make_plan
from pagoda.plan.tiers import Budgets
from pagoda.plan.units import ModuleSpec
from pagoda.prepare.construct import describe
from pagoda.simulate.hardware import Hardware
from pagoda.simulate.simulation import simulate
from pagoda.simulate.timeline import Timeline
from script import begin, write
from text import batch_of, batches_of_text

RAM, SSD_STATE, ALL_ON_SSD, ARENA = "RAM", "SSD state", "all on SSD", "arena"
PLACEMENTS = (RAM, SSD_STATE, ALL_ON_SSD, ARENA)
SEQ_LEN = 512
LARGE = 1 << 40
SSD_ROOM = 20 << 30
EFFORT = Effort(figure_s=0.1, params=16 << 20, copy_bytes=128 << 20, file_bytes=1 << 30)
PROFILE_S = 3.0
WARM_UP = 2
"""Steps before the first turn: one is traced, one planned for it."""
TURN_S = 3.0
"""Seconds of steps of a turn, at least two steps; before them one that finds its updates under way."""
LEAST_TURNS = 3
SETTLE_S = 1.0


@dataclass(frozen=True)
class Case:
    """One configuration."""

    model: str
    batch_size: int
    clip: float | None
    placement: str
    precision: Precision
    optimizer: str = "adamw"

    @property
    def rule(self) -> Rule:
        name, _, moments = self.optimizer.partition("-")
        return rule_named(name, {"lr": 1e-4} | ({"moments": moments} if moments else {}))

    @property
    def options(self) -> Options:
        return Options(gradient_accumulation_steps=1, clipping=self.clip is not None)


@dataclass(frozen=True)
class Result:
    """What was predicted for a configuration, and what came."""

    model: str
    precision: str
    optimizer: str
    tokens: int
    clipping: bool
    placement: str
    turns: int
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


def cases(model: str, batch_size: int, precision: Precision, optimizer: str) -> Iterator[Case]:
    """Half of all combinations, such that any two of placement, tokens and clipping take all their values."""
    for (index, placement), clip in itertools.product(enumerate(PLACEMENTS), (None, 1.0)):
        if (index + (batch_size > 1) + (clip is not None)) % 2 == 0:
            yield Case(model, batch_size, clip, placement, precision, optimizer)


def budgets(root: ModuleSpec, case: Case) -> Budgets:
    """Budgets under which state lies where the placement says, and no tighter than they need be."""
    states = case.rule.states(case.precision)
    if case.placement == RAM:
        return Budgets(LARGE)
    layout = make_plan(root, states, Budgets(LARGE), case.options).layout
    if case.placement == ARENA:
        return Budgets(LARGE, layout.lease_pages(ahead=2) * layout.page_bytes)
    if case.placement == SSD_STATE:
        ring = 2 * LEAST_RING_SLOTS * sum(layout.block_pages(state.name) for state in layout.moments)
        pages = layout.total_pages(WEIGHT) + layout.total_pages(GRAD) + ring
        return Budgets(pages * layout.page_bytes, None, SSD_ROOM)
    try:
        make_plan(root, states, Budgets(1, None, SSD_ROOM), case.options)
    except BudgetError as refused:
        return Budgets(int((refused.needed_bytes or 0) * 1.2), None, SSD_ROOM)
    raise AssertionError("a byte of RAM is not enough")


class Predictor:
    """Predicts the steps of one configuration from what the machine does now."""

    def __init__(self, case: Case, root: ModuleSpec, limits: Budgets, ssd: Path | None) -> None:
        self._root = root
        self._ssd = ssd
        self._work = case.rule.work
        self._plan = make_plan(root, case.rule.states(case.precision), limits, case.options)
        self._profiler = ComputeProfiler(
            case.model, batch_size=case.batch_size, seq_len=SEQ_LEN, precision=case.precision
        )
        self.machines: list[Hardware] = []

    def predict(self) -> Timeline:
        """Calibrate, profile, simulate."""
        before = self._profiler.rounds(1, 8, PROFILE_S / 2)
        self.machines.append(calibrate(self._ssd, torch.device("cpu"), effort=EFFORT))
        rounds = [*before, *self._profiler.rounds(1, 8, PROFILE_S / 2)]
        profile = profile_of(rounds, self._profiler.layers)
        compute = Compute.from_profile(profile, self._root)
        return simulate(self._plan, self.machines[-1], compute.of_step(self._root, self._plan), self._work)


class Trainer:
    """Trains one configuration on real text."""

    def __init__(self, case: Case, limits: Budgets, ssd: Path, options: Options | None = None) -> None:
        """`options` make another plan than the usual one."""
        torch.manual_seed(0)
        with pagoda.deferred_init():
            model = build_model(case.model, seq_len=SEQ_LEN, gradient_checkpointing=True)
        options = options or case.options
        memory = pagoda.Memory(
            host=min(limits.host, 20 << 30),
            device=None if limits.device is None else f"cpu:{limits.device}",
            ssd=None if limits.ssd is None else f"{ssd}:{limits.ssd}",
            page_size=options.page_bytes,
            unit_limit=options.unit_limit,
            split=options.split,
        )
        self.model, self.optimizer = pagoda.wrap(
            model,
            case.rule,
            memory=memory,
            precision=case.precision,
            max_grad_norm=case.clip,
            gradient_accumulation_steps=1,
        )
        self._batches = batches_of_text(SEQ_LEN, case.batch_size)
        self._step = 0
        for _ in range(WARM_UP):
            self.step()

    def step(self) -> float:
        """Seconds of one more step."""
        batch = batch_of(self._batches, self._step)
        self._step += 1
        start = time.perf_counter()
        self.model(**batch).loss.backward()
        self.optimizer.step()
        return time.perf_counter() - start

    def turn(self) -> tuple[list[float], list[dict[str, float]]]:
        """(seconds, stalls) of the steps of one turn; nothing is under way before or after it."""
        seconds: list[float] = []
        stalls: list[dict[str, float]] = []
        self.step()
        while len(seconds) < 2 or sum(seconds) < TURN_S:
            seconds.append(self.step())
            stalls.append(dict(self.optimizer.stats.stall_s))
        self.optimizer.synchronize()
        return seconds, stalls


def run_case(case: Case, root: ModuleSpec, ssd: Path, case_s: float) -> tuple[Result, list[Hardware]]:
    """Predict and measure one configuration, turn by turn, for `case_s` seconds or LEAST_TURNS turns."""
    limits = budgets(root, case)
    predictor = Predictor(case, root, limits, ssd if limits.ssd else None)
    trainer = Trainer(case, limits, ssd)
    predicted: list[Timeline] = []
    measured: list[float] = []
    seconds: list[float] = []
    stalls: list[dict[str, float]] = []
    start = time.perf_counter()
    try:
        while len(predicted) < LEAST_TURNS or time.perf_counter() - start < case_s:
            predicted.append(predictor.predict())
            os.sync()  # the file of the calibration is deleted: let the drive discard it before steps are timed
            time.sleep(SETTLE_S)
            turn, stalled = trainer.turn()
            measured.append(statistics.median(turn))
            seconds += turn
            stalls += stalled
        peak = dict(trainer.optimizer.stats.peak_bytes)
    finally:
        trainer.optimizer.close()
    lanes = {lane for timeline in predicted for lane in timeline.stall_s}
    predicted_stalls = {lane: statistics.median(t.stall_s.get(lane, 0.0) for t in predicted) for lane in lanes}
    measured_stalls = {lane: statistics.median(s[lane] for s in stalls) for lane in stalls[0]}
    result = Result(
        model=case.model,
        precision=case.precision,
        optimizer=case.optimizer,
        tokens=case.batch_size * SEQ_LEN,
        clipping=case.clip is not None,
        placement=case.placement,
        turns=len(predicted),
        predicted_s=statistics.median(timeline.step_s for timeline in predicted),
        measured_s=statistics.median(measured),
        fastest_s=min(seconds),
        slowest_s=max(seconds),
        predicted_stall_s={lane: s for lane, s in predicted_stalls.items() if s > 0.001},
        measured_stall_s={lane: s for lane, s in measured_stalls.items() if s > 0.001},
        predicted_bytes={tier: max(n for _, n in line) for tier, line in predicted[-1].held_bytes.items()},
        measured_bytes=peak,
    )
    return result, predictor.machines


def main(
    ssd: Path,
    models: tuple[str, ...] = ("llama-15m", "llama-110m", "llama-215m"),
    placements: tuple[str, ...] = PLACEMENTS,
    batches: tuple[int, ...] = (1, 4),
    optimizers: tuple[str, ...] = ("adamw",),
    case_s: float = 45.0,
    out: Path | None = None,
) -> None:
    """Calibrate, predict and measure every configuration, for about `case_s` seconds each."""
    begin()
    console = Console()
    results: list[Result] = []
    data: list[dict[str, Any]] = []
    precision: Precision = "fp32" if cpu_slowdown(torch.bfloat16) >= FAR_SLOWER else "bf16"
    for name, batch_size in itertools.product(models, batches):
        with pagoda.deferred_init():
            root = describe(build_model(name, seq_len=SEQ_LEN, gradient_checkpointing=True))
        every = (case for optimizer in optimizers for case in cases(name, batch_size, precision, optimizer))
        for case in (case for case in every if case.placement in placements):
            result, machines = run_case(case, root, ssd, case_s)
            gc.collect()
            results.append(result)
            console.print(
                f"{name} {precision} {case.optimizer} {result.tokens} {case.placement} clip {case.clip}: "
                f"predicted {result.predicted_s:.3f} s, "
                f"measured {result.measured_s:.3f} ({result.fastest_s:.3f} to {result.slowest_s:.3f}), "
                f"{result.error:+.1%}, bytes {result.bytes_error:+.1%}, {result.turns} turns",
                highlight=False,
            )
            data.append({**asdict(result), "hardware": asdict(machines[-1])})
            write(out, data)  # after each: the last may be interrupted
    console.print(_table(results))
    errors = sorted(abs(r.error) for r in results)
    nbytes = max(abs(r.bytes_error) for r in results)
    console.print(
        f"step time: median error {statistics.median(errors):.1%} (target 5%), worst {errors[-1]:.1%} (target 15%); "
        f"peak bytes: worst {nbytes:.1%} (target 2%); order: Kendall's tau {kendall_tau(results):.2f}"
    )


def kendall_tau(results: Sequence[Result]) -> float:
    """Kendall's tau of predicted and measured step times, over pairs of the same model, tokens and optimizer."""
    signs = [
        math.copysign(1, (a.predicted_s - b.predicted_s) * (a.measured_s - b.measured_s))
        for a, b in itertools.combinations(results, 2)
        if (a.model, a.tokens, a.optimizer) == (b.model, b.tokens, b.optimizer)
    ]
    return statistics.fmean(signs) if signs else math.nan


def _table(results: list[Result]) -> Table:
    table = Table(
        "model", "optimizer", "tokens", "placement", "clipping", "predicted s", "measured s", "error", "bytes error"
    )
    for r in results:
        row = (f"{r.predicted_s:.3f}", f"{r.measured_s:.3f}", f"{r.error:+.1%}", f"{r.bytes_error:+.1%}")
        table.add_row(r.model, r.optimizer, str(r.tokens), r.placement, "on" if r.clipping else "off", *row)
    return table


if __name__ == "__main__":
    tyro.cli(main)
