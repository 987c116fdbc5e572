"""The simulator moves every byte of a plan, at no more than the rates there are, within the budgets."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from pairwise import each_once
from torch.utils.flop_counter import FlopCounterMode

import pagoda
from pagoda.errors import BudgetError, ConfigError
from pagoda.forecast.compute import Compute
from pagoda.forecast.describe import forward_flops, module_spec
from pagoda.models.papers import PAPER_SHAPES
from pagoda.plan.buffers import LEAST_RING_SLOTS
from pagoda.plan.collective import reduce_buffers
from pagoda.plan.lanes import LANES, LaneName
from pagoda.plan.layout import GRAD, WEIGHT
from pagoda.plan.options import Options, Split
from pagoda.plan.placement import VERSIONS
from pagoda.plan.planner import Plan, make_plan
from pagoda.plan.ranks import Ranks
from pagoda.plan.tiers import HOST, SSD, Budgets
from pagoda.plan.trace import gradients_of
from pagoda.plan.traffic import traffic_of
from pagoda.plan.units import ModuleSpec, ParamSpec
from pagoda.schedule.served import Found, hit_rate
from pagoda.simulate.clock import SimulatedLanes, Task, Work
from pagoda.simulate.hardware import DeviceSpeeds, Hardware, Link
from pagoda.simulate.rates import Rates
from pagoda.simulate.simulation import Simulation, simulate
from pagoda.simulate.timeline import Timeline
from tests.plan.strategies import FAST, GPU, LARGE, STATES, Draw, drained, figure, hardware, plans
from tests.plan.test_planner import tower
from update_work import RULES as UPDATED

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

Case = tuple[Plan, Hardware, list[float], Timeline]
"""Plan, machine, seconds of compute of each access, and the step that comes of them."""


@st.composite
def simulated(draw: Draw) -> Case:
    """Any plan on any machine."""
    machine = draw(hardware())
    plan = draw(plans(separate=machine.device is not None or draw(st.booleans()), shares=True))
    ticks = len(plan.trace.accesses) - 1
    busy = draw(st.floats(0.0, 1e-2))
    shares = draw(st.lists(st.floats(0.0, 1.0), min_size=ticks, max_size=ticks))
    times = [busy * share for share in shares]
    return plan, machine, times, simulate(plan, machine, times)


def trained(plan: Plan) -> frozenset[int]:
    return frozenset(unit.index for unit in plan.units if unit.trainable_numel)


def least_bytes(plan: Plan) -> dict[str, int]:
    """lane -> bytes that no step goes without. Gradients may be in their buffers still, and need not be read then."""
    lanes: dict[str, int] = {}

    def add(lane: str, nbytes: int) -> None:
        lanes[lane] = lanes.get(lane, 0) + nbytes

    traffic, placement = traffic_of(plan), plan.placement
    for unit in trained(plan) & {access.unit for access in plan.trace.accesses}:
        on_ssd = placement.home(unit, WEIGHT) == SSD
        if traffic[unit].fetched and plan.budgets.device is not None:  # its update ends a lease
            add("h2d", traffic[unit].fetched)
        if traffic[unit].fetched and on_ssd:
            add(LaneName.SSD_READ, traffic[unit].fetched)
        add(LaneName.SSD_READ, traffic[unit].streamed)
        add(LaneName.SSD_WRITE, traffic[unit].streamed)
        add("h2d", traffic[unit].passed + traffic[unit].brought)
        add("d2h", traffic[unit].passed)
    for gradient in gradients_of(plan.trace, trained(plan)):
        add("d2h", traffic[gradient.unit].offloaded)
    return lanes


@given(data=st.data(), machine=hardware(), steps=st.integers(1, 4))
def test_every_operation_moves_its_bytes_as_often_as_a_step_has_it(
    data: st.DataObject, machine: Hardware, steps: int
) -> None:
    plan = data.draw(plans(separate=machine.device is not None or data.draw(st.booleans()), shares=True))
    ticks = [data.draw(st.floats(0.0, 1e-2)) / len(plan.trace.accesses)] * (len(plan.trace.accesses) - 1)
    simulation = Simulation(plan, Rates(machine), ticks)
    for _ in range(steps):
        simulation.step()
    moved: dict[str, int] = {}
    for span in drained(simulation):
        moved[span.name] = moved.get(span.name, 0) + span.nbytes
    made = Counter(gradient.unit for gradient in gradients_of(plan.trace, trained(plan)))
    uses = Counter(access.unit for access in plan.trace.accesses)
    names: set[str] = set()

    def of(verb: str, unit: int) -> int:
        name = f"{verb} {plan.units[unit].name}"
        names.add(name)
        return moved.get(name, 0)

    for unit, traffic in enumerate(traffic_of(plan)):
        used = steps * (unit in made)
        assert of("offload", unit) == steps * made[unit] * traffic.offloaded
        assert of("update", unit) == used * traffic.touched
        assert of("write", unit) == used * (traffic.streamed + traffic.passed)
        came = traffic.streamed + traffic.passed + traffic.brought
        assert used * came <= of("read", unit) <= used * came + traffic.streamed, "one may be read ahead"
        lanes = 2 if plan.budgets.device is not None and plan.placement.home(unit, WEIGHT) == SSD else 1
        fetches, rest = divmod(of("fetch", unit), lanes * traffic.fetched) if traffic.fetched else (0, 0)
        assert not rest
        assert fetches <= steps * uses[unit] + 1
        if traffic.fetched and uses[unit]:
            assert fetches >= (used or 1)
        spilled = traffic.buffer if plan.placement.home(unit, GRAD) == SSD else 0
        if not plan.options.update_during_backward:
            assert of("spill", unit) == steps * made[unit] * spilled
        assert of("gradient", unit) <= of("spill", unit) <= steps * made[unit] * spilled
    assert {name for name in moved if name.split()[0] not in ("forward", "backward")} <= names


@pytest.mark.parametrize("figure_name", ["task_switch_s", "parameter_s"])
@settings(max_examples=10)
@given(plan=plans(separate=False, shares=True))
def test_compute_pays_for_work_that_it_hands_over_and_for_each_parameter(figure_name: str, plan: Plan) -> None:
    paying = replace(FAST, cpu=replace(FAST.cpu, **{figure_name: figure(1e-3)}))
    times = [1e-3] * (len(plan.trace.accesses) - 1)
    more = simulate(plan, paying, times).step_s - simulate(plan, FAST, times).step_s
    updates = sum(bool(unit.trainable_numel) for unit in plan.units)
    parameters = sum(slot.param.trainable for unit in plan.units for slot in unit.slots)
    assert more >= {"task_switch_s": updates, "parameter_s": parameters}[figure_name] * 1e-3 * 0.99


@pytest.mark.parametrize("figure_name", ["task_switch_s", "parameter_s"])
def test_python_delays_a_gpu_only_if_it_takes_longer_than_compute(figure_name: str) -> None:
    paying = replace(GPU, cpu=replace(GPU.cpu, **{figure_name: figure(1e-3)}))
    plan = make_plan(tower(8, 256), STATES["bf16"], Budgets(LARGE, LARGE), Options(gradient_accumulation_steps=1))
    ticks = len(plan.trace.accesses) - 1
    parameters = sum(slot.param.trainable for unit in plan.units for slot in unit.slots)
    least = {"task_switch_s": len(plan.units), "parameter_s": parameters}[figure_name] * 1e-3
    short, long = ([seconds] * ticks for seconds in (1e-6, 1.0))
    assert simulate(plan, paying, short).step_s >= least > 10 * simulate(plan, GPU, short).step_s
    assert simulate(plan, paying, long).step_s == pytest.approx(simulate(plan, GPU, long).step_s, rel=0.01)


def test_a_gpu_waits_for_python_to_queue_each_block_of_an_update_and_one_block_is_all_of_a_unit_at_home() -> None:
    paying = replace(GPU, cpu=replace(GPU.cpu, task_switch_s=figure(1e-3)))
    for home, update in ((1.0, 0.0), (0.0, 1.0)):
        split = Split(device_home_share=home, device_update_share=update)
        plan = make_plan(tower(8, 256), STATES["bf16"], Budgets(LARGE, LARGE), Options(page_bytes=4096, split=split))
        units = [plan.units[index] for index in plan.placement.on_device]
        streamed = sum(-(-unit.trainable_numel // plan.layout.block_elements) for unit in units)
        blocks = len(units) if home else streamed
        assert streamed >= 2 * len(units) > 10
        spans = [span for span in step_of(plan, paying).spans if span.lane == LaneName.DEVICE_UPDATE]
        assert sum(span.end_s - span.start_s for span in spans) == pytest.approx(blocks * 1e-3, rel=0.01)


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_gradients_that_are_added_take_the_time_in_which_ram_and_threads_read_and_write_them(passes: int) -> None:
    link = Link(*[figure(1e6)] * 3)
    slow = replace(GPU, link=link, cpu=replace(GPU.cpu, memory_bytes_per_s=figure(1e6)))
    threads = replace(GPU, link=link, cpu=replace(GPU.cpu, cores=4, gradient_bytes_per_s=figure(1e6 / 8)))
    options = Options(gradient_accumulation_steps=passes, clipping=True)
    plan = make_plan(tower(4, 64), STATES["bf16"], Budgets(LARGE, LARGE), options)
    added = (passes - 1) * sum(traffic.offloaded for traffic in traffic_of(plan))
    for machine in (slow, threads):
        spans = [span for span in step_of(plan, machine).spans if span.kind == "offload"]
        adding = sorted(span.end_s - span.start_s for span in spans)[len(plan.units) :]
        assert sum(adding) == pytest.approx(3 * added / 1e6, rel=0.2)
        assert bool(adding) == (passes > 1)


def test_a_rule_that_does_more_for_an_element_updates_as_much_longer() -> None:
    seconds = {}
    for rule in (pagoda.AdamW(), pagoda.AdamW(moments="8bit"), pagoda.Adafactor()):
        plan = make_plan(tower(4, 64), rule.states("bf16"), Budgets(LARGE), Options())
        spans = simulate(plan, FAST, [0.0] * (len(plan.trace.accesses) - 1), rule.work).spans
        seconds[rule.name, rule.element_work] = sum(
            span.end_s - span.start_s for span in spans if span.lane == LaneName.UPDATE
        )
    for (_, work), updating in seconds.items():
        assert updating == pytest.approx(work * seconds["AdamW", 1.0], rel=1e-6)


def test_the_work_that_forecasts_assume_of_each_rule_is_the_measured_one() -> None:
    rows = json.loads((BENCHMARKS / "results" / "update_work.json").read_text())["figures"]
    measured = {row["optimizer"]: row["relative"] for row in rows}
    assert measured.keys() == UPDATED.keys()
    for name, rule in UPDATED.items():
        assert rule.element_work == pytest.approx(measured[name], rel=0.15), name


def test_muon_multiplies_matrices_and_updates_the_rest_as_adamw() -> None:
    rule, layer = pagoda.Muon(ns_steps=5), ("layer.weight", (64, 16))
    elements, flops = rule.work(*layer)
    assert (elements, flops) == (rule.work("layer.weight", (16, 64)))
    with FlopCounterMode(display=False) as counted:
        rule.update(2, *(torch.ones(layer[1]) for _ in range(2)), {"momentum_buffer": torch.ones(layer[1])})
    assert flops == counted.get_total_flops()
    assert rule.work("layer.bias", (64,)) == rule.work("embed.weight", (8, 8)) == (64, 0)
    unit = make_plan(ModuleSpec("layer", (ParamSpec(*layer),)), STATES["bf16"], Budgets(LARGE), Options()).units[0]
    slow = replace(FAST, cpu=replace(FAST.cpu, bf16=None, cores=1, update_params_per_s=figure(1e30)))
    assert Rates(slow, work=rule.work).update_seconds(unit, 1024) == pytest.approx(flops / 50e9)


@given(simulated())
def test_a_step_fits_its_budgets_and_takes_no_less_than_compute_and_than_the_bytes_of_each_lane(case: Case) -> None:
    plan, machine, ticks, timeline = case
    assert set(timeline.held_bytes) == set(plan.peak_bytes)
    for tier, account in timeline.held_bytes.items():
        budget = getattr(plan.budgets, tier)
        assert all(nbytes <= plan.peak_bytes[tier] <= budget for _, nbytes in account)
    rates = Rates(machine)
    on_device = plan.placement.on_device
    least = {
        LaneName.COMPUTE: sum(ticks),
        LaneName.UPDATE: sum(
            rates.update_seconds(u, u.trainable_numel) for u in plan.units if u.index not in on_device
        ),
        LaneName.DEVICE_UPDATE: sum(
            rates.device_update_seconds(plan.units[u], plan.units[u].trainable_numel, 0) for u in on_device
        ),
    }
    for lane, nbytes in least_bytes(plan).items():
        least[lane] = rates.seconds(lane, nbytes)
    assert timeline.step_s >= max(least.values()) * (1 - 1e-6)
    # Lanes do one thing at a time, and stalls are part of the step.
    last: dict[str, float] = {}
    for span in timeline.spans:
        assert span.start_s >= last.get(span.lane, -timeline.step_s * 10) - 1e-9
        last[span.lane] = span.end_s
    busy = timeline.busy_s.get(LaneName.COMPUTE, 0.0)
    assert busy + sum(timeline.stall_s.values()) == pytest.approx(timeline.step_s)
    assert busy >= sum(ticks) * (1 - 1e-6) - 1e-9
    # Compute waits for weights only where it does not find them.
    assert len(timeline.accesses) == len(ticks)
    assert all(served.waited_s == 0 for served in timeline.accesses if served.found is Found.HIT)
    assert sum(served.waited_s for served in timeline.accesses) <= sum(timeline.stall_s.values()) + 1e-9
    homes = {plan.source(unit.index) for unit in plan.units}
    assert timeline.access_counts.keys() <= homes


def test_weights_that_lanes_cannot_bring_in_time_are_late_and_all_but_the_first_are_there_if_compute_is_slow() -> None:
    options = Options(page_bytes=4096, unit_limit=1 << 20, split=Split())
    plan = make_plan(tower(8, 256), STATES["bf16"], Budgets(LARGE, 4 << 20), options)
    ticks = len(plan.trace.accesses) - 1
    assert len(plan.leased_pages()) == len(plan.units) == ticks / 2, "backward finds the weights of forward"

    def counts(compute_s: float) -> Mapping[str, float]:
        counted = simulate(plan, GPU, [compute_s] * ticks).access_counts
        assert counted.keys() == {HOST}
        return counted[HOST]

    quick, slow = counts(0.0), counts(1.0)
    assert (quick["hit"], quick["late"] + quick["fault"]) == (ticks / 2, ticks / 2)
    assert quick["late_s"] + quick["fault_s"] > 0
    assert (slow["hit"], slow["late"], slow["fault"]) == (ticks - 1, 1, 0)


def test_two_directions_of_an_ssd_share_what_it_moves_in_both() -> None:
    drive = replace(FAST.ssd, both_bytes_per_s=figure(1.2e10))
    shares = Rates(replace(FAST, ssd=drive)).shared(frozenset({LaneName.SSD_READ, LaneName.SSD_WRITE}))
    assert (shares[LaneName.SSD_READ] + shares[LaneName.SSD_WRITE]) * 1e10 == pytest.approx(1.2e10)


@pytest.mark.parametrize(
    "lanes", [{LaneName.SSD_READ}, {LaneName.SSD_WRITE}, {LaneName.SSD_READ, LaneName.SSD_WRITE}], ids=sorted
)
def test_a_byte_costs_compute_as_much_in_one_direction_as_in_both(lanes: set[str]) -> None:
    own = {LaneName.SSD_READ: 9e9, LaneName.SSD_WRITE: 6e9}
    drive = replace(
        FAST.ssd,
        read_bytes_per_s=figure(own[LaneName.SSD_READ]),
        write_bytes_per_s=figure(own[LaneName.SSD_WRITE]),
        both_bytes_per_s=figure(8e9),
        beside_bytes_per_s=figure(4e9),
        cpu_share=figure(0.4),
    )
    shares = Rates(replace(FAST, ssd=drive)).shared(frozenset({LaneName.COMPUTE, *lanes}))
    moved = sum(shares[lane] * own[lane] for lane in lanes)
    assert 1 - shares[LaneName.COMPUTE] == pytest.approx(moved * 0.4 / 4e9)


def test_compute_alone_takes_as_long_as_it_takes() -> None:
    plan = make_plan(tower(4, 64), STATES["bf16"], Budgets(LARGE), Options(gradient_accumulation_steps=1))
    ticks = [1.0] * (len(plan.trace.accesses) - 1)
    assert simulate(plan, FAST, ticks).step_s == pytest.approx(sum(ticks), rel=1e-3)


def test_times_that_do_not_belong_to_the_trace_are_refused() -> None:
    plan = make_plan(tower(2, 64), STATES["bf16"], Budgets(LARGE), Options())
    with pytest.raises(ValueError, match="1 times of compute for a trace of"):
        simulate(plan, FAST, [1.0])


# --- what the scheduler decides -----------------------------------------------------------------------------


def step_of(plan: Plan, machine: Hardware) -> Timeline:
    return simulate(plan, machine, [1e-3] * (len(plan.trace.accesses) - 1))


@pytest.mark.parametrize(
    ("steps", "clipping", "during_backward"),
    [(None, False, False), (1, False, True), (4, False, True), (4, True, False)],
)
def test_updates_run_during_backward_only_when_passes_are_announced_and_nothing_clips(
    steps: int | None, clipping: bool, during_backward: bool
) -> None:
    options = Options(gradient_accumulation_steps=steps, clipping=clipping, speculate=False)
    plan = make_plan(tower(4, 256), STATES["bf16"], Budgets(LARGE), options)
    step = step_of(plan, FAST)
    backward = max(span.start_s for span in step.spans if span.name.startswith("forward"))
    during = [span for span in step.spans if span.lane == LaneName.UPDATE and span.start_s > backward]
    assert bool(during) is during_backward


@pytest.mark.parametrize("trained", [7, 2, 1])
def test_a_device_with_room_for_all_weights_fetches_the_trained_ones_once_a_step_and_keeps_the_others(
    trained: int,
) -> None:
    pages = {0: 5, **dict.fromkeys(range(1, 7), 2)}  # an embedding and six layers
    params = [ParamSpec(f"m{i}.w", (n * 2048,), trainable=i >= 7 - trained) for i, n in pages.items()]
    root = ModuleSpec("", (), tuple(ModuleSpec(f"m{i}", (param,)) for i, param in enumerate(params)))
    options = Options(page_bytes=4096, unit_limit=4096, split=Split())
    plan = make_plan(root, STATES["bf16"], Budgets(LARGE, LARGE), options)
    assert plan.leased_pages() == pages
    fetched = [span.name for span in step_of(plan, GPU).spans if span.name.startswith("fetch")]
    assert sorted(fetched) == sorted(f"fetch {unit.name}" for unit in plan.units if unit.trainable_numel)


# --- asynchronous updates ------------------------------------------------------------------------------------


def streaming(asynchronous: bool, passes: float) -> tuple[float, float, float]:
    """Seconds of compute, of one pass over moments on SSD, and of a step in which that takes `passes` times compute."""
    options = Options(page_bytes=4096, clipping=True, asynchronous=asynchronous)
    layout = make_plan(tower(12, 256), STATES["bf16"], Budgets(LARGE), options).layout
    pages = (layout.total_pages(WEIGHT) + layout.total_pages(GRAD)) * (1 + asynchronous)
    ring = LEAST_RING_SLOTS * sum(layout.block_pages(state.name) for state in layout.moments)
    budget = (pages + ring + layout.piece_pages) * layout.page_bytes
    plan = make_plan(tower(12, 256), STATES["bf16"], Budgets(budget, ssd=LARGE), options)
    assert all(plan.placement.home(unit.index, WEIGHT) == HOST for unit in plan.units)
    moved = sum(2 * traffic.streamed for traffic in traffic_of(plan))
    assert moved > 0
    sweep = moved / 1e10
    ticks = len(plan.trace.accesses) - 1
    timeline = simulate(plan, FAST, [sweep / passes / ticks] * ticks)
    return sweep / passes, sweep, timeline.step_s


@each_once(asynchronous=[False, True], passes=[1.9, 6.0, 0.5])
def test_asynchronous_updates_take_their_pass_over_the_drive_beside_compute(asynchronous: bool, passes: float) -> None:
    compute, sweep, step_s = streaming(asynchronous, passes)
    if asynchronous:
        assert 0.9 * max(compute, sweep) <= step_s <= 1.1 * max(compute, sweep)
    else:
        assert 0.9 * sweep <= step_s <= 1.1 * (compute + sweep)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_on_ranks_too_updates_take_their_pass_beside_compute(stage: Literal[1, 2, 3]) -> None:
    """Each rank streams its slice."""
    machine, ranks = replace(FAST, gpus_per_node=2, intra_node_bytes_per_s=figure(1e13)), Ranks(2, 2, stage)

    def step_s(asynchronous: bool) -> tuple[float, float]:
        options = Options(page_bytes=4096, clipping=True, asynchronous=asynchronous)
        budgets = Budgets(4096, ssd=LARGE)
        while True:
            try:
                plan = make_plan(tower(12, 256), STATES["bf16"], budgets, options, ranks)
                break
            except BudgetError as error:
                budgets = replace(budgets, host=error.needed_bytes or 0)
        sweep = sum(2 * traffic.streamed for traffic in traffic_of(plan)) / 1e10
        assert sweep > 0
        ticks = len(plan.trace.accesses) - 1
        return simulate(plan, machine, [sweep / ticks] * ticks).step_s, sweep

    at_step, sweep = step_s(False)
    late, sweep_late = step_s(True)
    assert at_step >= 1.4 * sweep
    assert 0.9 * sweep_late <= late < at_step


def test_a_plan_with_ssd_needs_a_machine_whose_drive_is_known() -> None:
    root, options = tower(8, 256), Options(page_bytes=4096)
    plan = make_plan(root, STATES["bf16"], Budgets(6 << 20, ssd=LARGE), options)
    with pytest.raises(ConfigError, match="no figures of one"):
        simulate(plan, replace(FAST, ssd=None), [0.0] * (len(plan.trace.accesses) - 1))


def test_states_in_ram_are_updated_early_where_the_next_forward_is_too_short_for_it() -> None:
    """Beside a GPU the CPU has backward for updates, and clipping then costs next to nothing."""
    root = tower(8, 256)
    params = sum(param.numel for param in root.walk())
    leaves = [matrix.name for layer in root.children for matrix in layer.children]
    compute = Compute(dict.fromkeys(leaves, 0.1 / len(leaves)), dict.fromkeys(leaves, 0.3 / len(leaves)))
    cpu = replace(FAST.cpu, update_params_per_s=figure(params / 0.18))
    link = Link(*(figure(40.0 * params) for _ in range(3)))
    device = GPU.device

    def planned(device: DeviceSpeeds | None, **settings: Any) -> tuple[Plan, float]:
        machine = Hardware("test", cpu, device=device, link=link if device else None)
        budgets = Budgets(64 * params, 3 * params if device else None)
        options = Options(page_bytes=4096, gradient_accumulation_steps=1, **settings)
        plan = make_plan(root, STATES["bf16"], budgets, options)
        return plan, simulate(plan, machine, compute.of_step(root, plan)).step_s

    plan, clipped = planned(device, clipping=True)
    assert plan.placement.speculated == {unit.index for unit in plan.units}
    assert plan.placement.pages(HOST, VERSIONS) == sum(
        plan.placement.pages(HOST, state.name) for state in STATES["bf16"]
    )
    assert clipped < 1.05 * planned(device)[1]
    assert planned(device, clipping=True, speculate=False)[1] > 1.1 * clipped
    assert not planned(None, clipping=True)[0].placement.speculated


@pytest.mark.parametrize(("layers", "slabs"), [(24, 7.26), pytest.param(40, 6.25, marks=pytest.mark.slow)])
def test_steps_settle_and_small_units_leave_frames_for_the_prefetch_of_large_ones(layers: int, slabs: float) -> None:
    """Norms are units of a page or so, of which many lie in one slab. Gathers take as long as compute: a forward that
    does not fetch ahead takes twice as long."""
    shape = replace(PAPER_SHAPES["gpt3-175b"], layers=layers, hidden=512, heads=8, ffn=2048, vocab=2100, seq_len=64)
    root, ranks = module_spec(shape), Ranks(4, 4)
    options = Options(
        page_bytes=4096, unit_limit=1 << 17, gradient_accumulation_steps=1, clipping=True, speculate=False
    )

    def planned(device: int) -> Plan:
        return make_plan(root, STATES["bf16"], Budgets(LARGE, device), options, ranks)

    roomy = planned(LARGE)
    frames = slabs * max(roomy.leased_pages().values()) + reduce_buffers(roomy.layout).pages
    plan = planned(int(frames * 4096))
    machine = replace(
        GPU,
        gpus_per_node=4,
        link=Link(figure(1e13), figure(1e13), figure(1e13)),
        intra_node_bytes_per_s=figure(1e11),
    )
    rates = Rates(machine, ranks)
    gathers = sum(rates.ring_seconds(traffic.gathered, 4) for traffic in traffic_of(plan))
    flops = forward_flops(shape, 64, 64)
    compute = Compute.from_flops(flops, sum(flops.values()) / gathers)
    ticks = compute.of_step(root, plan)
    simulation = Simulation(plan, rates, ticks)
    for _ in range(6):
        simulation.step()
    first = f"forward {plan.units[0].name}"
    begins = [span.start_s for span in drained(simulation) if span.name == first][::2]  # the head uses it too
    seconds = [end - begin for begin, end in pairwise(begins)]
    assert seconds[1:] == pytest.approx([seconds[-1]] * (len(seconds) - 1), rel=1e-9)
    assert seconds[-1] <= 1.03 * compute.step_s
    assert simulate(plan, machine, ticks).step_s == pytest.approx(seconds[-1], rel=1e-9)


@each_once(budget=[LARGE, 6 << 20], passes=[7, 15, 24])
def test_a_step_of_many_micro_batches_is_one_of_few_in_which_some_come_again(passes: int, budget: int) -> None:
    options = Options(page_bytes=4096, gradient_accumulation_steps=passes, clipping=True)
    plan = make_plan(tower(12, 256), STATES["bf16"], Budgets(budget, ssd=LARGE), options)
    ticks = [1e-4 * (1 + tick % 3) for tick in range((len(plan.trace.accesses) - 1) // passes)] * passes
    few, all_of_them = simulate(plan, FAST, ticks), Simulation(plan, Rates(FAST), ticks).run()
    assert few.step_s == pytest.approx(all_of_them.step_s, rel=0.01)
    assert few.pass_s == pytest.approx(all_of_them.pass_s, rel=0.02)
    assert sum(few.stall_s.values()) == pytest.approx(few.step_s - few.busy_s[LaneName.COMPUTE])
    assert few.bytes_moved.keys() == all_of_them.bytes_moved.keys()
    assert len(few.accesses) == len(all_of_them.accesses)
    assert hit_rate(few.access_counts) == pytest.approx(hit_rate(all_of_them.access_counts), abs=0.02)
    for lane, nbytes in all_of_them.bytes_moved.items():
        assert few.bytes_moved[lane] == pytest.approx(nbytes, rel=0.02)
        assert few.busy_s[lane] == pytest.approx(all_of_them.busy_s[lane], rel=0.02)
    ends = [max(span.end_s for span in made.spans if span.lane == LaneName.COMPUTE) for made in (few, all_of_them)]
    assert few.step_s - ends[0] == pytest.approx(all_of_them.step_s - ends[1], rel=1e-3, abs=1e-9)
    for tier, account in few.held_bytes.items():
        assert all(nbytes <= plan.peak_bytes[tier] for _, nbytes in account)


class _Slowed(SimulatedLanes):
    """Lanes of which one takes `factor` times as long."""

    slow: str
    factor: float

    def submit(self, work: Work, after: Iterable[Task] = ()) -> Task:
        if work.lane == self.slow:
            work = replace(work, seconds=work.seconds * self.factor, python_s=0.0)
        return super().submit(work, after)


@given(
    data=st.data(), machine=st.sampled_from([FAST, GPU]) | hardware(), slow=st.sampled_from((LaneName.COMPUTE, *LANES))
)
def test_a_lane_that_is_slower_than_all_others_together_binds(
    data: st.DataObject, machine: Hardware, slow: str
) -> None:
    plan = data.draw(plans(separate=machine.device is not None, shares=True))
    ticks = [data.draw(st.floats(1e-3, 1e-2)) / len(plan.trace.accesses)] * (len(plan.trace.accesses) - 1)
    busy = simulate(plan, machine, ticks).busy_s
    assume(busy.get(slow))
    _Slowed.slow, _Slowed.factor = slow, 30 * sum(busy.values()) / busy[slow]
    with patch("pagoda.simulate.simulation.SimulatedLanes", _Slowed):
        timeline = simulate(plan, machine, ticks)
    assert timeline.binding_lane == slow
    assert sum(timeline.stall_s.values()) == pytest.approx(timeline.step_s - timeline.busy_s[LaneName.COMPUTE])
