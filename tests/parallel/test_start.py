"""What ranks must have in common reads alike in every process, whatever lies where in its memory."""

import os
import subprocess
import sys

from .conftest import ROOT

SAY_WHAT_IS_COMMON = """
import sys
import torch
import pagoda
from pagoda.parallel.start import in_common, on_any_rank
from pagoda.plan.placement import Budgets
from pagoda.plan.planner import Options, make_plan
from pagoda.plan.ranks import Ranks
from pagoda.runtime.construct import describe

rank = int(sys.argv[1])
kept = [object() for _ in range(1000 * rank)]
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
for rule in (pagoda.AdamW(), pagoda.Muon(), pagoda.Adafactor(), pagoda.Optim(torch.optim.Adagrad)):
    root, states = describe(model), rule.states("bf16")
    plan = make_plan(root, states, Budgets(1 << 30), Options(4096, 16 << 10), Ranks(2, 2), rank=rank)
    print(on_any_rank(in_common(plan), root))
"""


def test_what_plans_have_in_common_reads_alike_in_two_processes() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SAY_WHAT_IS_COMMON, str(rank)],
            stdout=subprocess.PIPE,
            text=True,
            env={**environment, "PYTHONHASHSEED": str(rank + 1)},
        )
        for rank in range(2)
    ]
    first, second = (process.communicate(timeout=120)[0] for process in processes)
    assert [process.returncode for process in processes] == [0, 0]
    assert len(first.splitlines()) == 4
    assert first == second
    assert " at 0x" not in first
