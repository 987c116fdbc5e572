"""Blocks that change tensors in place, or more than their output: no activation policy gives other gradients than
torch, and each refuses what torch refuses."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import pagoda

WIDTH = 128  # inputs of 64 KiB may be offloaded
ROWS = 256
POLICIES = ("keep", "recompute", "offload", "recompute+offload", "auto")


class Part(nn.Module):
    """A block. Its subclasses differ in what they change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))


class ChangesWhatItSaved(Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.exp(self.linear(x) * 0.1)
        z = y * self.scale
        y.mul_(2)
        return x + z + torch.sin(y * self.scale)


class ChangesItsInput(Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(0.5)
        return x + torch.tanh(self.linear(x))


class ChangesItsInputUnseen(Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.data.mul_(0.5)
        return x + torch.tanh(self.linear(x))


class ChangesWhatItSavedUnseen(Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        z = y.square()
        y.data.mul_(2)
        return x + torch.tanh(z)


class SavesSparseTensors(Part):
    """As peft's adapters with few trained elements."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        every = torch.arange(WIDTH)
        few = torch.sparse_coo_tensor(torch.stack([every, every.flip(0)]), self.scale, (WIDTH, WIDTH))
        dense = nn.functional.linear(x, self.linear.weight + few)
        return x + torch.tanh(dense) + (few.coalesce().to_sparse_csr() @ x.t()).t()


class AddsToAList(Part):
    def forward(self, x: torch.Tensor, penalties: list[torch.Tensor]) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        penalties.append(y.square().mean())
        return x + y


class Net(nn.Module):
    def __init__(self, kind: type[nn.Module], depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(depth))
        self.takes_list = kind is AddsToAList

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        penalties: list[torch.Tensor] = []
        x = x + 0
        for block in self.blocks:
            x = block(x, penalties) if self.takes_list else block(x)
        return x.square().mean() + sum(penalties)


def trained(
    model: nn.Module, policy: Any, directory: Path, twice: bool = False, around: Any = nullcontext
) -> dict[str, torch.Tensor]:
    """Weights after two steps, the second with what the first has shown."""
    memory = pagoda.Memory(host="64MiB", ssd=directory, page_size=4096)
    model, optimizer = pagoda.wrap(model, pagoda.SGD(lr=0.1), memory=memory, precision="fp32", activations=policy)
    try:
        for seed in range(2):
            x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed), requires_grad=True)
            with around():
                loss = model(x)
                if twice:
                    loss.backward(retain_graph=True)
                loss.backward()
            optimizer.step()
        weights: dict[str, torch.Tensor] = model.state_dict()
        return weights
    finally:
        optimizer.close()


def build(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return Net(kind)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_saved_tensor_that_the_block_changes_is_refused_as_in_torch(policy: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        build(ChangesWhatItSaved)(torch.ones(ROWS, WIDTH)).backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        trained(build(ChangesWhatItSaved), policy, tmp_path)


@pytest.mark.parametrize("policy", POLICIES[1:])
@pytest.mark.parametrize(
    "kind", [ChangesItsInput, ChangesItsInputUnseen, ChangesWhatItSavedUnseen, SavesSparseTensors, AddsToAList]
)
def test_what_torch_allows_has_the_bits_of_keeping_everything(kind: Any, policy: str, tmp_path: Path) -> None:
    expected = trained(build(kind), "keep", tmp_path, twice=True)
    found = trained(build(kind), policy, tmp_path, twice=True)
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


def test_the_input_of_a_recomputed_block_that_changes_after_it_is_refused_by_name(tmp_path: Path) -> None:
    class Later(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + 0
            y = self.blocks[0](x)
            x.add_(1)
            return (self.blocks[1](y) + x).square().mean()

    class Sums(Part):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x) * self.scale  # saves no x

    torch.manual_seed(0)
    trained(Later(Sums), "keep", tmp_path)
    with pytest.raises(pagoda.UsageError, match=r"'blocks\.0' was changed in place before backward.*'keep'"):
        trained(Later(Sums), "recompute", tmp_path)


def test_inputs_in_one_memory_that_the_block_changes_are_refused_by_name(tmp_path: Path) -> None:
    class Two(Part):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            x.mul_(0.5)
            return self.linear(x) + y

    class Same(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + 0
            return sum(block(x, x.view(-1, WIDTH)).square().mean() for block in self.blocks)

    with pytest.raises(pagoda.UsageError, match=r"'blocks\.0' changes its inputs in place, and some of them share"):
        trained(Same(Two), "recompute", tmp_path)


@pytest.mark.parametrize("policy", ["recompute", "auto"])
@pytest.mark.parametrize("inside", [True, False])
def test_cached_parametrizations_are_recomputed_as_they_were_cached(policy: str, inside: bool, tmp_path: Path) -> None:
    """Also if the weight was cached before the block, and whether or not backward runs while the cache lives."""

    class Scaled(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return torch.tanh(weight)

    class Cached(Part):
        def __init__(self) -> None:
            super().__init__()
            parametrize.register_parametrization(self.linear, "weight", Scaled())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(self.linear(self.linear(x)))

    class Shared(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with parametrize.cached():
                return super().forward(x + self.blocks[1].linear(x))

    results = []
    for each in ("keep", policy):
        torch.manual_seed(0)
        around = parametrize.cached if inside else nullcontext
        results.append(trained(Shared(Cached), each, tmp_path, around=around))
    for name, weight in results[0].items():
        assert torch.equal(results[1][name], weight), name
