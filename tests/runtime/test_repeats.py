"""A block whose forward is repeated in backward changes buffers and generators once, as if it were not repeated."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from peft import PrefixTuningConfig, get_peft_model
from torch import nn
from torch.nn import functional
from transformers import XLMConfig, XLMWithLMHeadModel
from zoo import LAYERS, RESIDENT, VOCABULARY, batch, llama

import pagoda
from pagoda.autograd.activations.blocks import find_blocks
from pagoda.config.training import ActivationMode

from .conftest import Wrap

WIDTH = 16


class Stateful(nn.Module):
    """A block with every kind of buffer, whose output depends on all of them and on three generators."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norms = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH, momentum=None))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("shift", torch.zeros(WIDTH))
        self.register_buffer("first", None)
        self.register_buffer("constant", torch.full((WIDTH,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norms(self.linear(x))
        mean = x.detach().mean(0) + 0.1
        self.calls += 1  # in place
        self.average = 0.9 * self.average + mean * self.calls  # another tensor
        self.shift.data.mul_(0.5).add_(mean)  # past autograd
        if self.first is None:
            self.first = mean * random.random()
        x = functional.dropout(x * self.constant, 0.25) * (1 + random.random()) + float(np.random.rand())
        return torch.tanh(x * self.average + self.shift + self.first)


def seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def trained(activations: ActivationMode) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Weights and buffers after some steps, and what the generators give then."""
    seed()
    model, optimizer = pagoda.wrap(
        nn.Sequential(*(Stateful() for _ in range(3))),
        pagoda.AdamW(lr=1e-2),
        memory=RESIDENT,
        precision="fp32",
        activations=activations,
    )
    with optimizer:
        for _ in range(4):
            model(torch.randn(8, WIDTH)).square().mean().backward()
            optimizer.step()
        state = {name: value.clone() for name, value in model.state_dict().items()}
    return state, [torch.rand(()).item(), random.random(), float(np.random.rand())]


def test_a_forward_that_is_repeated_counts_once() -> None:
    expected, numbers = trained("keep")
    modes: tuple[ActivationMode, ...] = ("recompute", "auto")
    for activations in modes:
        found, other_numbers = trained(activations)
        zoo.assert_equal(expected, found)
        assert found["0.calls"] == found["0.norms.0.num_batches_tracked"] == 4
        assert numbers == other_numbers


# --- key-value caches ---------------------------------------------------------------------------------------

XLM: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "emb_dim": 32,
    "n_layers": 2,
    "n_heads": 2,
    "max_position_embeddings": 32,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "bos_index": 0,
    "eos_index": 1,
    "pad_index": 2,
}


def prefixed() -> Any:
    """A trained prefix comes to each layer in a cache, which is to be attended to."""
    return get_peft_model(llama(2), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "xlm": lambda: XLMWithLMHeadModel(XLMConfig(**XLM)),
    "prefix-tuning": prefixed,
}


@pytest.mark.parametrize("name", MODELS)
def test_layers_that_add_to_a_cache_are_recomputed_to_the_bit(name: str, wrap: Wrap) -> None:
    outcomes = []
    for activations in ("keep", "recompute", "auto"):
        torch.manual_seed(0)
        memory = pagoda.Memory(host="64MiB", unit_limit="16KiB")
        model, optimizer = wrap(MODELS[name]().train(), memory, precision="fp32", activations=activations)
        generator = torch.Generator().manual_seed(1)
        outcome = []
        for _ in range(2):
            loss = model(**batch("llama", generator)).loss
            loss.backward()
            optimizer.step()
            outcome += [loss.item(), optimizer.stats.grad_norm]
        assert all(outcome)
        outcomes.append(outcome)
    assert outcomes[0] == outcomes[1] == outcomes[2]


# --- which blocks there are ----------------------------------------------------------------------------------

BLOCKS = {
    "llama": [f"model.layers.{n}" for n in range(LAYERS)],
    "gpt2": [f"transformer.h.{n}" for n in range(LAYERS)],
    "t5": [f"{half}.block.{n}" for half in ("encoder", "decoder") for n in range(4)],
    "conv": [f"blocks.{n}" for n in range(LAYERS)],
}


def test_blocks_are_the_repeated_layers() -> None:
    """Lists inside of blocks are part of them."""
    for name, expected in BLOCKS.items():
        assert [block.name for block in find_blocks(zoo.MODELS[name]())] == expected
    experts = (nn.ModuleDict({"experts": nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in "abc")}) for _ in "ab")
    model = nn.Sequential(nn.Linear(2, 2), nn.ModuleList(experts))
    assert [block.name for block in find_blocks(model)] == ["1.0", "1.1"]
