"""The least RAM that `wrap` accepts is enough for forwards that read others' weights and for gradients of gradients."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from zoo import RESIDENT

import pagoda

WIDTH = 64


class ReadsItsLayers(nn.Module):
    """It reads weights of layers that it never calls, twice each, and two at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in [*self.layers, *self.layers]:
            x = torch.tanh(nn.functional.linear(x, layer.weight, layer.bias))
        pairs = zip(self.layers[:-1], self.layers[1:], strict=True)
        penalty = sum((torch.cat([a.bias, b.bias]) * torch.cat([b.bias, a.bias])).sum() for a, b in pairs)
        return self.layers[3](x).square().mean() + penalty


class Stack(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8)))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x)
    return loss


def penalized(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    penalty: torch.Tensor = loss + slope.square().sum()
    return penalty


def weights(build: Callable[[], nn.Module], loss: Any, memory: pagoda.Memory, policy: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model, optimizer = pagoda.wrap(build(), pagoda.AdamW(lr=1e-2), memory=memory, precision="fp32", activations=policy)
    try:
        for seed in range(2):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed), requires_grad=True)
            loss(model, x).backward()
            optimizer.step()
        found: dict[str, torch.Tensor] = model.state_dict()
        return found
    finally:
        optimizer.close()


@pytest.mark.parametrize(
    ("build", "loss", "policy"),
    [(ReadsItsLayers, loss_of, "keep"), (Stack, penalized, "keep"), (Stack, penalized, "recompute")],
    ids=["reads of layers", "gradient penalty", "gradient penalty, recomputed"],
)
def test_the_least_memory_that_is_accepted_is_enough(build: Any, loss: Any, policy: Any, tmp_path: Path) -> None:
    expected = weights(build, loss, RESIDENT, policy)
    needed = 4096
    while True:
        memory = pagoda.Memory(host=needed, ssd=tmp_path, page_size=4096, unit_limit="17KiB")
        try:
            found = weights(build, loss, memory, policy)
            break
        except pagoda.BudgetError as error:
            if error.needed_bytes is None:  # of a forward or a backward
                raise
            needed = error.needed_bytes
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
