"""How much faster the fastest hand-made plan is than the one that `--plan search` chooses.

For each configuration, the machine and the model's modules are measured, and a plan is searched with these figures, as
`pagoda plan --plan search` does. Then this plan, the usual one and hand-made ones train the same model in turns, all
open at once. The hand-made plans are the usual one with a single setting changed: other units or another page size.
Plans that are equal run once. A plan's time is the median over its turns. The regret is the time of the searched plan
over that of the fastest plan, less one. Noise counts as regret, since the fastest of several equal plans is always a
little faster than one given plan. To show how much, the usual plan runs twice.

    python benchmarks/regret.py --ssd DIR [--models llama-15m llama-110m] [--batches 1] [--rounds 7] [--out FILE]
"""

import gc
import itertools
import os
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.table import Table

import pagoda
from pagoda.calibrate.machine import calibrate
from pagoda.calibrate.matmul import FAR_SLOWER, cpu_slowdown
from pagoda.calibrate.model import ComputeProfiler, profile_of
from pagoda.config.training import Precision
from pagoda.errors import BudgetError
from pagoda.forecast.compute import Compute
from pagoda.forecast.problem import Problem
from pagoda.forecast.search import search
from pagoda.models import build_model
from pagoda.plan.options import Options
from pagoda.plan.planner import Plan
from pagoda.prepare.construct import describe
from predict import ALL_ON_SSD, EFFORT, PROFILE_S, SEQ_LEN, SSD_STATE, Case, Trainer, budgets
from script import begin, write

SEARCHED, USUAL, AGAIN = "searched", "usual", "usual, again"


@dataclass(frozen=True)
class Result:
    """The plans of one configuration."""

    model: str
    precision: str
    tokens: int
    clipping: bool
    placement: str
    chosen: str
    """What the search changed."""
    seconds: dict[str, list[float]]
    """Plan -> the median step of each turn."""
    predicted_s: dict[str, float]
    """Plan that the search simulated, in its own words -> the step that it predicted."""

    @property
    def medians(self) -> dict[str, float]:
        return {name: statistics.median(turns) for name, turns in self.seconds.items()}

    @property
    def regret(self) -> float:
        return self.medians[SEARCHED] / min(self.medians.values()) - 1

    @property
    def noise(self) -> float:
        """How much two runs of the usual plan differ."""
        first, second = self.medians[USUAL], self.medians[AGAIN]
        return max(first, second) / min(first, second) - 1


def hand_made(problem: Problem, usual: Plan) -> Iterator[tuple[str, Options]]:
    """The usual plan with a single setting changed."""
    options = problem.options
    largest = max(unit.numel for unit in usual.units) * usual.layout.weight.dtype.itemsize
    for factor in (0.5, 2):
        yield f"units of {factor:g} times the size", replace(options, unit_limit=int(largest * factor))
    yield "pages of half the size", replace(options, page_bytes=usual.page_bytes // 2)


def run(case: Case, ssd: Path, rounds: int) -> Result:
    """Search a plan, and train with it and all others in turns."""
    with pagoda.deferred_init():
        root = describe(build_model(case.model, seq_len=SEQ_LEN, gradient_checkpointing=True))
    limits = budgets(root, case)
    profiler = ComputeProfiler(case.model, batch_size=case.batch_size, seq_len=SEQ_LEN, precision=case.precision)
    compute = Compute.from_profile(profile_of(profiler.rounds(1, 8, PROFILE_S), profiler.layers), root)
    machine = calibrate(ssd, torch.device("cpu"), effort=EFFORT)
    problem = Problem(root, pagoda.AdamW().states(case.precision), limits, machine, compute, case.options)
    choice = search(problem)
    usual = problem.plan()
    plans = {USUAL: (case.options, usual), AGAIN: (case.options, usual)}
    if (choice.best.plan.layout, choice.best.plan.placement) != (usual.layout, usual.placement):
        plans[SEARCHED] = choice.best.options, choice.best.plan
    for name, options in hand_made(problem, usual):
        try:
            plan = replace(problem, options=options).plan()
        except BudgetError:
            continue
        if all((plan.layout, plan.placement) != (other.layout, other.placement) for _, other in plans.values()):
            plans[name] = options, plan
    trainers = {}
    try:
        for name, (options, _) in plans.items():
            directory = ssd / name.replace(" ", "-").replace(",", "")
            directory.mkdir(exist_ok=True)
            trainers[name] = Trainer(case, limits, directory, options)
        os.sync()
        seconds: dict[str, list[float]] = {name: [] for name in trainers}
        for turn in range(rounds):
            order = [*trainers] if turn % 2 else [*reversed(trainers)]
            for name in order:
                seconds[name].append(statistics.median(trainers[name].turn()[0]))
    finally:
        for trainer in trainers.values():
            trainer.optimizer.close()
    seconds.setdefault(SEARCHED, seconds[USUAL])
    return Result(
        case.model,
        case.precision,
        case.batch_size * SEQ_LEN,
        case.clip is not None,
        case.placement,
        choice.best.name,
        seconds,
        {each.name: each.step_s for each in (choice.best, *choice.others)},
    )


def main(
    ssd: Path,
    models: tuple[str, ...] = ("llama-15m", "llama-110m"),
    placements: tuple[str, ...] = (SSD_STATE, ALL_ON_SSD),
    batches: tuple[int, ...] = (1,),
    rounds: int = 7,
    out: Path | None = None,
) -> None:
    """Search a plan for every configuration, and train with it and with hand-made plans."""
    begin()
    console = Console()
    precision: Precision = "fp32" if cpu_slowdown(torch.bfloat16) >= FAR_SLOWER else "bf16"
    data: list[dict[str, Any]] = []
    for model, batch, placement, clip in itertools.product(models, batches, placements, (None, 1.0)):
        result = run(Case(model, batch, clip, placement, precision), ssd, rounds)
        gc.collect()
        clipping = "on" if result.clipping else "off"
        table = Table("plan", "seconds", "fastest turn", "slowest turn", title=f"{model}, {placement}, clip {clipping}")
        for name, median in sorted(result.medians.items(), key=lambda item: item[1]):
            turns = result.seconds[name]
            table.add_row(name, f"{median:.3f}", f"{min(turns):.3f}", f"{max(turns):.3f}")
        console.print(table)
        console.print(
            f"The search chose: {result.chosen}. Regret {result.regret:.1%} (target 3%); the usual plan differs from "
            f"itself by {result.noise:.1%}.",
            highlight=False,
        )
        data.append({**asdict(result), "regret": result.regret, "noise": result.noise})
        write(out, data)  # after each, since the last may be interrupted


if __name__ == "__main__":
    tyro.cli(main)
