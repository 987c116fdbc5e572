"""Embeddings that the CPU looks up, in the plan and in its simulated step."""

from dataclasses import replace

import pytest

from pagoda.errors import BudgetError, ConfigError
from pagoda.plan.exchanges import of_rows
from pagoda.plan.layout import GRAD
from pagoda.plan.options import Options
from pagoda.plan.planner import Plan, make_plan
from pagoda.plan.ranks import Ranks
from pagoda.plan.tiers import Budgets
from pagoda.plan.units import ModuleSpec, ParamSpec
from pagoda.simulate.simulation import simulate

from .strategies import GPU, LARGE, STATES

ROWS, WIDTH = 1 << 19, 64
SENT = 1 << 20


def table(lookup: str | None = "") -> ModuleSpec:
    layers = tuple(ModuleSpec(f"layers.{i}", (ParamSpec(f"layers.{i}.weight", (256, WIDTH)),)) for i in range(4))
    embedding = ModuleSpec("embed", (ParamSpec("embed.weight", (ROWS, WIDTH)),), lookup=lookup)
    return ModuleSpec("", (), (embedding, ModuleSpec("layers", (), layers)))


def plan_of(root: ModuleSpec, device: int, limit: int | None = None, ranks: int = 1) -> Plan:
    options = Options(4096, 1 << 16, embedding_limit=limit)
    shared = Ranks(ranks, ranks)
    return make_plan(root, STATES["bf16"], Budgets(LARGE, device), options, shared, of_rows({"embed": SENT}))


def test_rows_move_in_place_of_weights_and_gradients() -> None:
    leased, looked_up = plan_of(table(), LARGE), plan_of(table(), 1 << 20)
    assert [unit.on_host for plan in (leased, looked_up) for unit in plan.units] == [False] * 5 + [True] + [False] * 4
    assert leased.exchanges == ()
    hardware = replace(GPU, gpus_per_node=1)
    spans = simulate(looked_up, hardware, [1e-3] * (len(looked_up.trace.accesses) - 1)).spans
    moved = {span.name: (span.lane, span.nbytes) for span in spans if "embed" in span.name}
    there = next(span for span in spans if span.name == "rows embed" and span.lane == "h2d")
    back = next(span for span in spans if span.name == "rows embed" and span.lane == "d2h")
    assert (there.nbytes, back.nbytes) == (SENT, SENT)
    assert there.end_s - there.start_s == pytest.approx(SENT / hardware.link.h2d_bytes_per_s.value, rel=0.01)
    assert "fetch embed" not in moved
    assert moved["offload embed"] == ("d2h", 0)
    assert looked_up.gradients_in_flight_bytes < 2 * ROWS * WIDTH
    assert (looked_up.placement.home(0, "weight"), looked_up.placement.home(0, GRAD)) == ("host", "host")


def test_only_what_is_larger_than_all_else_and_can_be_looked_up_makes_room() -> None:
    for root, ranks in ((table(None), 1), (table("it is tied"), 1), (table(), 2)):
        with pytest.raises(BudgetError):
            plan_of(root, 1 << 20, ranks=ranks)
    head = ModuleSpec("head", (ParamSpec("head.weight", (ROWS, WIDTH)),))
    with pytest.raises(BudgetError):
        plan_of(replace(table(), children=(*table().children, head)), 1 << 20)


def test_with_a_limit_no_smaller_embedding_makes_room() -> None:
    with pytest.raises(BudgetError):
        plan_of(table(), 1 << 20, limit=2 * ROWS * WIDTH)


def test_ram_without_room_for_what_is_looked_up_there_names_the_limit() -> None:
    options = Options(4096, 1 << 16, embedding_limit=1 << 20)
    with pytest.raises(BudgetError, match=r"raise memory\.embedding_limit\.$") as refused:
        make_plan(table(), STATES["bf16"], Budgets(1 << 25, LARGE, LARGE), options)
    needed = refused.value.needed_bytes
    assert needed > 2 * ROWS * WIDTH
    assert make_plan(table(), STATES["bf16"], Budgets(needed, LARGE, LARGE), options).units[0].on_host


def test_a_limit_that_cannot_be_kept_is_refused() -> None:
    assert plan_of(table(), LARGE, limit=2 * ROWS * WIDTH - 1).units[0].on_host
    assert not plan_of(table(), LARGE, limit=2 * ROWS * WIDTH).units[0].on_host
    with pytest.raises(ConfigError, match="it is tied"):
        plan_of(table("it is tied"), LARGE, limit=1 << 10)
    with pytest.raises(ConfigError, match="one rank"):
        plan_of(table(), LARGE, limit=1 << 10, ranks=2)
