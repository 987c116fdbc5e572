"""Models that torch.compile had before `wrap`: the bits of the compiled plain run, and names without `_orig_mod`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from zoo import losses_of

import pagoda
from pagoda.config.training import ActivationMode

RULE = pagoda.Optim(torch.optim.SGD, lr=0.05)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        y: torch.Tensor = self.head(x)
        return y


def compiled(how: str, backend: str) -> Any:
    torch.manual_seed(0)
    model = Model()
    if how == "torch.compile of layers":
        for index, layer in enumerate(model.layers):
            model.layers[index] = torch.compile(layer, backend=backend)
    elif how == "compile() of layers":
        for layer in model.layers:
            layer.compile(backend=backend)
    elif how == "compile() of all":
        model.compile(backend=backend)
    else:
        return torch.compile(model, backend=backend)
    return model


def losses(model: Any, optimizer: Any) -> list[float]:
    torch.manual_seed(1)
    return losses_of(lambda _: model(torch.randn(4, 32)).square().mean(), optimizer)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("how", "activations"),
    [
        ("torch.compile of layers", "recompute"),
        pytest.param("compile() of layers", "offload", marks=pytest.mark.slow),
        pytest.param("compile() of all", "keep", marks=pytest.mark.slow),
        ("torch.compile of all", "keep"),
    ],
)
def test_a_compiled_model_has_the_bits_of_its_plain_run(
    how: str, activations: ActivationMode, backend: str, tmp_path: Path
) -> None:
    torch.compiler.reset()
    plain = compiled(how, backend)
    expected = losses(plain, torch.optim.SGD(plain.parameters(), lr=0.05))
    torch.compiler.reset()
    given = compiled(how, backend)
    host = "352KiB" if activations == "offload" else "160KiB"
    memory = pagoda.Memory(host=host, ssd=f"{tmp_path}:16MiB", page_size=4096, unit_limit="24KiB")
    model, optimizer = pagoda.wrap(given, RULE, memory=memory, precision="fp32", activations=activations)
    with optimizer:
        assert losses(model, optimizer) == expected
        assert model.state_dict().keys() == Model().state_dict().keys()
        optimizer.save_checkpoint(tmp_path / "checkpoint")
        x = torch.randn(2, 32)
        with torch.no_grad():
            seen = model(x)
            assert torch.equal(given(x), seen), "what was given runs the same"
    uncompiled, other = pagoda.wrap(Model(), RULE, memory=memory, precision="fp32")
    with other, torch.no_grad():
        other.load_checkpoint(tmp_path / "checkpoint")
        torch.testing.assert_close(uncompiled(x), seen)
