"""Which units are updated on the device, in what memory, and when a search has any."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, strategies as st

from pagoda.config.memory import Split
from pagoda.errors import ConfigError
from pagoda.forecast.compute import Compute
from pagoda.forecast.problem import Problem
from pagoda.forecast.search import Choice, search
from pagoda.optim import Muon
from pagoda.plan.device_updates import on_device
from pagoda.plan.layout import GRAD
from pagoda.plan.options import Options
from pagoda.plan.placement import LEASES, VERSIONS
from pagoda.plan.planner import Plan, make_plan
from pagoda.plan.ranks import ALONE, Ranks
from pagoda.plan.tiers import DEVICE, SSD, Budgets
from pagoda.plan.units import ModuleSpec, ParamSpec
from pagoda.simulate.hardware import Link
from pagoda.simulate.simulation import simulate

from .strategies import FAST, GPU, LARGE, STATES, figure, unit
from .test_planner import tower


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=30), st.floats(0, 1))
def test_a_share_is_spread_over_forward_and_never_passed(sizes: list[int], share: float) -> None:
    units = [unit(index, size) for index, size in enumerate(sizes)]
    chosen = on_device(units, share)
    widest = max(u.trainable_numel for u in units)
    for first in range(len(units)):
        so_far = units[: first + 1]
        here = sum(u.trainable_numel for u in so_far if u.index in chosen)
        wanted = share * sum(u.trainable_numel for u in so_far)
        assert here <= wanted
        assert here > wanted - widest or not so_far
    assert on_device(units, 0.0) == frozenset()
    assert on_device(units, 1.0) == {u.index for u in units}


@pytest.mark.parametrize("share", ["device_update_share", "device_home_share"])
@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"budgets": Budgets(LARGE)}, r"memory\.device"),
        ({"states": Muon().states("bf16")}, r"Muon.* set split\.device_update_share to 1"),
    ],
)
def test_a_share_that_cannot_be_had_is_refused(share: str, asked: dict[str, Any], reason: str) -> None:
    split = Split(**{share: 0.5})

    def plan(split: Split | None) -> Plan:
        options = Options(page_bytes=4096, split=split, **asked.get("options", {}))
        states, budgets = asked.get("states", STATES["bf16"]), asked.get("budgets", Budgets(LARGE, LARGE))
        return make_plan(tower(8, 128), states, budgets, options)

    with pytest.raises(ConfigError, match=rf"split\.{share} is 0\.5, but .*{reason}"):
        plan(split)
    for other in (None, Split()):
        placement = plan(other).placement
        assert not placement.passing
        assert not placement.resident


def searched(cpu_params_per_s: float, link_bytes_per_s: float, device: int = LARGE) -> Choice:
    """The search's choice for a model whose update takes a while, on a machine with a fast GPU."""
    cpu = replace(FAST.cpu, update_params_per_s=figure(cpu_params_per_s))
    rate = figure(link_bytes_per_s)
    machine = replace(GPU, cpu=cpu, link=Link(rate, rate, figure(2 * link_bytes_per_s)), ssd=None)
    root = tower(8, 256)
    leaves = [matrix.name for layer in root.children for matrix in layer.children]
    compute = Compute(dict.fromkeys(leaves, 1e-4), dict.fromkeys(leaves, 3e-4))
    options = Options(page_bytes=4096, clipping=True)
    return search(Problem(root, STATES["bf16"], Budgets(LARGE, device), machine, compute, options))


def steps(choice: Choice, passing: bool) -> list[float]:
    """Seconds of a step of the plans that have updates on the device, or of those that have not, whose units live
    elsewhere."""
    plans = [c for c in (choice.best, *choice.others) if not c.plan.placement.resident]
    return [c.timeline.step_s for c in plans if bool(c.plan.placement.passing) == passing]


def test_updates_on_the_device_help_where_the_cpu_is_slow_and_not_where_the_link_is() -> None:
    slow_cpu = searched(cpu_params_per_s=5e7, link_bytes_per_s=1e10, device=2 << 20)
    assert min(steps(slow_cpu, passing=True)) < 0.8 * min(steps(slow_cpu, passing=False))
    slow_link = searched(cpu_params_per_s=1e11, link_bytes_per_s=1e8)
    assert not steps(slow_link, passing=True)


def test_the_device_is_home_to_what_moves_most_of_what_it_updates() -> None:
    """Each state gets its memory only when the ones before it have theirs."""
    root, split = tower(8, 128), Split(device_home_share=1.0, device_update_share=0.5)
    params = sum(param.numel for param in root.walk())
    before: dict[str, int] = {}
    for bytes_each in (1, 2, 3, 5, 7, 12, 20, 40):
        least = 4 * params  # for leases and the ring
        options = Options(page_bytes=4096, clipping=True, split=split)
        plan = make_plan(root, STATES["bf16"], Budgets(LARGE, least + bytes_each * params // 2), options)
        placement, updated = plan.placement, on_device(plan.units, 0.5)
        names = ("weight", GRAD, "weight_low", "exp_avg", "exp_avg_sq")
        there = {name: placement.units_with(DEVICE, [name]) for name in names}
        assert placement.on_device >= updated
        assert there["weight"]
        for name, behind in pairwise(names):
            assert there[name] >= there[behind]
        if there["weight"] - updated:  # others live there whole, once these do
            assert placement.resident >= updated - {plan.units[-1].index}
        for name in names:
            held = sum(plan.layout.pages(plan.units[index], name) for index in there[name]) * plan.page_bytes
            assert plan.bytes[DEVICE].get(name, 0) == held >= before.get(name, 0)
            before[name] = held
        assert plan.peak_bytes[DEVICE] <= plan.budgets.device
    assert placement.resident == {unit.index for unit in plan.units[:-1]}


@pytest.mark.parametrize("host", [2, 8, 20])
def test_the_device_has_two_versions_of_weights_only_where_ram_has_two_of_the_other_states(host: int) -> None:
    """Of three quarters of the units that pass it."""
    root, split = tower(8, 128), Split(device_home_share=1.0, device_update_share=1.0)
    params = sum(param.numel for param in root.walk())
    options = Options(page_bytes=4096, gradient_accumulation_steps=1, clipping=True, split=split)
    plan = make_plan(root, STATES["bf16"], Budgets((8 + host) * params, 8 * params), options)
    placement, device = plan.placement, plan.bytes[DEVICE]
    there = placement.speculated & placement.units_with(DEVICE, ["weight"])
    assert there <= placement.passing
    assert device.get(VERSIONS, 0) == plan.page_bytes * sum(plan.layout.pages(plan.units[u], "weight") for u in there)
    passing = placement.passing & placement.units_with(DEVICE, ["weight"])
    assert (0.5 < len(there) / len(passing) < 1) is (host == 20)
    fewer = replace(options, split=replace(split, device_speculated_share=0.4))
    placement = make_plan(root, STATES["bf16"], plan.budgets, fewer).placement
    assert len(placement.speculated & placement.units_with(DEVICE, ["weight"])) < len(there) or host < 20
    of_a_unit = max(sum(plan.layout.pages(unit, s.name) for s in plan.layout.states) for unit in plan.units)
    assert plan.budgets.device - plan.peak_bytes[DEVICE] < of_a_unit * plan.page_bytes, "no more is left unused"


def test_whole_units_live_on_the_device_where_ram_does_not_hold_the_rest() -> None:
    """A byte at home keeps one off the SSD, whichever state it is of."""
    root, split = tower(8, 128), Split(device_home_share=1.0, device_update_share=0.5)
    params = sum(param.numel for param in root.walk())
    budgets = Budgets(11 * params, 6 * params, LARGE)
    plan = make_plan(root, STATES["bf16"], budgets, Options(page_bytes=4096, clipping=True, split=split))
    placement = plan.placement
    assert placement.resident == placement.units_with(DEVICE, ["weight", GRAD]) != frozenset()
    assert placement.passing
    on_ssd = placement.units_with(SSD, [state.name for state in plan.layout.states])
    assert on_ssd
    assert on_ssd.isdisjoint(placement.resident)


def test_a_search_lets_units_live_on_a_device_that_has_room_and_else_what_takes_most_of_the_link() -> None:
    assert searched(cpu_params_per_s=5e7, link_bytes_per_s=1e9).best.plan.placement.resident
    choice = searched(cpu_params_per_s=5e7, link_bytes_per_s=1e9, device=3 << 20)
    assert choice.best.plan.placement.passing
    weights, moments = (choice.best.plan.placement.units_with(DEVICE, [name]) for name in ("weight", "exp_avg"))
    assert len(weights) > len(moments)


def test_a_unit_too_large_for_the_device_does_not_keep_smaller_ones_from_it() -> None:
    """Such as an embedding, which is the first unit."""
    small = tower(8, 128)
    embedding = ModuleSpec("embedding", (ParamSpec("embedding.weight", (1 << 21,)),))
    root = replace(small, children=(embedding, *small.children))
    limit = 1 << 22  # what the embedding's weights take; all of its states take seven times as much
    options = Options(page_bytes=4096, unit_limit=limit, split=Split(device_home_share=1.0))
    plan = make_plan(root, STATES["bf16"], Budgets(LARGE, 4 * limit), options)
    by_name = {unit.name: unit.index for unit in plan.units}
    assert by_name["embedding"] not in plan.placement.resident
    assert len(plan.placement.resident) >= 5


@given(st.integers(0, 1 << 21))
def test_by_default_the_device_is_home_to_what_the_leases_of_all_others_leave(more: int) -> None:
    root, options = tower(8, 128), Options(page_bytes=4096, clipping=True)
    leased_only = make_plan(root, STATES["bf16"], Budgets(LARGE, LARGE), replace(options, split=Split()))
    device = leased_only.peak_bytes[DEVICE] + more
    plan = make_plan(root, STATES["bf16"], Budgets(LARGE, device), options)
    unused = device - plan.peak_bytes[DEVICE]
    assert plan.placement.pages(DEVICE, LEASES) == sum(plan.leased_pages().values())
    states = (*(state.name for state in plan.layout.states), GRAD)
    of_a_unit = plan.page_bytes * max(sum(plan.layout.pages(unit, state) for state in states) for unit in plan.units)
    assert 0 <= unused < of_a_unit or len(plan.placement.resident) == len(plan.units) - 1


@pytest.mark.parametrize("ranks", [ALONE, Ranks(4, 4, 3)], ids=["one rank", "four"])
@pytest.mark.parametrize("trained", ["nothing but the last", "adapters", "all"])
def test_layers_with_adapters_live_on_a_device_that_cannot_lease_all_and_are_not_fetched_in_each_step(
    trained: str, ranks: Ranks
) -> None:
    def layer(index: int) -> ModuleSpec:
        weight = ParamSpec(f"layers.{index}.weight", (256, 256), trainable=trained == "all" or index == 11)
        adapter = ParamSpec(
            f"layers.{index}.adapter", (256,), trainable=trained != "nothing but the last" or index == 11
        )
        return ModuleSpec(f"layers.{index}", (weight, adapter))

    root = ModuleSpec("", (), tuple(map(layer, range(12))))
    options = Options(page_bytes=4096, unit_limit=160 << 10)
    plan, leased = (
        make_plan(root, STATES["bf16"], Budgets(LARGE, 256 * 4096), replace(options, split=split), ranks)
        for split in (None, Split())
    )
    assert sum(leased.leased_pages().values()) > 256 > leased.peak_bytes[DEVICE] / 4096 - 1
    if trained != "adapters":
        assert plan.placement == leased.placement
        return
    assert len(plan.placement.resident) >= 3
    if ranks is ALONE:
        fetched, before = (
            simulate(each, GPU, [1e-3] * (len(each.trace.accesses) - 1)).bytes_moved["h2d"] for each in (plan, leased)
        )
        assert fetched < 0.9 * before
