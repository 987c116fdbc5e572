"""A refusal names the least budget with which the same call is accepted, and trains."""

import re
from typing import Any

import pytest
import torch
from torch import nn

import pagoda
from pagoda.memory.sizes import parse_bytes


class Layer(nn.Module):
    """A residual layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Residual layers between a table of tokens and an output layer, which may share their weights."""

    def __init__(self, layers: int, width: int, vocab: int, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.scale = nn.Parameter(torch.ones(width))
        self.head = nn.Linear(width, vocab, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x * self.scale).float().flatten(0, 1), ids.flatten())


TIED, DEEP = (3, 48, 400, True), (9, 40, 100, False)
CASES: dict[str, tuple[tuple[int, int, int, bool], pagoda.Optim | Any, dict[str, Any]]] = {
    "adamw": (TIED, pagoda.AdamW(), {}),
    "fp32, two passes, clipped": (
        TIED,
        pagoda.Muon(lr=1e-3),
        {"precision": "fp32", "accumulation_steps": 2, "clip_grad_norm": 1.0},
    ),
    "two passes, fp32 gradients": (
        DEEP,
        pagoda.SGD(lr=1e-3),
        {"accumulation_steps": 2, "precision": pagoda.MixedPrecision(gradients="fp32")},
    ),
    "8-bit moments, auto": (DEEP, pagoda.AdamW(moments="8bit"), {"accumulation_steps": 2, "activations": "auto"}),
    "asynchronous": (TIED, pagoda.AdamW(), {"update": "async", "accumulation_steps": 1}),
}


def train(name: str, host: str | int) -> None:
    """Two steps in so much RAM."""
    torch.manual_seed(0)
    sizes, rule, settings = CASES[name]
    model, optimizer = pagoda.wrap(Model(*sizes), rule, memory=pagoda.Memory(host=host), **settings)
    for _ in range(2):
        for _ in range(settings.get("accumulation_steps", 1)):
            optimizer.scale(model(torch.randint(100, (2, 8)))).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()


@pytest.mark.parametrize("name", CASES)
def test_what_a_refusal_names_is_enough_to_train(name: str) -> None:
    with pytest.raises(pagoda.BudgetError) as refused:
        train(name, "1KiB")
    named = re.search(r"host needs at least ([0-9.]+ \w+)", str(refused.value))
    assert named is not None
    assert refused.value.needed_bytes is not None
    assert parse_bytes(named[1], "host") >= refused.value.needed_bytes
    train(name, refused.value.needed_bytes)
    with pytest.raises(pagoda.BudgetError, match="host needs at least"):
        train(name, refused.value.needed_bytes - 1)
