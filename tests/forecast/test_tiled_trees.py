"""A tree in tiles has the parameters and the arithmetic of the whole, in modules that are fetched apart."""

import math

import pytest

from pagoda.forecast.describe import forward_flops, module_spec
from pagoda.forecast.tiles import tiled
from pagoda.models.papers import PAPER_SHAPES
from pagoda.plan.units import ModuleSpec, discover, forward_uses


def modules(root: ModuleSpec) -> list[ModuleSpec]:
    return [root, *(module for child in root.children for module in modules(child))]


@pytest.mark.parametrize("name", ["gpt-1b", "t5-27b"])
def test_what_is_too_large_is_cut_and_nothing_is_lost(name: str) -> None:
    shape, most = PAPER_SHAPES[name], 4_000_000
    root, flops = module_spec(shape), forward_flops(shape, 512, 512)
    cut, counted = tiled(root, flops, most)
    assert sum(param.numel for param in cut.walk()) == shape.params
    assert max(param.numel for param in cut.walk()) <= most
    assert math.fsum(counted.values()) == pytest.approx(math.fsum(flops.values()))
    whole = {param.name: param for param in root.walk()}
    for tile in (module for module in modules(cut) if module.apart):
        for param in tile.params:
            assert param.part is not None
            assert param.part.shape == whole[param.part.whole].shape
            assert counted[tile.name] >= 0
    units = discover(cut, most * 2, 2)
    assert max(unit.numel for unit in units) <= most * 1.01
    embedding = [use.unit for use in forward_uses(cut, units) if "tiles" in use.module and "embedding" in use.module]
    assert embedding[0] == 0
    tied = forward_uses(cut, units)[-1]
    assert "token.tiles" in units[tied.unit].module, "the head uses the embedding's tiles"


def test_without_anything_large_the_tree_stays() -> None:
    shape = PAPER_SHAPES["gpt-1b"]
    root, flops = module_spec(shape), forward_flops(shape, 512, 512)
    assert tiled(root, flops, shape.params) == (root, flops)
