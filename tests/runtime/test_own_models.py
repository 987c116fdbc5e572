"""What models and loops of users do that transformers' do not: torch's layers, penalties, gradients by hand, copies."""

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn
from zoo import PAGE, RESIDENT

import pagoda

from .conftest import Wrap
from .loops import WIDTH, Layers

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
        return self.head(self.stem(x)[0]).square().mean()  # type: ignore[no-any-return]


class Attentive(nn.Module):
    """torch's attention reads the weights of its output projection without calling it."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x).square().mean()  # type: ignore[no-any-return]


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
    """A parent that takes the weights of a child in a method of its own, and asks others what they are like."""

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
        return nn.functional.linear(this.table.of(x), this.table.of.weight)  # type: ignore[operator,arg-type,union-attr]


def test_a_parent_owns_what_it_reads_and_not_what_it_only_asks_about(wrap: Wrap) -> None:
    model, _ = wrap(TiedByHand(), SMALL_UNITS)
    units = {unit.module: [slot.param.name for slot in unit.slots] for unit in pagoda.plan_of(model).units}
    assert units[""] == ["table.of.weight"]
    assert {"layers.0", "layers.1", "layers.2"} < units.keys()


def losses_in_torch(model: nn.Module, steps: int) -> list[float]:
    """A final loss without gradients, in evaluation, ends the list."""
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2, weight_decay=0.1)
    return _losses(model, optimizer, steps)


def _losses(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(X)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        return [*losses, model(X).item()]


@pytest.mark.parametrize("memory", [SMALL_UNITS, ARENA], ids=["host", "arena"])
@pytest.mark.parametrize("build", [Recurrent, Attentive, Held, TiedByHand])
def test_layers_of_torch_train_as_in_torch(build: Callable[[], nn.Module], memory: pagoda.Memory, wrap: Wrap) -> None:
    torch.manual_seed(0)
    model = build()
    twin = copy.deepcopy(model)
    model, optimizer = wrap(model, memory, precision="fp32")
    assert _losses(model, optimizer, 3) == pytest.approx(losses_in_torch(twin, 3), rel=1e-4)


# --- penalties ----------------------------------------------------------------------------------------------


def test_a_penalty_on_gathered_parameters_has_its_gradient(wrap: Wrap) -> None:
    """After the block the parameters are placeholders again, and NaN has no sign that a gradient could have."""

    def penalty(model: nn.Module) -> torch.Tensor:
        return torch.stack([param.abs().sum() for param in model.parameters()]).sum()

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    torch.manual_seed(0)
    model: nn.Module = Layers()
    twin = copy.deepcopy(model)
    plain = torch.optim.AdamW(twin.parameters(), lr=1e-2, weight_decay=0.1)
    model, optimizer = wrap(model, SMALL_UNITS, precision="fp32")
    for _ in range(3):
        step(twin, plain, twin(X[0], [0, 1]) + penalty(twin))
        loss = model(X[0], [0, 1])
        with pagoda.gathered(model):
            loss = loss + penalty(model)
        step(model, optimizer, loss)
    weights = model.state_dict()
    for name, expected in twin.state_dict().items():
        torch.testing.assert_close(weights[name], expected, rtol=1e-4, atol=1e-5)


# --- gradients by hand --------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["in-place-of-backward", "before-backward", "after-backward"])
def test_a_gradient_that_was_set_by_hand_is_refused(when: str, wrap: Wrap) -> None:
    model, optimizer = wrap(Layers())
    param = next(model.parameters())

    def step() -> None:
        if when != "after-backward":
            param.grad = torch.ones_like(param)
        if when != "in-place-of-backward":
            model(X[0], [0, 1]).backward()
        if when == "after-backward":
            param.grad = torch.ones_like(param)
        optimizer.step()

    before = model.state_dict()
    with pytest.raises(pagoda.UsageError, match="set by hand"):
        step()
    optimizer.zero_grad()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model(X[0], [0, 1]).backward()
    optimizer.step()


# --- copies -------------------------------------------------------------------------------------------------

COPIES: dict[str, Callable[[nn.Module, torch.optim.Optimizer], object]] = {
    "deepcopy": lambda model, optimizer: copy.deepcopy(model),
    "deepcopy-of-a-layer": lambda model, optimizer: copy.deepcopy(model.layers[0]),  # type: ignore[index]
    "average": lambda model, optimizer: torch.optim.swa_utils.AveragedModel(model),
    "pickle": lambda model, optimizer: pickle.dumps(model),
    "torch-save": lambda model, optimizer: torch.save(model, io.BytesIO()),
    "parameters": lambda model, optimizer: torch.save([*model.parameters()], io.BytesIO()),
    "optimizer": lambda model, optimizer: pickle.dumps(optimizer),
}


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_would_have_no_weights_and_is_refused(how: str, wrap: Wrap) -> None:
    model, optimizer = wrap(Layers())
    with pytest.raises(pagoda.UsageError, match="state_dict"):
        COPIES[how](model, optimizer)
    model(X[0], [0, 1]).backward()
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


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (_over_one_memory, r"layers\.0\.0\.weight.*layers\.1\.0\.weight.*same memory"),
        (_made_for_inference, "inference_mode"),
        (lambda: nn.Sequential(nn.LazyLinear(3)), "no shape yet"),
        (nn.Tanh, "no parameters: there is nothing to train"),
        (_complex, r"'phase' is torch\.complex64"),
        (lambda: "a model", "takes a torch.nn.Module"),
    ],
)
def test_models_that_would_train_otherwise_than_in_torch_are_refused(
    build: Callable[[], nn.Module], message: str
) -> None:
    with pytest.raises(pagoda.ConfigError, match=message):
        pagoda.wrap(build(), pagoda.AdamW(), memory=RESIDENT)


# --- what would be lost, or run wrongly ---------------------------------------------------------------------

WRITES: dict[str, Callable[[nn.Module], object]] = {
    "cast": lambda model: model.half(),
    "data": lambda model: setattr(model.layers[0][0].weight, "data", torch.ones(WIDTH, WIDTH)),  # type: ignore[index]
}


@pytest.mark.parametrize("how", WRITES)
def test_what_is_written_to_a_placeholder_is_refused(how: str, wrap: Wrap) -> None:
    model, optimizer = wrap(Layers())

    def write_and_run() -> None:
        WRITES[how](model)
        model(X[0], [0])

    with pytest.raises(pagoda.UsageError, match=r"layers\.0\.0\.(weight|bias).*modify=True"):
        write_and_run()
    model(X[0], [0]).backward()
    optimizer.step()


@pytest.mark.parametrize(
    "transform", [torch.func.vmap, torch.func.grad, lambda f: lambda x: torch.func.jvp(f, (x,), (x,))]
)
def test_transforms_of_functions_are_refused(transform: Callable[..., Callable[..., object]], wrap: Wrap) -> None:
    model, optimizer = wrap(Layers())
    with pytest.raises(pagoda.UsageError, match=r"torch\.func"):
        transform(lambda x: model(x, [0, 1]))(X[0])
    model(X[0], [0, 1]).backward()
    optimizer.step()
