"""Layers that are alike are described once, and the result is what describing all of them gives."""

import pytest

from pagoda.construction.construct import describe
from pagoda.forecast.describe import module_spec
from pagoda.forecast.flops import forward_flops, weightless
from pagoda.forecast.model_description import describe_model
from pagoda.models import build_model
from pagoda.models.papers import PAPER_SHAPES
from pagoda.plan.units import layers_of
from pagoda.transforms.operator_tiles import Tiling


@pytest.mark.parametrize(
    ("name", "most"), [("gpt-5x192", None), ("gpt-5x192", 200_000), ("llama-15m", 100_000), ("mixtral-15m", None)]
)
def test_a_built_in_shape_is_described_as_all_of_its_layers_would_be(name: str, most: int | None) -> None:
    with weightless():
        whole = build_model(name, seq_len=32)
        Tiling(whole, most)
        flops, root = forward_flops(whole, 2, 32), describe(whole)
    described = describe_model(name, batch_size=2, seq_len=32, tile_elements=most)
    assert described.root == root
    assert list(described.forward_flops.items()) == list(flops.items())
    assert described.layers == len(layers_of(root))


@pytest.mark.parametrize("name", ["gpt-13b", "t5-58b", "t5-moe-1.2t"])
def test_layers_are_the_outermost_rows(name: str) -> None:
    shape = PAPER_SHAPES[name]
    layers = layers_of(module_spec(shape))
    assert len(layers) == shape.layers + shape.decoder_layers
    assert not any(".mlp" in layer.name for layer in layers)
