"""What ranks must have in common reads alike in every process, whatever lies where in its memory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import pagoda
from pagoda.plan.options import Options
from pagoda.plan.planner import Plan, make_plan
from pagoda.plan.ranks import Ranks, Stage
from pagoda.plan.tiers import Budgets
from pagoda.plan.units import ModuleSpec, ParamSpec
from pagoda.ranks.start import agreed_plan

from .ranks import RankServer
from .scenarios import say_what_is_common


def test_what_plans_have_in_common_reads_alike_in_two_processes(ranks: RankServer, tmp_path: Path) -> None:
    """Hashes are others in the server's process, and so are addresses."""
    (other,) = ranks.run("say_what_is_common", 1, tmp_path)
    assert len(other) == 4
    assert say_what_is_common(tmp_path) == other
    assert not any(" at 0x" in said for said in other)


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
    return refused.value.needed_bytes


@pytest.mark.parametrize("stage", [1, 2])
def test_weights_that_all_ranks_have_are_on_ssd_where_ram_has_no_room(stage: Stage) -> None:
    plan, unit = agreed(stage, least_host(stage)), 2 * 64 * 64
    assert plan.bytes["ssd"]["weight"] + plan.bytes["host"].get("weight", 0) == 8 * unit
    assert plan.bytes["ssd"]["weight"] > 0
    assert plan.bytes["host"]["serving"] == unit
    assert "serving" not in agreed(stage, host=1 << 20).bytes["host"]


def test_a_rank_whose_share_does_not_fit_stops_all() -> None:
    with pytest.raises(pagoda.BudgetError, match="Rank 0 cannot hold its share: 3 KiB short"):
        agreed(3, least_host(3), OtherRank("3 KiB short"))
