"""What ranks must have in common reads alike in every process, whatever lies where in its memory."""

import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest

import pagoda
from pagoda.distributed.start import agreed_plan
from pagoda.plan.options import Options
from pagoda.plan.placement import Budgets
from pagoda.plan.planner import Plan, make_plan
from pagoda.plan.ranks import Ranks, Stage
from pagoda.plan.units import ModuleSpec, ParamSpec

from .ranks import ROOT

SAY_WHAT_IS_COMMON = """
import sys
import torch
import pagoda
from pagoda.distributed.start import in_common, on_any_rank
from pagoda.plan.placement import Budgets
from pagoda.plan.planner import Options, make_plan
from pagoda.plan.ranks import Ranks
from pagoda.construction.construct import describe

rank = int(sys.argv[1])
kept = [object() for _ in range(1000 * rank)]
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
for rule in (pagoda.AdamW(), pagoda.Muon(), pagoda.Adafactor(), pagoda.Optim(torch.optim.Adagrad)):
    root, states = describe(model), rule.states("bf16")
    plan = make_plan(root, states, Budgets(1 << 30), Options(4096, 16 << 10), Ranks(2, 2), rank=rank)
    print(on_any_rank(in_common(plan), root))
"""


def test_what_plans_have_in_common_reads_alike_in_two_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One with random hashes, or those of a chosen seed: this; and one with those of another seed."""
    seed = str(1 + int(os.environ.get("PYTHONHASHSEED", "0").replace("random", "0")))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", SAY_WHAT_IS_COMMON, "1"]
    other = subprocess.check_output(command, env=environment, timeout=120, text=True)
    monkeypatch.setattr(sys, "argv", ["", "0"])
    exec(SAY_WHAT_IS_COMMON, {})
    mine = capsys.readouterr().out
    assert len(mine.splitlines()) == 4
    assert mine == other
    assert " at 0x" not in mine


@dataclass
class OtherRank:
    """A transport to a rank 0 that says what is given here; this one is rank 1."""

    says: str = ""

    def announce(self, value: Any) -> list[Any]:
        return [self.says if isinstance(value, str) else value, value]


ROOT_MODULE = ModuleSpec("", (), tuple(ModuleSpec(f"{i}", (ParamSpec(f"{i}.weight", (64, 64)),)) for i in range(8)))


def agreed(stage: Stage, host: int, other: Any = None) -> Plan:
    """The plan of two ranks with much room on SSD."""
    options, budgets = Options(4096, 16 << 10), Budgets(host, ssd=1 << 30)

    def make() -> Plan:
        return make_plan(ROOT_MODULE, pagoda.AdamW().states("bf16"), budgets, options, Ranks(2, 2, stage), rank=1)

    return agreed_plan(other or OtherRank(), make, ROOT_MODULE)


def least_host(stage: Stage) -> int:
    """Bytes of RAM with which the planner finds a plan."""
    with pytest.raises(pagoda.BudgetError) as refused:
        agreed(stage, host=4096)
    assert refused.value.needed_bytes is not None
    return refused.value.needed_bytes


@pytest.mark.parametrize("stage", [1, 2])
def test_weights_that_all_ranks_have_are_in_ram_or_the_refusal_says_what_to_do(stage: Stage) -> None:
    with pytest.raises(pagoda.BudgetError, match=r"use ZeRO stage 3: .* every rank keeps all weights in RAM"):
        agreed(stage, host=4096)
    plan = agreed(stage, least_host(stage))
    assert plan.bytes["host"]["weight"] == 2 * 8 * 64 * 64
    agreed(3, least_host(3))


def test_a_rank_whose_share_does_not_fit_stops_all() -> None:
    with pytest.raises(pagoda.BudgetError, match="Rank 0 cannot hold its share: 3 KiB short"):
        agreed(3, least_host(3), OtherRank("3 KiB short"))
