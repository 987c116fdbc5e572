"""Golden events: a hash of what the scheduler is told and what it decides in simulated runs.

    python benchmarks/golden_events.py record golden-events.json      # at the commit to start from
    python benchmarks/golden_events.py compare golden-events.json     # at the commit to check
    python benchmarks/golden_events.py record one.json --logs DIR     # also writes each run's events, to compare lines

`golden.py` compares what training computes; this compares the order in which it happens. A live run's order depends on
its threads, so the runs are simulated: the same scheduler, on a clock. A run is three steps of a small model.
"""

import argparse
import hashlib
import json
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pagoda
from golden import MODELS, UNIT
from pagoda.errors import BudgetError
from pagoda.memory.sizes import parse_bytes
from pagoda.optim.rule import Rule
from pagoda.plan.layout import GRAD, WEIGHT
from pagoda.plan.options import Options
from pagoda.plan.planner import Plan, make_plan
from pagoda.plan.ranks import ALONE, Ranks
from pagoda.plan.tiers import Budgets
from pagoda.prepare.construct import describe
from pagoda.schedule.event_log import LoggedScheduler
from pagoda.simulate import simulation
from pagoda.simulate.hardware import Figure
from pagoda.simulate.machines import find_machine
from pagoda.simulate.rates import Rates

LARGE = 1 << 40
STEPS = 3
ACCESS_S = 20e-6
"""Seconds of compute of an access."""
GPU = find_machine("rtx4090")
RATE = Figure(2e10, "assumed")
CPU = replace(
    GPU,
    device=None,
    link=None,
    intra_node_bytes_per_s=RATE,
    cpu=replace(GPU.cpu, copy_bytes_per_s=RATE, gradient_bytes_per_s=RATE),
)


@dataclass(frozen=True)
class Case:
    """One way to train."""

    host: float | None = None
    """Bytes of RAM beyond the least, as a share of all states. None: all states fit, and there is no SSD."""
    device: float | None = None
    """Bytes of the device beyond the least, as a share of the weights. None: compute is the CPU."""
    rule: Rule = pagoda.AdamW()  # noqa: RUF009
    model: str = "llama"
    ranks: Ranks = ALONE
    clipped: bool = False
    """Whether the second step's gradients are clipped."""
    checkpoint: bool = False
    """Whether a checkpoint is written during the last step."""
    options: Options = Options(clipping=True)  # noqa: RUF009


def cases() -> dict[str, Case]:
    backward = Options(gradient_accumulation_steps=1)
    guesses = replace(backward, clipping=True)
    return {
        "RAM": Case(),
        "moments on SSD": Case(0.4),
        "all on SSD": Case(0.0),
        "speculation": Case(0.6, clipped=True, options=guesses),
        "asynchronous": Case(0.2, options=Options(clipping=True, asynchronous=True)),
        "accumulation, updates during backward": Case(0.2, options=replace(backward, gradient_accumulation_steps=3)),
        "experts": Case(0.1, model="mixtral"),
        "ranks fetch alike": Case(0.1, ranks=Ranks(data_parallel=2, per_node=2)),
        "ranks share weights": Case(0.1, ranks=Ranks(data_parallel=2, per_node=2, stage=2), options=guesses),
        "checkpoint": Case(0.4, checkpoint=True),
        "device updates": Case(0.4, 0.5, options=replace(backward, split=pagoda.Split(device_update_share=0.5))),
        "Muon": Case(0.0, rule=pagoda.Muon(lr=1e-3)),
        "tight device": Case(0.0, 0.0, options=backward),
    }


def plan_of(case: Case) -> Plan:
    """The plan of a case, with so much more memory than the least as the case says."""
    with pagoda.deferred_init():
        root = describe(MODELS[case.model]())
    options = replace(case.options, page_bytes=4096, unit_limit=parse_bytes(UNIT, "UNIT"))
    make = partial(make_plan, root, case.rule.states("bf16"), options=options, ranks=case.ranks)

    def least(budgets: Budgets) -> int:
        try:
            make(budgets=budgets)
        except BudgetError as error:
            return error.needed_bytes or 0
        return 0

    layout = make(budgets=Budgets(LARGE, None if case.device is None else LARGE)).layout
    of = {state: layout.total_pages(state) * layout.page_bytes for state in (*layout.bytes_per_parameter, GRAD)}
    device = None
    if case.device is not None:
        device = least(Budgets(LARGE, 4096)) + int(case.device * of[WEIGHT])
    if case.host is None:
        return make(budgets=Budgets(LARGE, device))
    host = least(Budgets(4096, device, LARGE)) + int(case.host * sum(of.values()))
    return make(budgets=Budgets(host, device, LARGE))


def events_of(case: Case, log: Path) -> str:
    """The events and operations of a case, a line each, also written to `log`."""
    plan = plan_of(case)
    hardware = CPU if case.device is None else GPU
    hardware = hardware.with_gpus(case.ranks.per_node)
    ticks = [ACCESS_S] * (len(plan.trace.accesses) - 1)
    with patch.object(simulation, "Scheduler", partial(LoggedScheduler, path=log)):
        run = simulation.Simulation(plan, Rates(hardware, plan.ranks, plan.transfer_bytes), ticks)
    for step in range(STEPS):
        if case.checkpoint and step == STEPS - 1:
            run._scheduler.prepare_checkpoint()
            run._scheduler.begin_checkpoint()
            run._execution.pump()
        clipped = partial(run._scheduler.end_step, clipped=case.clipped and step == 1)
        with patch.object(run._scheduler, "end_step", clipped):
            run.step()
    return log.read_text().partition("\n")[2]  # without the plan, whose fields may change


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("action", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--logs", type=Path, help="directory for a file of events of each run")
    arguments = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        logs = arguments.logs or Path(folder)
        logs.mkdir(exist_ok=True)
        for name, case in cases().items():
            text = events_of(case, logs / f"{name}.txt")
            found[name] = hashlib.sha256(text.encode()).hexdigest()[:32]
            print(f"{name:40} {found[name]}  {text.count(chr(10))} events")
    if arguments.action == "record":
        arguments.file.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    golden = json.loads(arguments.file.read_text())
    differ = [f"{name}: other events than recorded" for name in found if golden.get(name) != found[name]]
    print("\n".join([*differ, f"{len(found)} runs, {len(differ)} differ"]))
    return bool(differ)


if __name__ == "__main__":
    sys.exit(main())
