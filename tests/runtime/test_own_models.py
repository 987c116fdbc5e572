"""What models and loops of users do that transformers' do not: torch's layers, penalties, gradients by hand, copies."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from pairwise import each_once
from torch import nn
from zoo import PAGE, RESIDENT, assert_equal, losses_of

import pagoda

from .conftest import Wrap
from .loops import WIDTH, Layers, backward, layers

SMALL_UNITS = pagoda.Memory(host="64MiB", unit_limit="16KiB", page_size=PAGE)
ARENA = pagoda.Memory(host="64MiB", device="cpu:8MiB", unit_limit="16KiB", page_size=PAGE)
X = torch.linspace(-1, 1, 2 * 3 * WIDTH).view(2, 3, WIDTH)


class Recurrent(nn.Module):
    """torch keeps the weights of an LSTM in a list beside the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True).requires_grad_(False)
        self.stem.weight_hh_l1.requires_grad_(True)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.stem(x)[0]).square().mean()


class Attentive(nn.Module):
    """torch's attention reads the weights of its output projection without calling it."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x).square().mean()


class Held(nn.Module):
    """Parameters in torch's lists, nested and shared: these are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.groups = nn.ModuleList(
            nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH) for _ in range(2)) for _ in range(2)
        )
        self.scales = nn.ParameterDict({"in": nn.Parameter(torch.ones(WIDTH)), "out": self.layers[0].bias})
        self.alias = self.groups[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scales["in"] + self.scales["out"]
        for layer, group in zip(self.layers, self.groups, strict=True):
            x = torch.tanh(layer(x) @ group[0]) @ group[1] + x @ self.alias[0]
        return x.square().mean()


class TiedByHand(nn.Module):
    """A parent that uses the weights of a child which it also calls."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.ModuleDict({"of": nn.Linear(WIDTH, WIDTH, bias=False)})
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last = self.layers[2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.last.weight.dtype)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self._head(x).square().mean()

    def _head(this, x: torch.Tensor) -> torch.Tensor:  # noqa: N805
        return nn.functional.linear(this.table.of(x), this.table.of.weight)


def _losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Of three steps, and of an evaluation without gradients."""
    losses = losses_of(lambda _: model(X), optimizer)
    model.eval()
    with torch.no_grad():
        return [*losses, model(X).item()]


@each_once(build=[Recurrent, Attentive, Held, TiedByHand], memory=[ARENA, SMALL_UNITS])
def test_layers_of_torch_train_as_in_torch(build: Callable[[], nn.Module], memory: pagoda.Memory, wrap: Wrap) -> None:
    torch.manual_seed(0)
    model = build()
    twin = copy.deepcopy(model)
    trained = [param for param in twin.parameters() if param.requires_grad]
    expected = _losses(twin, torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1))
    assert _losses(*wrap(model, memory, precision="fp32")) == pytest.approx(expected, rel=1e-4)


def test_a_model_in_channels_last_has_the_bits_of_torch_if_its_inputs_are_in_it(wrap: Wrap) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.Conv2d(8, 4, 3)).to(memory_format=torch.channels_last)
    twin, x = copy.deepcopy(model), torch.randn(2, 3, 12, 12).to(memory_format=torch.channels_last)
    paged, _ = wrap(model, RESIDENT, precision="fp32")
    (expected := twin(x)).square().sum().backward()
    (found := paged(x)).square().sum().backward()
    assert torch.equal(found, expected)
    assert found.is_contiguous(memory_format=torch.channels_last)
    for mine, theirs in zip(paged.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


# --- gradients by hand --------------------------------------------------------------------------------------


@pytest.mark.parametrize("drop", [lambda optimizer: optimizer.zero_grad(), lambda optimizer: optimizer.step()])
def test_a_gradient_that_was_dropped_or_used_cannot_be_put_back(drop: Any, wrap: Wrap) -> None:
    model, optimizer = wrap(Layers())
    backward(model, 0)
    param = next(model.parameters())
    kept = param.grad
    drop(optimizer)
    with pytest.raises(pagoda.UsageError, match=r"gone.*clone\(\)"):
        param.grad = kept
    backward(model, 0)
    optimizer.step()


def test_a_gradient_that_was_set_where_weights_are_in_memory_is_one_like_others(wrap: Wrap) -> None:
    models = [wrap(layers()), wrap(layers())]
    for index, (model, optimizer) in enumerate(models):
        backward(model, 0)
        param = next(model.parameters())
        with pagoda.gathered(param) if index else nullcontext():
            param.grad = torch.ones_like(param)
        optimizer.step()
    assert_equal(models[0][0].state_dict(), models[1][0].state_dict())


# --- copies -------------------------------------------------------------------------------------------------

COPIES: dict[str, Callable[[nn.Module, torch.optim.Optimizer], object]] = {
    "deepcopy": lambda model, optimizer: copy.deepcopy(model),
    "deepcopy-of-a-layer": lambda model, optimizer: copy.deepcopy(model.layers[0]),
    "average": lambda model, optimizer: torch.optim.swa_utils.AveragedModel(model),
    "pickle": lambda model, optimizer: pickle.dumps(model),
    "torch-save": lambda model, optimizer: torch.save(model, io.BytesIO()),
    "parameters": lambda model, optimizer: torch.save([*model.parameters()], io.BytesIO()),
    "optimizer": lambda model, optimizer: pickle.dumps(optimizer),
}


def test_a_copy_would_have_no_weights_and_is_refused(wrap: Wrap) -> None:
    model, optimizer = wrap(Layers())
    for copied in COPIES.values():
        with pytest.raises(pagoda.UsageError, match="state_dict"):
            copied(model, optimizer)
    backward(model, 0)
    optimizer.step()


# --- models and settings that cannot be meant ---------------------------------------------------------------


def _over_one_memory() -> nn.Module:
    model = Layers()
    model.layers[1][0].weight.data = model.layers[0][0].weight.data
    return model


def _made_for_inference() -> nn.Module:
    with torch.inference_mode():
        return Layers()


def _complex() -> nn.Module:
    model = Layers()
    model.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    return model


REFUSED: tuple[tuple[Callable[[], Any], str], ...] = (
    (_over_one_memory, r"layers\.0\.0\.weight.*layers\.1\.0\.weight.*same memory"),
    (_made_for_inference, "inference_mode"),
    (lambda: nn.Sequential(nn.LazyLinear(3)), "no shape yet"),
    (nn.Tanh, "no parameters to train"),
    (_complex, r"'phase' is torch\.complex64"),
    (lambda: "a model", "takes a torch.nn.Module"),
)


def test_models_that_would_train_otherwise_than_in_torch_are_refused() -> None:
    for build, message in REFUSED:
        with pytest.raises(pagoda.ConfigError, match=message):
            pagoda.wrap(build(), pagoda.AdamW(), memory=RESIDENT, precision="bf16")


# --- what would be lost, or run wrongly ---------------------------------------------------------------------


TRANSFORMS: tuple[Any, ...] = (torch.func.vmap, torch.func.grad, lambda f: lambda x: torch.func.jvp(f, (x,), (x,)))


def test_casts_and_transforms_of_functions_are_refused(wrap: Wrap) -> None:
    model, optimizer = wrap(Layers())
    for transform in TRANSFORMS:
        with pytest.raises(pagoda.UsageError, match=r"torch\.func"):
            transform(lambda x: model(x, [0, 1]))(X[0])
    with pytest.raises(pagoda.UsageError, match=r"layers\.0\.0\.(weight|bias).*modify=True"):
        model.half()(X[0], [0])
    backward(model, 0, (0,))
    optimizer.step()


# --- dtypes and TorchScript ----------------------------------------------------------------------------------


class Routed(nn.Module):
    """A router in fp32 inside a model in bf16, as some mixtures of experts have it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16, dtype=torch.bfloat16)
        self.router = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x.to(self.layer.weight.dtype))
        return self.router(hidden.to(self.router.weight.dtype)).float().square().mean()


def test_an_explicit_precision_converts_a_model_that_mixes_dtypes_and_says_so(wrap: Wrap) -> None:
    """And one of one dtype, whichever, without a word. A trained parameter in fp32 keeps its master."""
    for precision, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        model = Routed()
        start = model.router.weight.detach().to(dtype)
        message = rf"'layer\.weight' in torch\.bfloat16 and 'router\.weight' in torch\.float32.*to {dtype}.*[Ww]ithout"
        with pytest.warns(UserWarning, match=message):
            model, optimizer = wrap(model, precision=precision)
        assert {param.dtype for param in model.parameters()} == {dtype}
        assert torch.equal(model.state_dict()["router.weight"], start)
        model(torch.ones(2, 16)).backward()
        optimizer.step()
        assert not torch.equal(model.state_dict()["router.weight"], start)
        for own in (torch.bfloat16, torch.float32, torch.float16):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                model, optimizer = wrap(Routed().to(own), precision=precision)
            model(torch.ones(2, 16)).backward()
            optimizer.step()


def test_dtypes_in_which_pagoda_does_not_compute_are_refused_by_name(wrap: Wrap) -> None:
    with pytest.raises(pagoda.ConfigError, match=r"'weight' in torch\.float64.*precision.*model\.float"):
        wrap(nn.Linear(4, 4).double(), precision=None)
    model, optimizer = wrap(nn.Linear(4, 4).double(), precision="fp32")
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    stored = nn.Linear(4, 4).requires_grad_(False).to(torch.float8_e4m3fn)
    for precision in ("bf16", None):
        with pytest.raises(pagoda.ConfigError, match=r"'0\.weight' in torch\.float8_e4m3fn.*torchao.*Float8WeightOnly"):
            wrap(nn.Sequential(stored, nn.Linear(4, 4)), precision=precision)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_modules_of_torchscript_are_refused_by_name_if_they_have_parameters(wrap: Wrap) -> None:
    scripted = torch.jit.script(nn.Linear(4, 4))
    for model, named in ((scripted, "The model"), (nn.Sequential(nn.Linear(4, 4), scripted), "'1'")):
        with pytest.raises(pagoda.ConfigError, match=rf"{named}.*TorchScript.*torch\.compile"):
            wrap(model)
    model, optimizer = wrap(nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Tanh())), precision="fp32")
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
