"""Blocks of a unit's update cover it, and a block is read after those that write its pages."""

import itertools

import pytest

from pagoda.errors import BudgetError
from pagoda.optim.adafactor import Adafactor
from pagoda.optim.muon import Muon
from pagoda.optim.rule import Rule
from pagoda.plan.blocks import UnitBlocks, stream_plan
from pagoda.plan.options import Options
from pagoda.plan.planner import Plan, make_plan
from pagoda.plan.tiers import SSD, Budgets
from pagoda.plan.units import ModuleSpec, ParamSpec
from tests.plan.strategies import LARGE, STATES
from tests.plan.test_planner import tower


def blocks_of(plan: Plan) -> list[UnitBlocks]:
    return [*stream_plan(plan, 2, 0, plan.layout.updated_elements).units]


@pytest.mark.parametrize("rule", [Adafactor(), Muon()], ids=["adafactor", "muon"])
def test_a_block_comes_after_all_earlier_blocks_with_one_of_its_pages(rule: Rule) -> None:
    """Also if others lie between them, because an update leaves out parameters that have no gradient."""
    shapes = [(72, 72), (72,), (40, 72), (9,), (30, 30), (72, 40)]
    layers = (tuple(ParamSpec(f"{n}.{i}", shape) for i, shape in enumerate(shapes)) for n in range(3))
    root = ModuleSpec("", (), tuple(ModuleSpec(f"{n}", params) for n, params in enumerate(layers)))
    states = rule.states("bf16")
    with pytest.raises(BudgetError) as refused:
        make_plan(root, states, Budgets(0, ssd=LARGE), Options(page_bytes=16384))
    plan = make_plan(root, states, Budgets(refused.value.needed_bytes, ssd=LARGE), Options(page_bytes=16384))
    layout, shared = plan.layout, 0
    for unit, blocks in zip(plan.units, blocks_of(plan), strict=True):
        cuts = layout.cuts(unit)
        assert [stop - start for start, stop in blocks.bounds] == [cut.stop - cut.start for cut in cuts]
        on_ssd = [state for state in layout.states if plan.placement.home(unit.index, state.name) == SSD]
        for (first, one), (second, other) in itertools.combinations(enumerate(cuts), 2):
            for state in on_ssd:
                parts = layout.part(unit, one, state), layout.part(unit, other, state)
                if parts[0] is None or parts[1] is None:
                    continue
                (offset, nbytes), (later, _) = (layout.window(part, state) for part in parts)
                if offset + nbytes > later:
                    shared += 1
                    assert first in blocks.after[second]
    assert shared


def test_blocks_of_an_element_wise_rule_come_after_none_and_cover_the_unit() -> None:
    plan = make_plan(tower(3, 64), STATES["bf16"], Budgets(LARGE), Options())
    for unit, blocks in zip(plan.units, blocks_of(plan), strict=True):
        assert not blocks.after
        assert blocks.bounds[0][0] == 0
        assert blocks.bounds[-1][1] == plan.layout.updated_elements(unit)
        assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(blocks.bounds))
