"""Outside its modules' forward a parameter has no values of its own, and a forward may not write to it."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pairwise import each_once
from runtime.conftest import Wrap
from torch import nn
from torch.nn import functional
from torch.testing._internal.two_tensor import TwoTensor
from zoo import PAGE, RESIDENT

import pagoda
from pagoda.parameters.hidden import as_plain, hide

WIDTH = 16
ARENA = pagoda.Memory(host="64MiB", device="cpu:8MiB", unit_limit="16KiB", page_size=PAGE)


class Scaled(nn.Module):
    """Two layers and a parameter of one element."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.scale.dtype)
        return self.last(torch.tanh(self.first(x))) * self.scale


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)).float().square().mean()


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = loss_of(model)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def test_what_asks_for_no_value_of_a_hidden_parameter_is_answered(wrap: Wrap) -> None:
    model = Scaled()
    model.first.weight.mark = "mine"
    model, optimizer = wrap(model)
    twin, twin_optimizer = wrap(Scaled())
    weight = model.first.weight
    assert isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.dtype, weight.device.type) == ((WIDTH, WIDTH), torch.bfloat16, "cpu")
    assert weight.is_leaf
    assert weight.requires_grad
    assert weight.grad is None
    assert weight.numel() == len(weight) * weight.size(1)
    assert weight.data.shape == weight.detach().shape == weight.float().shape
    assert torch.equal(torch.zeros_like(weight), torch.zeros(WIDTH, WIDTH, dtype=torch.bfloat16))
    assert torch.equal(weight.new_ones(2), torch.ones(2, dtype=torch.bfloat16))
    assert torch.equal(torch.ones(2).to(weight), torch.ones(2, dtype=torch.bfloat16))
    assert torch.equal(torch.ones(2).type_as(weight.data), torch.ones(2, dtype=torch.bfloat16))
    assert torch.equal(torch.ones(WIDTH * WIDTH).view_as(weight), torch.ones(WIDTH, WIDTH))
    assert weight in {weight}
    torch.optim.AdamW(model.parameters())  # looks at each of them
    model.to("cpu").requires_grad_(True)
    (grad,) = torch.autograd.grad(loss_of(model), [weight])
    assert grad.isfinite().all()
    optimizer.zero_grad()
    assert step(model, optimizer) == step(twin, twin_optimizer)
    weight.requires_grad_(False)
    step(model, optimizer)
    assert model.first.weight.mark == "mine"


def test_hidden_tensors_have_the_strides_of_their_values(wrap: Wrap) -> None:
    plain = nn.Linear(16, 32)
    model, _ = wrap(copy.deepcopy(plain), precision="fp32")
    for each in (model, plain):
        each(torch.ones(2, 16)).sum().backward()
    views: list[Callable[[torch.Tensor], Any]] = [
        *(lambda w: w, lambda w: w.grad, lambda w: w.data.view(-1)),
        *(lambda w: w.t(), lambda w: w.T.unsqueeze(0), lambda w: w[1:], lambda w: w[3]),
    ]
    for view in views:
        hidden, wanted = view(model.weight), view(plain.weight)
        assert (hidden.stride(), hidden.stride(0)) == (wanted.stride(), wanted.stride(0))
        assert (hidden.is_contiguous(), hidden.storage_offset()) == (wanted.is_contiguous(), wanted.storage_offset())


# --- data that is assigned ----------------------------------------------------------------------------------


def clip_weights(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.data.clamp(-0.1, 0.1)


def evaluate_an_average(model: nn.Module) -> None:
    """The averages take the weights' place for a while. What `data` was before comes back."""
    backup = {}
    for name, param in model.named_parameters():
        backup[name] = param.data
        param.data = 0.9 * param.data + 0.01
    with torch.no_grad():
        model.seen = [*getattr(model, "seen", ()), loss_of(model)]
    for name, param in model.named_parameters():
        param.data = backup[name]


def keep_views(model: nn.Module) -> None:
    weight = model.first.weight
    views = weight.data, weight.view(-1)[:3], weight[0].detach()
    weight.data = torch.full_like(weight, 0.1)
    model.seen = [*getattr(model, "seen", ()), *(view.detach().clone() for view in views), weight.detach().clone()]


ASSIGNMENTS: dict[str, Callable[[nn.Module], object]] = {
    "clipped": clip_weights,
    "average": evaluate_an_average,
    "older views": keep_views,
    "transposed": lambda model: setattr(model.first.weight, "data", model.first.weight.data.t()),
    "of all": lambda model: model._apply(lambda tensor: tensor * 0.5),
}


@each_once(change=[*ASSIGNMENTS], memory=[RESIDENT, ARENA])
def test_data_is_assigned_between_steps_as_in_plain_pytorch(change: str, memory: pagoda.Memory, wrap: Wrap) -> None:
    plain = Scaled()
    model, optimizer = wrap(Scaled(), memory, rule=pagoda.Optim(torch.optim.SGD, lr=0.1), precision="fp32")
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        assert step(model, optimizer) == step(plain, theirs)
        ASSIGNMENTS[change](model)
        ASSIGNMENTS[change](plain)
    for name, param in plain.named_parameters():
        assert torch.equal(model.get_parameter(name).detach().clone(), param)
    for mine, other in zip(getattr(model, "seen", ()), getattr(plain, "seen", ()), strict=True):
        assert torch.equal(mine, other)


def test_data_that_other_weights_would_share_or_that_differs_in_form_is_refused(wrap: Wrap) -> None:
    model, _ = wrap(Scaled(), precision="fp32")
    weight = model.first.weight
    for other in (model.last.weight, model.last.weight.data, torch.ones(3), torch.ones_like(weight).double()):
        with pytest.raises(pagoda.UsageError, match=r"'first\.weight' cannot be given this tensor as its data"):
            weight.data = other


# --- forwards that write ------------------------------------------------------------------------------------


class Writes(nn.Module):
    """A layer whose forward writes to a parameter of its own in some way, while it is training."""

    def __init__(self, write: Callable[[nn.Parameter], object], frozen: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.codes = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=not frozen)
        self._write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self._write(self.codes)
        return self.linear(x.to(self.codes.dtype)) @ self.codes


WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "clamp": lambda p: p.clamp_(-0.1, 0.1),
    "clamp-data": lambda p: p.data.clamp_(-0.1, 0.1),
    "assign-data": lambda p: setattr(p, "data", torch.clamp(p.data, -0.1, 0.1)),
    "average": lambda p: p.data.mul_(0.9).add_(torch.ones_like(p), alpha=0.1),
    "a-row": lambda p: p[3].zero_(),
    "a-row-of-data": lambda p: p.data[3].copy_(torch.ones(WIDTH)),
    "detached": lambda p: p.detach().lerp_(torch.ones_like(p), 0.1),
    "renormalized-embedding": lambda p: functional.embedding(torch.tensor([1, 2]), p, max_norm=0.1),
}


@each_once(write=[*WRITES], frozen=[False, True], memory=[RESIDENT, RESIDENT, ARENA])
def test_a_write_inside_a_forward_is_refused(write: str, frozen: bool, memory: pagoda.Memory, wrap: Wrap) -> None:
    """It would be lost, or reach the high half of the master alone. To weights that were copied it leaves no trace."""
    model, optimizer = wrap(Writes(WRITES[write], frozen), memory)
    twin, twin_optimizer = wrap(Writes(lambda p: p.data.abs(), frozen), memory)
    with pytest.raises(pagoda.UsageError, match=r"'codes'.*inside a forward.*modify=True"):
        loss_of(model)
    model._write = twin._write
    losses = [step(model, optimizer) for _ in range(3)]
    assert memory is RESIDENT or losses == [step(twin, twin_optimizer) for _ in range(3)]


def test_a_write_inside_a_forward_is_refused_while_an_error_is_handled(wrap: Wrap) -> None:
    model, _ = wrap(Writes(WRITES["clamp"], False), ARENA)
    try:
        raise LookupError
    except LookupError:
        with pytest.raises(pagoda.UsageError, match="inside a forward"):
            loss_of(model)


@pytest.mark.parametrize("memory", [RESIDENT, ARENA], ids=["ram", "arena"])
def test_a_write_to_the_data_of_another_modules_parameter_in_a_forward_is_refused(
    memory: pagoda.Memory, wrap: Wrap
) -> None:
    class Clamping(Scaled):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last.weight.data.clamp_(-0.1, 0.1)
            return super().forward(x)

    model, _ = wrap(Clamping(), memory)
    with pytest.raises(pagoda.UsageError, match=r"'last\.weight'.*inside a forward.*modify=True"):
        loss_of(model)


def test_a_write_inside_a_compiled_forward_is_refused(wrap: Wrap) -> None:
    class Renormalized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(WIDTH, WIDTH)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.table.weight.clamp_(-0.1, 0.1)
            return self.table(ids)

    model = Renormalized()
    model.compile(backend="aot_eager")
    model, _ = wrap(model)
    with pytest.raises(pagoda.UsageError, match=r"'table\.weight'.*inside a forward"):
        model(torch.tensor([1, 2]))


def test_layers_in_tiles_refuse_what_asks_for_the_values_of_the_whole(wrap: Wrap) -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 8))
    model, _ = wrap(model, pagoda.Memory(host="64MiB", page_size=PAGE), tiles=pagoda.Tiles(tile_limit="8KiB"))
    weight = model[0].weight
    assert weight.shape == (256, 64)
    with pytest.raises(pagoda.UsageError, match=r"gathered"):
        weight.abs()


def test_a_hidden_tensor_of_a_class_with_its_own_dispatch_keeps_it() -> None:
    """As quantized tensors of torchao have."""
    hidden = hide(TwoTensor(torch.ones(2), torch.zeros(2)), "both")
    with as_plain():
        copy = hidden.detach()
    assert torch.equal(copy.a, torch.ones(2))
