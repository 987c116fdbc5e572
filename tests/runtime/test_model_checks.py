"""Models that `wrap` refuses, or of which it says what it changes."""

import warnings

import pytest
import torch
from torch import nn

import pagoda

from .conftest import Wrap


class Routed(nn.Module):
    """A router in fp32 inside a model in bf16, as some mixtures of experts have it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16, dtype=torch.bfloat16)
        self.router = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x.to(self.layer.weight.dtype))
        return self.router(hidden.to(self.router.weight.dtype)).float().square().mean()


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", "bfloat16"), ("fp32", "float32"), ("fp16", "float16")])
def test_a_model_that_mixes_dtypes_is_refused_by_name(precision: str, dtype: str, wrap: Wrap) -> None:
    model = Routed()
    message = (
        rf"'layer\.weight' in torch\.bfloat16 and 'router\.weight' in torch\.float32.*torch\.{dtype}.*model\.float"
    )
    with pytest.raises(pagoda.ConfigError, match=message):
        wrap(model, precision=precision)
    assert model.layer.weight.dtype is torch.bfloat16
    assert model.router.weight.dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_model_of_one_dtype_is_taken_without_a_word(precision: str, dtype: torch.dtype, wrap: Wrap) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, optimizer = wrap(Routed().to(dtype), precision=precision)
    model(torch.ones(2, 16)).backward()
    optimizer.step()


def test_adapters_in_fp32_over_frozen_weights_in_bf16_train_and_are_told_of_their_dtype(wrap: Wrap) -> None:
    """What peft makes over a model in bf16."""
    model = Routed()
    model.layer.requires_grad_(False)
    start = model.router.weight.detach().clone()
    with pytest.warns(
        UserWarning, match=r"'layer\.weight' in torch\.bfloat16 and 'router\.weight'.*all of them in torch\."
    ):
        model, optimizer = wrap(model)
    assert torch.equal(model.state_dict()["router.weight"], start.bfloat16())
    model(torch.ones(2, 16)).backward()
    optimizer.step()
    assert not torch.equal(model.state_dict()["router.weight"], start.bfloat16())


def test_frozen_weights_of_two_dtypes_are_refused(wrap: Wrap) -> None:
    with pytest.raises(pagoda.ConfigError, match="mixes dtypes"):
        wrap(nn.Sequential(Routed().requires_grad_(False), nn.Linear(4, 4)))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("whole", [False, True])
def test_modules_of_torchscript_are_refused_by_name(whole: bool, wrap: Wrap) -> None:
    scripted = torch.jit.script(nn.Linear(4, 4))
    model = scripted if whole else nn.Sequential(nn.Linear(4, 4), scripted)
    with pytest.raises(pagoda.ConfigError, match=("The model" if whole else "'1'") + r".*TorchScript.*torch\.compile"):
        wrap(model)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_modules_of_torchscript_without_parameters_are_left_alone(wrap: Wrap) -> None:
    model, optimizer = wrap(nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Tanh())), precision="fp32")
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
