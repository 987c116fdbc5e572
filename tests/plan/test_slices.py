"""Slices of whole parameters: every element is held once, none is cut that must not be, and ranks hold as much."""

from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, strategies as st
from pairwise import each_once

import pagoda
from pagoda.optim.rule import Rule
from pagoda.plan.layout import GRAD, WEIGHT, Layout
from pagoda.plan.options import Options
from pagoda.plan.planner import Plan, make_plan
from pagoda.plan.ranks import Ranks, Stage
from pagoda.plan.slices import ParameterRange, whole_slices
from pagoda.plan.tiers import Budgets
from pagoda.plan.units import ALIGN_ELEMENTS, ModuleSpec, ParamSpec

PAGE = 4096


@st.composite
def parameter_ranges(draw: st.DrawFn) -> list[ParameterRange]:
    found: list[ParameterRange] = []
    for blocks, whole in draw(st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=6)):
        start = found[-1].stop if found else 0
        found.append(ParameterRange(start, start + blocks * ALIGN_ELEMENTS, whole))
    return found


def cut_points(of: Sequence[ParameterRange]) -> list[int]:
    """Where slices may end, but for the last."""
    inside = {at for each in of if not each.whole for at in range(each.start, each.stop, ALIGN_ELEMENTS)}
    return sorted({each.start for each in of[1:]} | inside - {0})


@given(parameter_ranges(), st.integers(1, 5))
def test_whole_slices_leave_parameters_whole_and_the_largest_is_as_small_as_can_be(
    of: list[ParameterRange], group: int
) -> None:
    slices = whole_slices(of, group)
    total = of[-1].stop if of else 0
    assert len(slices) == group
    assert [start for start, _ in slices] == [0, *(stop for _, stop in slices[:-1])]
    assert slices[-1][1] == total
    possible = cut_points(of)
    assert {stop for _, stop in slices} <= {*possible, total}
    ends = ((0, *cuts, total) for n in range(min(group, len(possible) + 1)) for cuts in combinations(possible, n))
    best = min(max(b - a for a, b in pairwise(at)) for at in ends)
    assert max(stop - start for start, stop in slices) == best


def shape(layers: int) -> ModuleSpec:
    """A model like Llama, each layer a unit."""

    def layer(index: int) -> ModuleSpec:
        name = f"layers.{index}"
        sizes = {"q": (64, 64), "k": (16, 64), "v": (16, 64), "o": (64, 64), "up": (96, 64), "down": (64, 96)}
        params = [ParamSpec(f"{name}.{n}.weight", size) for n, size in sizes.items()]
        frozen = ParamSpec(f"{name}.frozen", (50, 7), trainable=False)
        return ModuleSpec(name, (*params, ParamSpec(f"{name}.norm.weight", (64,)), frozen))

    embedding = ModuleSpec("embed_tokens", (ParamSpec("embed_tokens.weight", (100, 64)),))
    return ModuleSpec("", (), (embedding, *map(layer, range(layers))))


def plans(
    rule: Rule,
    count: int,
    stage: Stage = 3,
    layers: int = 12,
    replicas: int = 1,
    device: int | None = None,
    split: pagoda.Split | None = None,
) -> list[Plan]:
    """Of every rank."""
    options = Options(PAGE, unit_limit=64 << 10, split=split)
    ranks = Ranks(count, count, stage, replicas=replicas)
    root, states, budgets = shape(layers), rule.states("bf16"), Budgets(1 << 30, device)
    return [make_plan(root, states, budgets, options, ranks, rank=rank) for rank in range(count)]


RULES: dict[str, Rule] = {
    "muon": pagoda.Muon(),
    "adafactor": pagoda.Adafactor(beta1=0.9),
    "adagrad": pagoda.Optim(torch.optim.Adagrad),
}


@each_once(name=[*RULES], count=[2, 3, 8], stage=[1, 3])
def test_every_element_of_every_state_is_held_by_one_rank(name: str, count: int, stage: Stage) -> None:
    layouts = [plan.layout for plan in plans(RULES[name], count, stage, layers=3)]
    whole = make_plan(shape(3), RULES[name].states("bf16"), Budgets(1 << 30), Options(PAGE, 64 << 10)).layout
    assert len(layouts[0].units) > 3
    for unit in layouts[0].units:
        for state in (*(s.name for s in layouts[0].states), GRAD):
            seen: list[int] = []
            for rank, layout in enumerate(layouts):
                spans = layout.slices.of_state(
                    unit, state, layout.slices.spans(unit, layout.slices.place(unit, rank), frozen=state == WEIGHT)
                )
                seen += [element for span in spans for element in range(span.start, span.stop)]
                if layout.is_sliced(unit, state):
                    assert all(span.at + len(span) <= layout.elements(unit, state) for span in spans)
            assert sorted(seen) == list(range(whole.elements(unit, state)))


def held_bytes(layout: Layout) -> int:
    """Bytes of all states, and the gradient, on a layout's rank, without padding to pages."""
    return sum(
        layout.elements(unit, state) * layout.itemsize(unit, state)
        for unit in layout.units
        for state in (*(s.name for s in layout.states), GRAD)
    )


@each_once(name=[*RULES], count=[8, 2, 4])
def test_a_rank_holds_its_share_up_to_a_parameter(name: str, count: int) -> None:
    """12 layers of 7 parameters on 8 ranks: no unit can be divided equally, all of them together can."""
    layouts = [plan.layout for plan in plans(RULES[name], count)]
    alone = held_bytes(make_plan(shape(12), RULES[name].states("bf16"), Budgets(1 << 30), Options(PAGE)).layout)
    held = [held_bytes(layout) for layout in layouts]
    blocks = len(layouts[0].units) * ALIGN_ELEMENTS * 16  # a rank without a slice of a unit has a block of it
    assert sum(held) == pytest.approx(alone, abs=count * blocks)
    largest = 100 * 64 * 16
    assert max(held) <= alone / count + largest
    assert min(held) >= alone / count - largest


@each_once(name=[*RULES], stage=[1, 3])
def test_the_same_units_live_on_the_device_of_every_rank_beside_as_many_leases(name: str, stage: Stage) -> None:
    split = pagoda.Split(device_home_share=1.0, device_update_share=1.0)
    first, *others = plans(RULES[name], 4, stage, device=2 << 20, split=split)
    lives, held = first.placement.resident, first.bytes["device"]
    assert 0 < len(lives) < len(first.units)
    assert first.placement.on_device == {unit.index for unit in first.units}
    for plan in others:
        assert plan.placement.resident == lives
        device = plan.bytes["device"]
        assert (device["leases"], device["update_ring"]) == (held["leases"], held["update_ring"])
        assert plan.peak_bytes["device"] <= 2 << 20
    assert len({plan.peak_bytes["device"] for plan in (first, *others)}) > 1  # slices differ


def test_ranks_agree_on_units_pages_and_slices() -> None:
    first, *others = plans(RULES["muon"], 4, replicas=2)
    for plan in others:
        assert plan.layout.units == first.layout.units
        assert plan.page_bytes == first.page_bytes
        for unit in plan.units:
            for place in range(2):
                assert plan.layout.slices.trained(unit, place) == first.layout.slices.trained(unit, place)
    assert held_bytes(others[1].layout) == held_bytes(first.layout)  # the same slices of another replica


def test_ranks_of_an_element_wise_rule_have_one_plan() -> None:
    first, *others = plans(pagoda.AdamW(), 4)
    assert all(plan.layout == first.layout and plan.placement == first.placement for plan in others)
