"""Optimizers of other packages train in pages with their own bits, or are refused: `make test-all`, where installed.

`pip install schedulefree prodigyopt pytorch_optimizer adam-mini`.
"""

from typing import Any

import pytest
import torch
from torch import nn
from zoo import losses_of

import pagoda
from nightly.in_pages import assert_same_weights, in_pages

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
RUN: dict[tuple[str, str], dict[str, Any]] = {
    ("schedulefree", "AdamWScheduleFree"): {"lr": 1e-2, "warmup_steps": 2, "weight_decay": 0.1},
    ("schedulefree", "SGDScheduleFree"): {"lr": 0.1},
    ("schedulefree", "RAdamScheduleFree"): {"lr": 1e-2},
    ("pytorch_optimizer", "ADOPT"): {"lr": 1e-2},
    ("pytorch_optimizer", "SOAP"): {"lr": 1e-2, "precondition_frequency": 2},
    ("pytorch_optimizer", "AdEMAMix"): {"lr": 1e-2},
    ("pytorch_optimizer", "MARS"): {"lr": 1e-2},
    ("pytorch_optimizer", "CAME"): {"lr": 1e-2},
}
REFUSED = {
    ("schedulefree", "AdamWScheduleFreeClosure"): "closure",
    ("prodigyopt", "Prodigy"): "in param_groups from all parameters",
    ("pytorch_optimizer", "Prodigy"): "in param_groups from all parameters",
    ("adam_mini", "Adam_mini"): "its constructor takes 'named_parameters'",
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 24, bias=False), nn.LayerNorm(24))


def trained(model: Any, optimizer: Any) -> list[float]:
    """Losses of two rounds of training, and one in evaluation after each."""
    x = torch.randn(4, 12, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(2):
        getattr(optimizer, "train", lambda: None)()
        losses += losses_of(lambda _step: model(x).square().mean(), optimizer)
        getattr(optimizer, "eval", lambda: None)()
        losses.append(float(model(x).square().mean()))
    return losses


@pytest.mark.parametrize(("package", "name"), RUN)
def test_it_has_its_own_bits_in_pages(package: str, name: str) -> None:
    kind = getattr(pytest.importorskip(package), name)
    settings = RUN[package, name]
    plain = network()
    losses = trained(plain, kind(plain.parameters(), **settings))
    model, optimizer = in_pages(network, pagoda.Optim(kind, **settings))
    with optimizer:
        assert trained(model, optimizer) == losses
        assert_same_weights(model, plain)


@pytest.mark.parametrize(("package", "name"), REFUSED)
def test_it_is_refused_with_the_reason(package: str, name: str) -> None:
    kind = getattr(pytest.importorskip(package), name)
    with pytest.raises(pagoda.ConfigError, match=REFUSED[package, name]):
        pagoda.Optim(kind)
