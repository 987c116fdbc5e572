"""Offloaded activations in a plan: in the account, among the ops, and moved by the simulator in time."""

from dataclasses import replace

import pytest
from pairwise import each_once

from pagoda.config.training import ActivationMode
from pagoda.errors import BudgetError
from pagoda.plan.activations import ActivationPlan, BlockSizes, Policy, StepSizes, Storages, window_of
from pagoda.plan.lanes import LaneName
from pagoda.plan.options import Options
from pagoda.plan.placement import ACTIVATIONS, VERSIONS
from pagoda.plan.planner import Plan, make_plan
from pagoda.plan.tiers import HOST, SSD, Budgets
from pagoda.plan.trace import Phase
from pagoda.plan.traffic import activations_at
from pagoda.simulate.hardware import Hardware, Link
from pagoda.simulate.simulation import simulate

from .strategies import GPU as FAST_GPU, LARGE, STATES, figure
from .test_planner import tower

MIB = 1 << 20
LAYERS = 6
GPU = replace(FAST_GPU, link=Link(figure(1e9), figure(1e9), figure(2e9)))


def sizes_of(inner: int, inputs: int = 0, layers: int = LAYERS) -> StepSizes:
    """Layers with so many storages of a MiB inside, and among their inputs."""
    page = 64 << 10
    parts = []
    for count in (inputs, inner):
        storages = Storages()
        for _ in range(count):
            storages = storages.with_one(MIB, page)
        parts.append(storages)
    return StepSizes((BlockSizes(parts[0], parts[0], parts[1]),) * layers, (0,) * (layers + 1))


def planned(
    mode: ActivationMode,
    sizes: StepSizes,
    budgets: Budgets | None = None,
    unit_limit: int | None = None,
    **options: object,
) -> Plan:
    asked = Options(page_bytes=4096, unit_limit=unit_limit, activations=mode, **options)
    saved = ActivationPlan((Policy(mode),) * LAYERS, sizes=sizes)
    return make_plan(tower(LAYERS, 256), STATES["bf16"], budgets or Budgets(LARGE, LARGE), asked, saved=saved)


def moved(plan: Plan, phase: Phase) -> dict[str, int]:
    """lane -> bytes that move in forwards, or in backwards."""
    lanes: dict[str, int] = {}
    for tick, moves in activations_at(plan).items():
        for lane, nbytes in moves if plan.trace.accesses[tick].phase is phase else ():
            lanes[lane] = lanes.get(lane, 0) + nbytes
    return lanes


@each_once(
    mode=["offload", "recompute+offload"],
    unit_limit=[None, 60_000, 200_000, LARGE],
    of=[(1, 0, 1), (4, 7, 2), (6, 50, 1)],
)
def test_every_byte_leaves_once_and_comes_back_once(
    mode: ActivationMode, unit_limit: int | None, of: tuple[int, int, int]
) -> None:
    """`of`: layers in a block, pages of room, passes."""
    inner, room, passes = of
    inputs = 2
    sizes = sizes_of(inner, inputs)
    roomy = planned(mode, sizes, Budgets(LARGE, LARGE, LARGE), unit_limit, gradient_accumulation_steps=passes)
    pages = sum(roomy.placement.lines[HOST].values()) * roomy.page_bytes
    budgets = Budgets(pages + room * MIB, LARGE, LARGE)
    plan = planned(mode, sizes, budgets, unit_limit, gradient_accumulation_steps=passes)
    away = LAYERS * MIB * (inputs if mode == "recompute+offload" else inner + inputs)
    host, ssd = plan.activations.peak.host, plan.activations.peak.ssd
    assert host + ssd == away
    assert host <= room * MIB
    assert ssd == 0 or host > room * MIB - MIB
    assert plan.peak_bytes[HOST] <= budgets.host
    out, back = moved(plan, Phase.FORWARD), moved(plan, Phase.BACKWARD)
    assert out == {lane: passes * n for lane, n in (("d2h", host), ("ssd_write", ssd)) if n}
    assert back == {lane: passes * n for lane, n in (("h2d", host), ("ssd_read", ssd)) if n}
    step = simulate(plan, GPU, [1e-3] * (len(plan.trace.accesses) - 1))
    spans = {verb: [span for span in step.spans if span.name == f"{verb} activation"] for verb in ("save", "return")}
    lanes = {lane: sum(span.nbytes for span in spans["save"] if span.lane == lane) for lane in out}
    assert lanes == out
    assert {span.lane for span in spans["return"]} <= {*back}
    window = passes * window_of(max(span.nbytes for span in spans["save"]))
    returned = sum(span.nbytes for span in spans["return"])
    assert passes * away - window <= returned <= passes * away, "what is on its way out is taken as it is"
    for span in spans["return"]:
        there = sum(saved.nbytes for saved in spans["save"] if saved.end_s <= span.start_s + 1e-9)
        gone = sum(other.nbytes for other in spans["return"] if other.start_s < span.start_s)
        assert gone + span.nbytes <= there, "nothing comes back before it has left"


def test_what_is_offloaded_is_in_the_account_and_must_fit() -> None:
    sizes = sizes_of(inner=4)
    kept, away = (planned(mode, sizes) for mode in ("keep", "offload"))
    assert ACTIVATIONS not in kept.bytes[HOST]
    spared = kept.bytes[HOST].get(VERSIONS, 0)
    assert away.bytes[HOST].items() ^ kept.bytes[HOST].items() == {(ACTIVATIONS, LAYERS * 4 * MIB), (VERSIONS, spared)}
    assert moved(kept, Phase.FORWARD) == {}
    tight = Budgets(kept.peak_bytes[HOST] - spared + 10 * MIB, LARGE)
    with pytest.raises(BudgetError, match=r"Offloaded activations do not fit: they take 24.00 MiB.*memory.host"):
        planned("offload", sizes, tight)
    with_ssd = planned("offload", sizes, replace(tight, ssd=LARGE))
    assert with_ssd.bytes[SSD][ACTIVATIONS] > 13 * MIB


@pytest.mark.parametrize("unit_limit", [60_000, 300_000])
def test_a_step_waits_for_what_a_slow_link_has_to_move(unit_limit: int) -> None:
    sizes = sizes_of(inner=8)
    plan = planned("offload", sizes, unit_limit=unit_limit)
    ticks = [2e-3] * (len(plan.trace.accesses) - 1)
    nbytes = LAYERS * 8 * MIB

    def with_link(rate: float) -> Hardware:
        return replace(GPU, link=Link(figure(rate), figure(rate), figure(2 * rate)))

    fast, slow = (simulate(plan, with_link(rate), ticks) for rate in (1e12, 1e9))
    without = simulate(planned("keep", sizes, unit_limit=unit_limit), with_link(1e12), ticks)
    assert fast.step_s == pytest.approx(without.step_s, rel=0.01)
    assert slow.step_s >= nbytes / 1e9 * 2 * 0.9
    assert slow.stall_s["h2d"] + slow.stall_s["d2h"] > 0
    assert slow.step_s <= sum(ticks) + 2 * nbytes / 1e9 + plan.parameters * 30 / 1e9
    assert slow.busy_s[LaneName.COMPUTE] == pytest.approx(sum(ticks), rel=0.01)
