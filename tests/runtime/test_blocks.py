"""Blocks are found in every kind of model, and wrapping them leaves no trace once undone."""

import pytest
import torch
import zoo
from torch import nn

from pagoda.runtime.activations.blocks import find_blocks

LAYERS = {
    "llama": [f"model.layers.{n}" for n in range(zoo.LAYERS)],
    "gpt2": [f"transformer.h.{n}" for n in range(zoo.LAYERS)],
    "t5": [f"{half}.block.{n}" for half in ("encoder", "decoder") for n in range(4)],
    "conv": [f"blocks.{n}" for n in range(zoo.LAYERS)],
}


@pytest.mark.parametrize("name", LAYERS)
def test_blocks_are_the_repeated_layers(name: str) -> None:
    assert [block.name for block in find_blocks(zoo.MODELS[name]())] == LAYERS[name]


def test_lists_inside_blocks_are_part_of_them() -> None:
    layers = (
        nn.ModuleDict({"experts": nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(3))}) for _ in range(2)
    )
    model = nn.Sequential(nn.Linear(2, 2), nn.ModuleList(layers))
    assert [block.name for block in find_blocks(model)] == ["1.0", "1.1"]


def test_what_is_wrapped_later_is_further_out_and_hooks_are_outside() -> None:
    seen: list[str] = []
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)))
    block = find_blocks(model)[0]
    block.module.register_forward_hook(lambda *_: seen.append("hook"))
    x = torch.ones(1, 2)
    expected = block.module(x)
    for name in ("inner", "outer"):
        block.wrap(lambda _, forward, args, kwargs, name=name: (seen.append(name), forward(*args, **kwargs))[1])
    assert torch.equal(block.module(x), expected)
    assert seen == ["hook", "outer", "inner", "hook"]
