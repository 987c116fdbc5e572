"""Weights are read and written anywhere, as in plain PyTorch, in the least memory that `wrap` accepts."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import torch
from pairwise import each_once
from torch import nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from zoo import ALL_ON_SSD, ARENA, ARENA_ALL_ON_SSD, HOST_WEIGHTS, PAGE, RESIDENT, squeeze

import pagoda
from pagoda.autograd.accesses import Accesses
from pagoda.optimizer import PagedOptimizer
from pagoda.parameters.hidden import Hidden

from .conftest import Wrap

WIDTH, LR, UNIT = 32, 0.125, "5KiB"
IN_PLACE = "in place"
PLACES = (IN_PLACE, HOST_WEIGHTS, ALL_ON_SSD, ARENA, ARENA_ALL_ON_SSD)


class Net(nn.Module):
    """Layers that are units of their own, one of which is frozen, and one that is tied to another."""

    def __init__(self, penalty: "Use | None" = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.layers[2].requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.layers[0].weight
        self._penalty = penalty

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        loss = self.tied(x).square().mean()
        return loss if self._penalty is None else loss + self._penalty(self)


Use = Callable[[Any], Any]


def memory_in(place: str, directory: Path, **options: Any) -> pagoda.Memory:
    if place == IN_PLACE:
        return pagoda.Memory(host="64MiB", unit_limit=UNIT, page_size=PAGE)
    rule = pagoda.SGD(lr=LR)
    return squeeze(Net(), place, directory, precision="fp32", unit_limit=UNIT, rule=rule, clipping=False, **options)


@pytest.fixture
def wrap_net(wrap: Wrap, tmp_path: Path) -> Callable[..., tuple[Any, PagedOptimizer]]:
    """Wraps a net in the least memory of a place."""

    def wrap_net(place: str = ARENA_ALL_ON_SSD, penalty: Use | None = None, **options: Any) -> Any:
        return wrap(Net(penalty), memory_in(place, tmp_path), rule=pagoda.SGD(lr=LR), precision="fp32", **options)

    return wrap_net


def batch(seed: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))


def step_plain(model: nn.Module) -> None:
    """A step of SGD."""
    with torch.no_grad():
        for param in model.parameters():
            if param.grad is not None:
                param.copy_(reference.fused(param.grad, torch.tensor(-LR), param))
                param.grad = None


def assert_same_weights(model: nn.Module, plain: nn.Module) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


# --- penalties ----------------------------------------------------------------------------------------------

PENALTIES: dict[str, Use] = {
    "l2": lambda m: 0.1 * sum(p.square().sum() for p in m.parameters() if p.requires_grad),
    "orthogonality": lambda m: sum(
        (layer.weight @ layer.weight.t() - torch.eye(WIDTH)).square().sum() for layer in m.layers
    ),
    "of-several-units": lambda m: (m.layers[0].weight * m.layers[1].weight).sum() + m.scale.exp(),
    "as-one-vector": lambda m: parameters_to_vector(m.parameters()).norm(),
    "views": lambda m: m.layers[3].weight.t()[1:3].unbind()[1].exp().sum() + m.layers[1].bias.view(2, -1)[0].norm(),
    "cast": lambda m: m.layers[3].weight.double().exp().mean().float(),
    "custom-function": lambda m: Scaled.apply(m.layers[1].weight).sum(),
}


class Scaled(torch.autograd.Function):
    """An operation that torch does not see before it runs."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return weight * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2 * ctx.saved_tensors[0]


@each_once(penalty=[*PENALTIES], inside=[False, True, False], place=PLACES)
def test_penalties_in_the_loss_and_in_forward_have_plain_gradients(
    penalty: str, inside: bool, place: str, wrap_net: Callable[..., Any]
) -> None:
    """Two backward passes a step, with the penalty in each; weights that graphs save pin no memory. Inside a forward,
    views that a program holds do."""
    use = PENALTIES[penalty]
    inside = inside and penalty != "as-one-vector"
    plain = Net(use if inside else None)
    model, optimizer = wrap_net(place, use if inside else None)
    for step in range(2):
        losses = []
        for each in (model, plain):
            for part in range(2):
                loss = each(batch(2 * step + part)) + (0.0 if inside else use(each))
                loss.backward()
                losses.append(loss.detach())
        assert torch.equal(torch.stack(losses[:2]), torch.stack(losses[2:]))
        optimizer.step()
        step_plain(plain)
        assert_same_weights(model, plain)


@each_once(
    options=[
        {"gradient_accumulation_steps": 1},
        {"gradient_accumulation_steps": 1, "max_grad_norm": 1e9},
        {"activations": "recompute"},
    ],
    place=[IN_PLACE, HOST_WEIGHTS],
)
def test_penalties_meet_updates_during_backward_and_recomputation(
    options: dict[str, Any], place: str, wrap: Wrap, tmp_path: Path
) -> None:
    use, plain = PENALTIES["l2"], Net()
    memory = pagoda.Memory(host="64MiB", unit_limit=UNIT, page_size=PAGE)
    if place == HOST_WEIGHTS:
        memory = pagoda.Memory(host="1MiB", ssd=f"{tmp_path}:64MiB", unit_limit=UNIT, page_size=PAGE)
    model, optimizer = wrap(Net(), memory, rule=pagoda.SGD(lr=LR), precision="fp32", **options)
    for step in range(3):
        for each in (model, plain):
            (each(batch(step)) + use(each)).backward()
        optimizer.step()
        step_plain(plain)
        assert_same_weights(model, plain)


def test_a_read_that_an_update_during_backward_has_overtaken_is_refused(wrap_net: Callable[..., Any]) -> None:
    model, optimizer = wrap_net(IN_PLACE, gradient_accumulation_steps=1)
    model(batch(0)).backward()
    with pytest.raises(pagoda.UsageError, match=r"'layers\.4' is needed before .*Paging\(backward_passes=None\)"):
        model.layers[4].weight.norm()
    optimizer.step()


def test_a_backward_after_step_has_no_weights_to_go_back_to(wrap_net: Callable[..., Any]) -> None:
    model, optimizer = wrap_net()
    kept = [model.layers[1].weight.square().sum(), model.layers[1].weight.sum()]
    model(batch(0)).backward()
    optimizer.step()
    with pytest.raises(pagoda.UsageError, match="an update has changed them"):
        kept[0].backward()
    with pytest.raises(pagoda.UsageError, match=r"no function of torch has read it since.*step"):
        kept[1].backward()


# --- reads --------------------------------------------------------------------------------------------------

READS: dict[str, Use] = {
    "equal": lambda m: torch.equal(m.layers[0].weight, m.layers[1].weight),
    "compare": lambda m: m.layers[0].weight == m.layers[1].weight,
    "mean": lambda m: m.layers[1].weight.mean(),
    "item": lambda m: m.scale.item() + float(m.scale),
    "numpy": lambda m: m.layers[1].weight.detach().numpy(),
    "asarray": lambda m: np.asarray(m.layers[1].weight.detach().cpu()),
    "list": lambda m: m.layers[1].bias.tolist(),
    "rows": lambda m: torch.stack([row.norm() for row in m.layers[1].weight]),
    "masked": lambda m: m.layers[1].weight[m.layers[1].weight > 0],
    "averages-at-once": lambda m: torch._foreach_mul([*m.parameters()], 0.5),
    "operator": lambda m: torch.ops.aten.add.Tensor(m.layers[1].weight, m.layers[2].weight),
    "clone": lambda m: m.layers[1].weight.detach().clone(),
    "deepcopy": lambda m: copy.deepcopy(m.layers[1].weight),
    "new-parameter": lambda m: nn.Parameter(m.layers[1].weight.data).sum(),
    "printed": lambda m: f"{m.layers[1].weight} {m.scale.detach():.3f} {m.layers[1].bias!r}",
}


@each_once(read=[*READS], grad=[True, False], place=PLACES)
def test_values_are_those_of_plain_parameters(read: str, grad: bool, place: str, wrap_net: Callable[..., Any]) -> None:
    """Before a step, between backward and step(), and after a step, whose updates come first."""
    plain, (model, optimizer) = Net(), wrap_net(place)
    for when in range(4):
        for each in (model, plain) if when == 1 else ():
            each(batch(when)).backward()
        if when == 2:
            optimizer.step()
            step_plain(plain)
        with torch.set_grad_enabled(grad):
            mine, theirs = READS[read](model), READS[read](plain)
        assert type(mine) is type(theirs)
        assert mine == theirs if read == "printed" else None is torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["AveragedModel", "loop"])
def test_averages_over_parameters_are_those_of_plain_parameters(kind: str, wrap_net: Callable[..., Any]) -> None:
    """One unit is in memory at a time."""
    plain, (model, optimizer) = Net(), wrap_net()
    averages = [AveragedModel(Net(), multi_avg_fn=get_ema_multi_avg_fn(0.9)) for _ in range(2)]
    for step in range(3):
        for each, average in zip((model, plain), averages, strict=True):
            each(batch(step)).backward()
            optimizer.step() if each is model else step_plain(plain)
            if kind == "AveragedModel":
                average.update_parameters(each)
                continue
            with torch.no_grad():
                for value, param in zip(average.parameters(), each.parameters(), strict=True):
                    value.mul_(0.9).add_(param, alpha=0.1)
        for mine, theirs in zip(averages[0].parameters(), averages[1].parameters(), strict=True):
            assert torch.equal(mine, theirs)


def test_reads_in_a_row_of_one_unit_are_one_lease(
    wrap_net: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    leased: list[Any] = []
    access = Accesses._access
    monkeypatch.setattr(Accesses, "_access", lambda self, *of: leased.append(of) or access(self, *of))
    model, _ = wrap_net()
    for layer in model.layers:
        for _ in range(4):
            layer.weight.norm()
            layer.bias.mean()
    assert len(leased) == len(model.layers)


def test_views_are_of_the_weights_as_they_are_when_used(wrap_net: Callable[..., Any]) -> None:
    plain, (model, optimizer) = Net(), wrap_net()
    views = [[m.layers[1].weight.t(), m.layers[1].weight.detach()[2], m.scale.data] for m in (model, plain)]
    assert all(isinstance(view, Hidden) for view in views[0])
    for each in (model, plain):
        each(batch(0)).backward()
    optimizer.step()
    step_plain(plain)
    for mine, theirs in zip(*views, strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(batch(0) @ views[0][0], batch(0) @ views[1][0])


@pytest.mark.parametrize("grad", [True, False])
def test_asynchronous_updates_are_read_as_by_a_forward(grad: bool, wrap: Wrap, tmp_path: Path) -> None:
    """Reads see the weights of the next step. Writes wait for all updates."""
    memory = memory_in(HOST_WEIGHTS, tmp_path, asynchronous=True)
    model, optimizer = wrap(Net(), memory, rule=pagoda.SGD(lr=LR), precision="fp32", update="async")
    plain, weight = Net(), model.layers[1].weight
    before = plain.layers[1].weight.detach().clone()
    for each in (model, plain):
        each(batch(0)).backward()
    optimizer.step()
    step_plain(plain)
    with torch.set_grad_enabled(grad):
        assert torch.equal(weight, before)
    with torch.no_grad():
        weight.mul_(2)
        assert torch.equal(weight, 2 * plain.layers[1].weight)


# --- writes -------------------------------------------------------------------------------------------------

WRITES: dict[str, Use] = {
    "clamp": lambda m: m.layers[1].weight.clamp_(-0.05, 0.05),
    "average-of-data": lambda m: m.layers[1].weight.data.mul_(0.9).add_(m.layers[0].weight.data, alpha=0.1),
    "copy": lambda m: m.layers[1].weight.copy_(m.layers[0].weight),
    "copy-to-frozen": lambda m: m.layers[2].weight.copy_(m.layers[0].weight.detach()),
    "fill-a-row": lambda m: m.layers[1].weight[3].zero_(),
    "index-assignment": lambda m: m.layers[1].weight.data.__setitem__((slice(1, 3), 2), 1.0),
    "masked": lambda m: m.layers[1].weight.__setitem__(m.layers[1].weight > 0, 0.0),
    "of-a-transposed": lambda m: m.layers[1].weight.t()[2].fill_(5.0),
    "operator": lambda m: m.scale.data.__iadd__(1),
    "out": lambda m: torch.clamp(torch.ones(()), 0, 1, out=m.scale.data),
    "all-at-once": lambda m: torch._foreach_mul_([*m.parameters()], 0.5),
    "initialised": lambda m: nn.init.kaiming_uniform_(m.layers[1].weight, generator=torch.Generator().manual_seed(3)),
    "renormalised": lambda m: functional.embedding(torch.tensor([1, 2]), m.layers[1].weight, max_norm=0.1),
}


@each_once(write=[*WRITES], grad=[False, False, True], place=PLACES)
def test_writes_in_place_reach_the_pages(write: str, grad: bool, place: str, wrap_net: Callable[..., Any]) -> None:
    """With gradients they raise what plain PyTorch raises."""
    plain, (model, optimizer) = Net(), wrap_net(place)
    for step in range(3):
        for each in (model, plain):
            each(batch(step)).backward()
        optimizer.step()
        step_plain(plain)
        refused = []
        for each in (model, plain):
            with torch.set_grad_enabled(grad):
                try:
                    WRITES[write](each)
                except RuntimeError as error:
                    refused.append(str(error))
        assert refused[: len(refused) // 2] == refused[len(refused) // 2 :]
        assert_same_weights(model, plain)


def test_elements_that_a_write_leaves_alone_keep_the_lower_half_of_their_master(wrap: Wrap) -> None:
    model, _ = wrap(Net(), RESIDENT)
    before = pagoda.ModelState(model).state_dict()["layers.1.weight"]
    with torch.no_grad():
        model.layers[1].weight[0] = 0.25
    after = pagoda.ModelState(model).state_dict()["layers.1.weight"]
    assert torch.equal(after[1:], before[1:])
    assert bool((after[0] == 0.25).all())


REFUSED: dict[str, Use] = {
    "assign-data": lambda m: setattr(m.layers[1].weight, "data", m.layers[0].weight),
    "cast-the-model": lambda m: m.double(),
    "as-strided": lambda m: m.layers[1].weight.as_strided((2,), (1,), 0),
    "resize": lambda m: m.layers[1].bias.detach().resize_(2),
    "view-of-several": lambda m: torch.broadcast_tensors(m.layers[1].weight, m.layers[0].bias),
    "recorded-write": lambda m: m.layers[2].weight.copy_(m.layers[0].weight),
    "pickled": lambda m: m.layers[1].weight.detach().__reduce_ex__(4),
    "foreign-memory": lambda m: torch.from_dlpack(m.layers[1].weight.detach()),
}


@pytest.mark.parametrize("use", [*REFUSED])
def test_what_cannot_be_exact_is_refused_by_name(use: str, wrap_net: Callable[..., Any]) -> None:
    model, _ = wrap_net()
    with pytest.raises(pagoda.UsageError, match=r"'(scale|layers\.\d\.(weight|bias))'.*(clone|copy_|no_grad)\("):
        REFUSED[use](model)
    assert_same_weights(model, Net())


def test_an_array_of_weights_cannot_be_written_to(wrap_net: Callable[..., Any]) -> None:
    """Where a write would be lost."""
    model, _ = wrap_net()
    with pytest.raises(ValueError, match="read-only"):
        model.layers[1].weight.detach().numpy()[0] = 1.0


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_function_reads_weights_as_it_is(backend: str, wrap_net: Callable[..., Any]) -> None:
    model, optimizer = wrap_net()
    plain = Net()
    penalty = torch.compile(PENALTIES["of-several-units"], backend=backend)
    for net in (model, plain):
        (net(batch(0)) + penalty(net)).backward()
    optimizer.step()
    step_plain(plain)
    assert_same_weights(model, plain)
