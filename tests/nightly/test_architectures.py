"""Every class of transformers' auto mappings trains in pages with the bits of plain PyTorch: `make test-all`.

A class whose default configuration cannot be made small, or whose plain model does not train on `inputs`, is skipped.
"""

from copy import deepcopy
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from zoo import losses_of

import pagoda
from nightly.in_pages import assert_same_weights, in_pages
from nightly.tiny_models import classes, inputs, loss_of, tiny_model
from pagoda.config.training import ActivationMode

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
MOST_PARAMETERS = 20_000_000
KNOWN: dict[tuple[str, str], str] = {}
"""(class, activations) -> why it does not train in pages, or not with the same bits."""


def trained(model: Any, optimizer: Any, given: dict[str, Any]) -> list[float]:
    transformers.set_seed(2)  # also numpy's generator, by which models mask sounds
    return losses_of(lambda _: loss_of(model, deepcopy(given)), optimizer, steps=2)


def plain(name: str) -> tuple[nn.Module, dict[str, Any], list[float]]:
    """A model that torch has trained, what it was given, and its losses; skips where there is none."""
    transformers.logging.set_verbosity_error()
    try:
        model = tiny_model(name)
        if sum(param.numel() for param in model.parameters()) > MOST_PARAMETERS:
            pytest.skip("its tiny configuration is not small")
        given = inputs(model)
        losses = trained(model, torch.optim.SGD(model.parameters(), lr=0.01), given)
    except Exception as error:  # whatever a class raises for a configuration or inputs of ours
        pytest.skip(f"not trained by plain PyTorch: {type(error).__name__}: {str(error)[:120]}")
    if not all(map(torch.isfinite, map(torch.tensor, losses))):
        pytest.skip("its loss is not finite in plain PyTorch")
    return model, given, losses


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("name", classes())
def test_it_trains_in_pages_with_the_bits_of_plain_pytorch(name: str, activations: ActivationMode) -> None:
    expected, given, losses = plain(name)
    if (name, activations) in KNOWN:
        pytest.xfail(KNOWN[name, activations])
    model, optimizer = in_pages(lambda: tiny_model(name), pagoda.Optim(torch.optim.SGD, lr=0.01), activations)
    with optimizer:
        assert trained(model, optimizer, given) == losses
        assert_same_weights(model, expected)
