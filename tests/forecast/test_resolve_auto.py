"""What a configuration leaves open is chosen by plans, is what a run can take, and takes bounded work."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import pagoda.models
from pagoda.config.memory import Memory, Split
from pagoda.config.training import ActivationMode
from pagoda.errors import BudgetError, ConfigError
from pagoda.forecast import problem as problems, resolve_auto
from pagoda.forecast.advice import advise
from pagoda.forecast.config import PlanConfig
from pagoda.forecast.forecast import Forecast, forecast
from pagoda.forecast.largest import largest_model
from pagoda.forecast.machine import Machine
from pagoda.forecast.model_description import describe_model
from pagoda.plan.placement import ACTIVATIONS
from pagoda.plan.traffic import activations_at
from pagoda.simulate.hardware import DeviceSpeeds, Figure, Hardware, Link, MatmulRate
from pagoda.simulate.machines import find_machine

from .machines import GIB, MIB, SMALL, figure

LARGE: dict[str, Any] = {"per_device_train_batch_size": 16, "chunked_loss": True}
MODES: tuple[ActivationMode, ...] = ("keep", "recompute", "offload", "recompute+offload")


def gpu(memory: float, link: float, flops: float) -> Machine:
    """The small machine with a GPU."""
    matmul = MatmulRate(Figure(2 * flops, "made up"), Figure(flops, "made up"))
    device = DeviceSpeeds(figure(memory), figure(1e12), matmul, matmul, figure(1e11))
    both = Link(figure(link), figure(link), figure(2 * link))
    hardware: Hardware = replace(SMALL, cpu=replace(SMALL.cpu, memory_bytes=figure(8 * GIB)), device=device, link=both)
    return Machine(hardware, here=False)


@cache
def made(machine: Machine, **given: Any) -> Forecast:
    shape = {"model": "gpt-4x256", "max_length": 256, "per_device_train_batch_size": 4}
    return forecast(PlanConfig(**{**shape, "plan": "usual", "precision": "bf16", **given}), machine)


def seconds(machine: Machine, **given: Any) -> dict[str, float | None]:
    """Mode -> seconds of a step, to the nanosecond. None where it does not fit."""
    each = {mode: made(machine, activations=mode, **given) for mode in MODES}
    return {mode: round(one.timeline.step_s, 9) if one.fits else None for mode, one in each.items()}


@pytest.mark.parametrize(
    ("machine", "given", "best"),
    [
        (gpu(4 * GIB, 1e10, 1e12), {}, {"keep"}),
        (gpu(1.3 * GIB, 1e12, 1e11), LARGE, {"offload"}),
        (gpu(1.3 * GIB, 1e9, 1e13), LARGE, {"recompute", "recompute+offload"}),
    ],
)
def test_the_fastest_policy_that_fits_is_taken_and_what_others_cost_is_said(
    machine: Machine, given: dict[str, Any], best: set[str]
) -> None:
    steps = seconds(machine, **given)
    fitting = {mode: s for mode, s in steps.items() if s is not None}
    assert min(fitting, key=lambda mode: fitting[mode]) in best
    auto = made(machine, activations="auto", **given)
    assert auto.config.activations in {*best, "auto"}
    assert round(auto.timeline.step_s, 9) <= min(fitting.values())
    (said,) = (line for line in auto.resolved if line.startswith("activations"))
    assert said.startswith(f"activations: {auto.config.activations}")
    for mode in MODES:
        if steps[mode] is None:
            assert f"{mode} does not fit" in said


def test_layers_get_policies_of_their_own_where_memory_is_between() -> None:
    given = {**LARGE, "model": "gpt-12x256"}
    machine = gpu(1.6 * GIB, 1e9, 1e12)
    steps = seconds(machine, **given)
    assert steps["keep"] is None
    auto = made(machine, activations="auto", **given)
    assert auto.config.activations == "auto"
    assert len(set(auto.plan.activations.policies)) > 1
    assert auto.timeline.step_s < min(s for s in steps.values() if s is not None)
    recomputed = made(machine, activations="recompute", **given).activations
    assert recomputed.saved < auto.activations.saved


def test_offloading_is_in_the_plan_and_costs_what_a_link_costs() -> None:
    machine = gpu(2 * GIB, 1e9, 1e13)
    keep, offload = (made(machine, activations=mode) for mode in ("keep", "offload"))
    moves = [move for of_tick in activations_at(offload.plan).values() for move in of_tick]
    saved = sum(nbytes for lane, nbytes in moves if lane == "d2h")
    assert saved == pytest.approx(offload.activations.offloaded, rel=0.01)
    buffers = offload.plan.placement.pages("host", ACTIVATIONS) * offload.plan.page_bytes
    assert offload.plan.bytes["host"][ACTIVATIONS] == saved + buffers
    assert offload.timeline.step_s > keep.timeline.step_s
    assert offload.activations.total < keep.activations.total


LONG = {**LARGE, "model": "gpt-24x256", "max_length": 128, "per_device_train_batch_size": 64}


@pytest.mark.parametrize(("memory", "mode"), [(1.4, "recompute"), (1.26, "recompute+offload"), (1.2, "recompute")])
def test_blocks_are_recomputed_by_default_and_their_inputs_offloaded_where_only_that_fits(
    memory: float, mode: ActivationMode
) -> None:
    plan = made(gpu(memory * GIB, 1e10, 1e12), **LONG)
    assert plan.config.activations == mode
    assert plan.fits == (memory > 1.2)
    assert bool(plan.resolved) == (mode != "recompute"), "what is not usual has its reason"


def test_activations_take_ram_before_old_states_where_that_is_faster() -> None:
    machine = gpu(1.26 * GIB, 1e10, 1e13)
    slow = dict.fromkeys(("read_bytes_per_s", "write_bytes_per_s", "both_bytes_per_s"), figure(1e8))
    assert machine.hardware.ssd is not None
    drive = replace(machine.hardware.ssd, **slow)
    machine = replace(machine, hardware=replace(machine.hardware, ssd=drive))
    given = LONG | {"memory": Memory(host="720MiB")}
    usual, searched = (made(machine, **given, plan=plan) for plan in ("usual", "search"))
    assert usual.plan.placement.speculated
    assert usual.plan.activations.peak.ssd > 0
    assert searched.plan.activations.peak.ssd == 0
    assert searched.timeline.step_s < usual.timeline.step_s / 2
    assert searched.choice is not None
    assert searched.choice.best.options.speculate is False, "which `pagoda train` takes over"


def test_nowhere_to_offload_to_is_said() -> None:
    alone = Machine(replace(SMALL, ssd=None), here=False)
    with pytest.raises(ConfigError, match="nowhere to offload to"):
        made(alone, activations="offload")
    assert made(alone, activations="auto").config.activations in ("keep", "recompute")


@pytest.mark.parametrize("expert_parallel", [1, 2])
def test_each_layer_has_a_policy_of_its_own_where_that_is_fastest(
    expert_parallel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve_auto, "_step_s", lambda config, *_: 1.0 + (config.activations != "auto"))
    config = PlanConfig(
        model="mixtral-15m", max_length=64, activations="auto", expert_parallel=expert_parallel, precision="bf16"
    )
    resolved, _ = resolve_auto.resolve_auto(config, gpu(4 * GIB, 1e10, 1e12), describe_model(config))
    assert resolved.activations == "auto"


def test_as_few_tiles_as_fit() -> None:
    leases_only = Memory(split=Split())
    given = {**LARGE, "model": "gpt-2x768", "per_device_train_batch_size": 64, "memory": leases_only}
    few = made(gpu(4 * GIB, 1e10, 1e12), batch_tiles="auto", **given)
    assert (few.config.batch_tiles, few.fits) == (4, True)
    twice = made(gpu(4 * GIB, 1e10, 1e12), batch_tiles=8, **given)
    assert twice.activations.total < few.activations.total
    tight = gpu(GIB + twice.activations.total + twice.plan.peak_bytes["device"] + MIB, 1e10, 1e12)
    assert not made(tight, batch_tiles=4, **given).fits
    more = made(tight, batch_tiles="auto", **given)
    assert (more.config.batch_tiles, more.fits) == (8, True)
    assert "batch tiles: 8" in more.resolved[0]


def test_tiles_make_units_smaller() -> None:
    whole, tiled = (made(gpu(4 * GIB, 1e10, 1e12), model="llama-15m", tile_limit=limit) for limit in (None, "512KiB"))
    assert max(param.numel for param in tiled.described.root.walk()) * 2 <= 512 << 10
    assert tiled.plan.layout.lease_pages(1) < whole.plan.layout.lease_pages(1)
    assert tiled.described.params == whole.described.params
    with pytest.raises(ConfigError, match="takes whole parameters"):
        made(gpu(4 * GIB, 1e10, 1e12), tile_limit="256KiB", optim="adafactor")


@pytest.mark.parametrize(
    ("given", "line", "factor"),
    [
        ({"optim": "sgd", "optim_args": ("momentum=0.9",)}, "momentum_buffer", None),
        ({"moments": "8bit"}, "exp_avg", 0.25),
        ({"gradients": "fp32", "gradient_accumulation_steps": 2}, "grad", 2.0),
    ],
)
def test_what_decides_states_is_in_the_account(given: dict[str, Any], line: str, factor: float | None) -> None:
    usual = made(Machine(SMALL, here=False)).plan.bytes
    other = made(Machine(SMALL, here=False), **given).plan.bytes
    states = {state for lines in other.values() for state in lines}
    if factor is None:
        assert not states & {"exp_avg", "exp_avg_sq"}
    else:
        found = sum(n for state, n in other["host"].items() if state.startswith(line) and "scale" not in state)
        before = sum(n for state, n in usual["host"].items() if state.startswith(line))
        assert found == pytest.approx(factor * before, rel=0.1)


# --- the work it takes --------------------------------------------------------------------------------------


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[tuple[Any, ...]]:
    """The arguments of every call from now on."""
    calls: list[tuple[Any, ...]] = []
    original: Callable[..., Any] = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)
    return calls


def test_a_forecast_and_its_advice_simulate_few_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = counted(monkeypatch, problems, "simulate")
    one = forecast(
        PlanConfig(model="gpt-4x256", max_length=128, memory=Memory(host="150MiB"), precision="bf16"),
        Machine(SMALL, here=False),
    )
    searched = len(simulated)
    assert 5 <= searched <= 20
    assert advise(one)
    assert len(simulated) - searched <= 2 * 9


def test_the_search_for_the_largest_builds_two_layers_and_simulates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    built = counted(monkeypatch, pagoda.models, "build_model")
    simulated = counted(monkeypatch, problems, "simulate")
    machine = Machine(find_machine("rtx4090"), here=False)
    largest_model(PlanConfig(max_model=True, precision="bf16"), machine)
    assert simulated == []
    assert 0 < len(built) < 30
    assert all(kwargs["layers"] in (None, 2) for _, kwargs in built)


def test_a_model_larger_than_all_tiers_is_refused_by_the_planner_too() -> None:
    """What the search for the largest leaves out fast has no plan."""
    machine = gpu(1.5 * GIB, 1e10, 1e12)
    config = PlanConfig(model="gpt-24x2048", max_length=64, memory=Memory(host="2GiB", ssd="1GiB"), precision="bf16")
    problem, _ = problems.problem_of(config, machine, describe_model(config, count_flops=False))
    with pytest.raises(BudgetError):
        problem.plan()
