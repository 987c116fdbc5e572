"""What a forecast says, on a small machine that is not this one."""

import io
import shutil
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pagoda.config.memory import Memory
from pagoda.errors import BudgetError, ConfigError
from pagoda.forecast.activations import activations_of
from pagoda.forecast.advice import advise
from pagoda.forecast.config import PlanConfig
from pagoda.forecast.describe import module_spec
from pagoda.forecast.forecast import Forecast, forecast
from pagoda.forecast.largest import largest_model
from pagoda.forecast.machine import Machine, budgets_for, find_machine_for
from pagoda.forecast.model_description import describe_model
from pagoda.forecast.problem import EXPERT_S, experts_of
from pagoda.forecast.report import as_json, show
from pagoda.forecast.wear import wear
from pagoda.memory.sizes import format_rate
from pagoda.models.build import build_model
from pagoda.models.lora import LoraConfig, add_adapters
from pagoda.models.papers import PAPER_SHAPES, gpt_of_step
from pagoda.optim import AdamW
from pagoda.plan.options import Options
from pagoda.plan.planner import make_plan
from pagoda.plan.ranks import Ranks
from pagoda.plan.second_placement import left_for_pages
from pagoda.plan.traffic import exchanges_at
from pagoda.prepare.construct import deferred_init
from pagoda.simulate.hardware import Figure, MatmulRate
from pagoda.simulate.machines import find_machine

from .machines import GIB, MIB, SMALL, figure

HERE_NOT = Machine(SMALL, here=False)


@cache
def made(machine: Machine = HERE_NOT, **settings: Any) -> Forecast:
    memory = {name: settings.pop(name) for name in ("host", "ssd", "device", "adapt_after") if name in settings}
    config = {"model": "gpt-4x256", "max_length": 128, "memory": Memory(**memory)} | settings
    return forecast(PlanConfig(**{"precision": "bf16", **config}), machine)


def test_a_model_that_fits_has_every_figure() -> None:
    one = made()
    assert one.fits
    assert one.described.params == describe_model(one.config).params
    assert one.tokens_per_s == pytest.approx(128 / one.timeline.step_s)
    # 6 FLOPs a parameter and token, and attention; look-ups of the position table are none.
    assert one.flop_per_s * one.timeline.step_s == pytest.approx(6 * 128 * one.described.params, rel=0.05)
    assert one.share_of_peak == pytest.approx(one.flop_per_s / 2e11)
    assert 0 < one.share_of_peak < 0.5
    assert one.ssd_bytes_written_per_step == 0
    assert sum(one.plan.bytes["host"].values()) <= 0.8 * GIB


def test_ranks_that_divide_sequences_have_a_part_of_the_tokens_and_of_the_work() -> None:
    machine = find_machine_for(PlanConfig(model="gpt-4x256", hardware="h100x8", gpus_per_node=4, precision="bf16"))
    whole, part = made(machine, max_length=512), made(machine, max_length=512, sequence_parallel=4)
    assert part.tokens_per_step * 4 == whole.tokens_per_step
    assert part.described.step_flops * 4 == pytest.approx(whole.described.step_flops)
    assert part.activations.saved * 4 == whole.activations.saved
    heads = [exchange for exchange in part.plan.exchanges if exchange.kind == "heads"]
    assert len(heads) == 4
    hidden = 512 // 4 * 256 * part.config.itemsize
    assert {exchange.sent for exchange in heads} == {4 * hidden * 3 // 4}


def test_what_lies_on_ssd_is_written_every_step_and_wears_the_drive() -> None:
    one = made(host="150MiB")
    moments = sum(one.plan.bytes["ssd"].get(state, 0) for state in ("weight_low", "exp_avg", "exp_avg_sq"))
    assert moments > 0
    assert one.ssd_bytes_written_per_step == pytest.approx(moments, rel=0.25)
    assert one.steps_until_worn == pytest.approx(1e15 / one.ssd_bytes_written_per_step)
    assert one.timeline.step_s > made().timeline.step_s
    shown = io.StringIO()
    show(one, (), Console(file=shown, width=300))
    said = wear(one.ssd_bytes_written_per_step, 1000, figure(1e15))
    assert said in shown.getvalue()
    assert wear(1 << 30, 2000, Figure(1.2e15, "datasheet")) == (
        "1.00 GiB written a step, 1.95 TiB in 2,000 steps: 0.179% of the 1,200 TB that the drives are rated for "
        "(datasheet)"
    )


def test_asynchronous_updates_are_forecast_as_they_run() -> None:
    slow = {rate: figure(1e8) for rate in ("read_bytes_per_s", "write_bytes_per_s", "both_bytes_per_s")}
    machine = Machine(replace(SMALL, ssd=replace(SMALL.ssd, **slow)), here=False)
    waits = made(machine, host="100MiB", plan="usual")
    lags = made(machine, host="190MiB", plan="usual", update="async")
    assert lags.plan.bytes["ssd"]["exp_avg"] >= 0.9 * waits.plan.bytes["ssd"]["exp_avg"], "no less streams"
    assert lags.plan.bytes["host"]["weight_back"] == lags.plan.bytes["host"]["weight"]
    assert lags.tokens_per_s > waits.tokens_per_s
    assert made(machine, host="220MiB", update="async").fits, "a search plans them too"
    with pytest.raises(ConfigError, match="ranks"):
        made(replace(machine, ranks=Ranks(2, 2)), update="async")


def test_the_usual_plan_is_the_one_that_the_planner_makes() -> None:
    one = made(host="150MiB", plan="usual")
    made_by_wrap = make_plan(one.described.root, one.problem.states, one.problem.budgets, one.problem.options)
    assert one.plan == made_by_wrap


def test_the_searched_plan_is_clearly_faster_than_the_usual_one() -> None:
    usual, searched = (made(host="130MiB", plan=mode) for mode in ("usual", "search"))
    assert searched.timeline.step_s < 0.99 * usual.timeline.step_s


def test_exact_clipping_costs_a_step_of_a_model_beyond_the_gpu_at_most_5_percent() -> None:
    """The link binds, so fewer updates are speculative than if compute did."""
    config = PlanConfig(model="llama3.1-8b", hardware="h100", max_length=8192, per_device_train_batch_size=1)
    machine = find_machine_for(config)
    clipped, free = (forecast(replace(config, max_grad_norm=norm), machine) for norm in (1.0, 0.0))
    assert clipped.timeline.step_s < 1.05 * free.timeline.step_s
    assert 0 < clipped.choice.best.options.split.device_speculated_share < 0.75


def computing(flop_per_s: float) -> Machine:
    """A machine that reaches this rate of bf16 matrix products."""
    rate = MatmulRate(figure(2 * flop_per_s), figure(flop_per_s))
    return Machine(replace(SMALL, cpu=replace(SMALL.cpu, bf16=rate)), here=False)


def test_a_plan_that_is_hardly_faster_does_not_take_the_usual_ones_place() -> None:
    busy = computing(5e10)
    one = made(busy, host="130MiB")
    assert 0.97 < one.choice.others[0].timeline.step_s / one.timeline.step_s < 0.99
    assert one.plan == made(busy, host="130MiB", plan="usual").plan


def test_no_other_plan_is_tried_if_compute_alone_takes_as_long() -> None:
    one = made(computing(1e9))
    assert one.problem.bound_s <= one.timeline.step_s < 1.01 * one.problem.bound_s
    assert not one.choice.others
    assert "Compute binds" in advise(one)[0]


@pytest.mark.parametrize(
    ("faster", "said"),
    [
        (1.02, "The fastest other takes 2.0% longer: "),
        (1.0, "The fastest other is as fast: "),
        (0.996, "The fastest other takes 0.4% less, too little to leave the usual plan: "),
        (0.9, "The fastest other takes 10.0% less: "),
    ],
)
def test_the_next_plan_is_said_to_be_as_fast_as_it_is(faster: float, said: str) -> None:
    choice = made(plan="usual").choice
    other = replace(choice.best, timeline=replace(choice.best.timeline, step_s=faster * choice.best.timeline.step_s))
    assert said + other.name in replace(choice, others=(other,)).simulated[-1]


def test_moments_of_8_bits_are_advised_where_they_help() -> None:
    tight = made(host="150MiB", plan="usual")
    eight = made(host="150MiB", plan="usual", moments="8bit")
    assert eight.tokens_per_s > 1.5 * tight.tokens_per_s
    line = next(line for line in advise(tight) if line.startswith("8-bit moments (--moments 8bit)"))
    assert f"{format_rate(eight.tokens_per_s)} tokens/s" in line
    assert not any("8-bit" in line for line in advise(eight))


def test_state_lives_on_a_gpu_that_has_room_for_it_where_that_is_not_slower() -> None:
    one = made(Machine(find_machine("a100-80gx8"), False, Ranks(8, 8)), per_device_train_batch_size=4096)
    assert one.timeline.binding_lane == "compute"
    homes = [home for (_, state), home in one.plan.placement.homes.items() if state == "exp_avg"]
    assert homes.count("device") == len(homes) - 1, "all but the last unit"


def test_adapters_are_planned_as_they_train() -> None:
    whole, one = (made(model="llama-15m", lora_r=rank) for rank in (None, 4))
    with deferred_init():
        built = add_adapters(build_model("llama-15m", seq_len=128), LoraConfig(lora_r=4))
    trained = sum(param.numel() for param in built.parameters() if param.requires_grad)
    slots = (slot.param for unit in one.plan.units for slot in unit.slots)
    assert sum(param.numel for param in slots if param.trainable) == trained
    assert one.plan.bytes["host"]["exp_avg"] < 0.1 * whole.plan.bytes["host"]["exp_avg"]
    assert one.described.step_flops == pytest.approx(2 / 3 * whole.described.step_flops, rel=0.1)
    assert one.activations.gradients < whole.activations.gradients
    with pytest.raises(ConfigError, match="is for models of transformers"):
        made(lora_r=4, model="gpt-1b")
    with pytest.raises(ConfigError, match="casts the linear layer of a router"):
        made(lora_r=4, lora_target_modules=("all-linear",), model="t5-moe-15m")


def test_the_speeds_that_are_assumed_of_a_machine_are_notes() -> None:
    notes = made(Machine(find_machine("rtx4090"), here=False), model="gpt2").notes
    assert "link to the GPU: 25 GB/s (assumed: 25 of the 32 GB/s of PCIe Gen4 x16)." in notes
    assert any(note.startswith("RAM: 89.6 GB/s (assumed: ") for note in notes)
    assert any(note.startswith("drives: read 7.45 GB/s (") for note in notes)


def test_activations_and_context_are_kept_free_on_a_gpu_and_those_that_fill_it_do_not_fit() -> None:
    machine = Machine(find_machine("rtx4090").with_gpus(1), here=False)
    one = made(machine, model="gpt2", per_device_train_batch_size=4)
    assert one.problem.budgets.device == 23 * GIB - one.activations.total
    adapting = made(machine, model="gpt2", per_device_train_batch_size=4, device="22GiB", adapt_after=2)
    assert adapting.problem.budgets.device == left_for_pages(22 * GIB, one.activations.total) > 11 * GIB
    assert "after 2 steps" in adapting.notes[0]
    full = made(machine, model="llama-8b", per_device_train_batch_size=64, max_length=2048)
    assert not full.fits
    assert "The activations do not fit" in str(full.refusal)


def test_a_forecast_for_this_machine_counts_the_limits_of_control_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda.memory.ram._limits", lambda root: iter([(int(900 * MIB), int(800 * MIB))]))
    assert Machine(SMALL, here=True).compute_memory == 100 * MIB


def test_more_processes_share_ram_and_ssd_that_are_left_open(tmp_path: Path) -> None:
    machine = replace(SMALL, intra_node_bytes_per_s=figure(1e9))
    config = PlanConfig(model="gpt-2x192", max_length=16, gpus_per_node=2, precision="bf16")
    shared = Machine(machine.with_gpus(2), False, Ranks(2, 2))
    none = activations_of(replace(config, activations="recompute"), describe_model(config))
    one, _ = budgets_for(HERE_NOT, config.memory, none)
    two, _ = budgets_for(shared, config.memory, none)
    assert (two.host, two.ssd) == (one.host // 2, GIB)
    here = replace(shared, here=True)
    given, _ = budgets_for(here, Memory(host="1GiB", ssd=f"{tmp_path}:2GiB"), none)
    assert (given.host, given.ssd) == (GIB, 2 * GIB)
    left, _ = budgets_for(here, Memory(ssd=str(tmp_path)), none)
    assert left.ssd == pytest.approx(shutil.disk_usage(tmp_path).free / 2, rel=0.1)
    assert made(shared, model="gpt-2x192", max_length=16).tokens_per_step == 32


def of_nodes(nodes: int, **settings: Any) -> Forecast:
    config = PlanConfig(nodes=nodes, per_device_train_batch_size=4, precision="bf16", **settings)
    return forecast(config, find_machine_for(config))


def test_several_nodes_share_out_the_state_and_gather_it() -> None:
    one, two = (of_nodes(nodes, model="gpt-1b", hardware="h100x8") for nodes in (1, 2))
    assert [made.machine.ranks.count for made in (one, two)] == [8, 16]
    assert two.tokens_per_step == 2 * one.tokens_per_step
    moments = [forecast_.plan.bytes["host"]["exp_avg"] for forecast_ in (one, two)]
    assert moments[1] == pytest.approx(moments[0] / 2, rel=0.02)
    assert as_json(two, ())["lanes"]["collective"]["busy_s"] > as_json(one, ())["lanes"]["collective"]["busy_s"]


@pytest.mark.slow  # 37,000 experts; test_describe.py has a few
def test_experts_are_divided_over_ranks_and_tokens_travel_to_them() -> None:
    settings: dict[str, Any] = {"model": "t5-moe-1.2t", "hardware": "a100-40gx8", "max_length": 512}
    one = of_nodes(32, expert_parallel=256, plan="usual", **settings)
    shape = PAPER_SHAPES["t5-moe-1.2t"]
    assert one.described.params == shape.params
    # A rank has the moments of its own experts whole, and a part of all others.
    experts = 16 * (2304 // 256) * 2 * shape.hidden * shape.ffn
    moments = sum(lines.get("exp_avg", 0) for lines in one.plan.bytes.values())
    assert moments == pytest.approx(4 * experts, rel=0.05)
    tokens = [exchange.sent for of_tick in exchanges_at(one.plan).values() for exchange in of_tick]
    assert len(tokens) == 6 * 16  # there and back, in forward, in its repetition and in backward
    assert set(tokens) == {2 * 4 * 512 * shape.hidden * 255 // 256}
    assert as_json(one, ()).keys() == as_json(made(), ()).keys()


@pytest.mark.parametrize(
    ("model", "parallel", "complaint"),
    [
        ("gpt-13b", 2, "no experts"),
        ("gpt-2x192", 2, "no experts"),
        ("t5-moe-1.2t", 5, "does not divide 2,304"),
        ("mixtral-15m", 3, "not divide the 8"),
    ],
)
def test_experts_that_cannot_be_divided_are_refused(model: str, parallel: int, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        describe_model(PlanConfig(model=model, max_length=64, expert_parallel=parallel, precision="bf16"))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"hardware": "h100x8", "gpus_per_node": 9}, "has 8 GPUs per node, not 9"),
        ({"hardware": "h100", "gpus_per_node": 8}, "has 1 GPU per node, not 8: .* h100x8 has eight"),
        ({"hardware": "rtx4090", "nodes": 2}, "nothing of a network"),
        ({"hardware": "h100x8", "expert_parallel": 3}, "does not divide the ranks, of which there are 8"),
        ({"hardware": "rtx4090", "expert_parallel": 2}, "does not divide the ranks, of which there are 1"),
        ({"hardware": "no/such/file.json"}, "cannot be read"),
    ],
)
def test_hardware_that_cannot_be_used_is_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        find_machine_for(PlanConfig(model="gpt2", **{"precision": "bf16", **settings}))


def test_an_unmeasured_machine_says_how_to_measure_it(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="pagoda calibrate"):
        find_machine_for(PlanConfig(model="gpt2", precision="bf16"))


def test_the_largest_model_fits_and_a_seventh_more_is_refused() -> None:
    config = PlanConfig(max_model=True, max_length=64, memory=Memory(host="100MiB"), precision="bf16")
    name = largest_model(config, HERE_NOT)
    one = forecast(replace(config, model=name, max_model=False), HERE_NOT)
    assert one.fits
    larger = next(shape for shape in map(gpt_of_step, count()) if shape.params >= 1.15 * one.described.params)
    with pytest.raises(BudgetError):
        make_plan(
            module_spec(larger),
            AdamW().states("bf16"),
            one.problem.budgets,
            Options.of(config, replace(config.memory, ssd_checkpoints=0)),
        )


def test_neighbouring_experts_are_simulated_as_one_and_the_plan_has_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """All 6,144 experts of a model of 30B parameters would take minutes to search."""
    gpu = find_machine("rtx4090")
    small = replace(gpu, device=replace(gpu.device, memory_bytes=figure(1.1 * GIB)))
    config = PlanConfig(model="qwen3-moe-15m", lora_r=4, max_length=128, plan="usual", precision="bf16")

    def of(most_experts: int) -> Forecast:
        monkeypatch.setattr("pagoda.forecast.problem._MOST_EXPERTS", most_experts)
        return forecast(config, Machine(small, here=False))

    each, joined, largest = of(1000), of(6 * 32 // 4), of(6)
    assert joined.plan == largest.plan == each.plan
    experts = 6 * 32
    assert len(joined.choice.best.plan.units) == len(joined.plan.units) - experts + experts // 4
    assert max(unit.numel for unit in largest.choice.best.plan.units) * 2 <= each.plan.unit_limit
    for one in (joined, largest):
        assert one.problem.bound_s == pytest.approx(each.problem.bound_s)
        assert one.timeline.step_s == pytest.approx(each.timeline.step_s, rel=0.05)
        fetched = [sum(s.nbytes for s in run.timeline.spans if s.lane == "h2d") for run in (each, one)]
        assert fetched[1] == pytest.approx(fetched[0], rel=0.02)
    assert len(largest.choice.best.plan.units) < len(joined.choice.best.plan.units)


def test_the_usual_plan_is_not_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda.forecast.forecast.search", None)
    assert made(host="120MiB", plan="usual").fits


def test_a_visit_to_an_expert_takes_python_and_launches_on_a_gpu_however_small_it_is() -> None:
    of = {"model": "mixtral-15m", "per_device_train_batch_size": 1, "max_length": 64, "plan": "usual"}
    gpu, cpu = PlanConfig(**of, hardware="rtx4090"), Machine(SMALL, here=False)
    made = forecast(gpu, find_machine_for(gpu))
    visits = 3 * len(experts_of(made.described.root))  # in forward, recomputed, and in backward
    assert visits > 0
    assert made.timeline.busy_s["compute"] >= visits * EXPERT_S
    assert "a visit to one of" in " ".join(made.notes)
    assert "a visit to one of" not in " ".join(forecast(replace(gpu, hardware="auto"), cpu).notes)


def test_dequantized_weights_take_the_time_to_read_and_write_them_at_each_use() -> None:
    of = {"model": "llama-15m", "per_device_train_batch_size": 1, "max_length": 64, "hardware": "rtx4090"}
    config = PlanConfig(**of, plan="usual", lora_r=2, load_in_4bit=True)
    machine = find_machine_for(config)
    packed, plain = forecast(config, machine), forecast(replace(config, load_in_4bit=False), machine)
    elements = sum(packed.described.packed.values())
    assert plain.described.packed == {}
    assert 0 < elements < plain.described.params
    more = packed.timeline.busy_s["compute"] - plain.timeline.busy_s["compute"]
    assert more == pytest.approx(3 * 2.5 * elements / machine.hardware.device.memory_bytes_per_s.value, rel=0.01)
