"""With the durations of a step that was recorded, the simulated step takes as long as that one."""

from dataclasses import replace

import pytest
from pairwise import each_once

from live_durations import replay
from pagoda.plan.lanes import LaneName
from pagoda.plan.options import Options
from pagoda.plan.planner import Plan, make_plan
from pagoda.plan.tiers import Budgets
from pagoda.plan.trace import STEP, Access, Phase, Trace
from pagoda.simulate.hardware import Drive
from pagoda.simulate.simulation import simulate
from pagoda.simulate.timeline import Timeline, TimelineSpan
from tests.plan.strategies import FAST, LARGE, STATES, figure
from tests.plan.test_planner import tower

CPU = replace(
    FAST.cpu,
    cores=8,
    memory_bytes_per_s=figure(1e11),
    update_params_per_s=figure(1e9),
    copy_bytes_per_s=figure(1e10),
    gradient_bytes_per_s=figure(1e10),
)
MACHINE = replace(FAST, cpu=CPU, ssd=Drive(figure(1e13), figure(3e9), figure(2e9), figure(4e9), figure(1e15)))
BUDGETS = {"ram": Budgets(LARGE), "ssd": Budgets(3 << 20, ssd=LARGE), "arena": Budgets(LARGE, 1 << 20)}


def plan_of(budgets: str, clipping: bool) -> Plan:
    options = Options(
        page_bytes=4096, unit_limit=1 << 17, gradient_accumulation_steps=1, clipping=clipping, speculate=False
    )
    return make_plan(tower(8, 256), STATES["bf16"], BUDGETS[budgets], options)


@each_once(budgets=[*BUDGETS], tick_s=[1e-5, 1e-3], clipping=[True, False])
def test_a_step_with_its_own_durations_takes_as_long_as_it_did(budgets: str, tick_s: float, clipping: bool) -> None:
    plan = plan_of(budgets, clipping)
    recorded = simulate(plan, MACHINE, [tick_s] * (len(plan.trace.accesses) - 1))
    assert replay(plan, recorded).step_s == pytest.approx(recorded.step_s, rel=0.03)


def test_compute_takes_as_long_as_it_was_recorded_with_its_waits_left_out_and_in_step_too() -> None:
    plan = plan_of("ram", clipping=True)
    plan = plan.retraced(Trace((Access(0, Phase.FORWARD), Access(0, Phase.BACKWARD), STEP)))
    name = plan.units[0].name
    compute = ((f"forward {name}", 0, 1), (f"forward {name}", 2, 3), (f"backward {name}", 3, 6), ("step", 6, 7))
    recorded = Timeline(
        7.0, tuple(TimelineSpan(LaneName.COMPUTE, what, start, end) for what, start, end in compute), {}
    )
    assert replay(plan, recorded).step_s == pytest.approx(6.0)
    with pytest.raises(ValueError, match="other accesses"):
        replay(plan, replace(recorded, spans=recorded.spans[2:]))


def test_threads_that_work_at_once_make_a_lane_faster() -> None:
    plan = plan_of("ram", clipping=True)
    plan = plan.retraced(Trace((Access(0, Phase.FORWARD), Access(0, Phase.BACKWARD), STEP)))
    name = plan.units[0].name
    compute = (
        TimelineSpan(LaneName.COMPUTE, f"forward {name}", 0.0, 1.0),
        TimelineSpan(LaneName.COMPUTE, f"backward {name}", 1.0, 2.0),
    )
    sent = plan.layout.elements(plan.units[0], "grad") * plan.layout.offloaded_itemsize(plan.units[0])
    copies = [TimelineSpan("d2h", f"offload {name}", 2.0, 4.0, sent // 2) for _ in range(2)]
    assert replay(plan, Timeline(4.0, (*compute, *copies), {})).step_s == pytest.approx(4.0)
