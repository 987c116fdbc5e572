"""Values that are loaded into a model inside `pagoda.deferred_init()`, or after it: they are trained from."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM
from zoo import assert_equal, llama

import pagoda
from pagoda.checkpoint.waiting import is_waiting

from .conftest import Wrap


@pytest.fixture
def wrap(wrap: Wrap) -> Wrap:
    """In fp32, where weights can be compared with what was loaded."""
    return partial(wrap, precision="fp32")


class Tied(nn.Module):
    """Two modules have one parameter; some parameters wait, and one does not."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 16)
        self.layer = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))
        self.head = nn.Linear(16, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(16))


def _source() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = {name: value.shape for name, value in Tied().state_dict().items() if name != "head.weight"}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


SOURCE = _source()


def copy_by_hand(model: nn.Module) -> None:
    with torch.no_grad():
        for name, value in SOURCE.items():
            model.get_parameter(name).copy_(value)


def assign(model: nn.Module) -> None:
    for name, value in SOURCE.items():
        module, _, short = name.rpartition(".")
        setattr(model.get_submodule(module), short, nn.Parameter(value.clone()))
    model.get_submodule("head").weight = model.get_parameter("embedding.weight")


def load(model: nn.Module, **options: Any) -> None:
    model.load_state_dict({**SOURCE, "head.weight": SOURCE["embedding.weight"]}, **options)
    if options:  # torch gives tied modules a parameter each
        model.get_submodule("head").weight = model.get_parameter("embedding.weight")


LOAD: dict[str, Callable[[nn.Module], None]] = {
    "load_state_dict": load,
    "load_state_dict-assign": partial(load, assign=True),
    "copy_": copy_by_hand,
    "assignment": assign,
}


def assert_has_source(model: nn.Module) -> None:
    assert_equal(model.state_dict(), {**SOURCE, "head.weight": SOURCE["embedding.weight"]})


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("how", LOAD)
def test_values_loaded_inside_init_or_after_it_are_trained_from(how: str, wrap: Wrap) -> None:
    for after in (False, True):
        with pagoda.deferred_init():
            model = Tied()
            assert is_waiting(model.layer[0].weight)
            if not after:
                LOAD[how](model)
        if after:
            LOAD[how](model)
        assert_has_source(wrap(model)[0])


def test_what_is_not_loaded_is_initialised(wrap: Wrap) -> None:
    with pagoda.deferred_init():
        model = Tied()
    model.load_state_dict({"layer.0.bias": torch.full((16,), 3.0)}, strict=False)
    assert is_waiting(model.layer[0].weight)
    found = wrap(model)[0].state_dict()
    assert (found["layer.0.bias"] == 3).all()
    assert (found["layer.1.weight"] == 1).all()
    assert found["layer.0.weight"].std() > 0


def test_copies_of_a_layer_are_loaded_apart(wrap: Wrap) -> None:
    """torch's encoder copies its layer, which waits by then. A value of another shape is reported as ever."""
    with pagoda.deferred_init():
        layer = nn.Linear(4, 4)
        model = nn.Sequential(layer, deepcopy(layer))
        values = {
            name: torch.full(value.shape, float(index))
            for index, (name, value) in enumerate(model.state_dict().items())
        }
        with pytest.raises(RuntimeError, match="size mismatch"):
            model.load_state_dict({**values, "0.weight": torch.ones(2, 2)})
        model.load_state_dict(values)
    assert_equal(wrap(model)[0].state_dict(), values)


@pytest.mark.filterwarnings("error")
def test_from_pretrained_inside_init_has_the_weights_of_the_files(wrap: Wrap, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = llama()
    plain.save_pretrained(tmp_path)
    with pagoda.deferred_init():
        model = LlamaForCausalLM.from_pretrained(tmp_path)
    found = wrap(model)[0].state_dict()
    assert_equal(found, plain.state_dict())


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "whole": lambda weight: weight.copy_(torch.ones(4, 4)),
    "rows": lambda weight: weight[:2].copy_(torch.ones(2, 4)),
    "item": lambda weight: weight.__setitem__((slice(None), 1), torch.ones(4)),
    "view": lambda weight: weight.view(-1)[3:9].fill_(2.0),
    "transposed": lambda weight: weight.T[:1].copy_(torch.ones(4)),
    "arithmetic": lambda weight: weight.mul_(2.0).add_(torch.ones(4)),
    "mask": lambda weight: weight.masked_fill_(torch.eye(4).bool(), 0.0),
    "many": lambda weight: [weight[row % 4].add_(1.0) for row in range(100)],
    "numpy": lambda weight: weight.numpy().fill(3.0),
    "out": lambda weight: torch.add(torch.ones(4, 4), 1.0, out=weight),
}


@torch.no_grad()
@pytest.mark.parametrize("inside", [True, False])
def test_what_is_written_to_a_waiting_parameter_is_kept(inside: bool, wrap: Wrap) -> None:
    with pagoda.deferred_init():
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in WRITES))
        for layer in model:
            layer.weight.fill_(0.5)
            assert is_waiting(layer.weight)
        if inside:
            _write_all(model)
    if not inside:
        _write_all(model)
    plain = nn.Sequential(*(nn.Linear(4, 4) for _ in WRITES))
    for layer in plain:
        layer.weight.fill_(0.5)
    _write_all(plain)
    found = wrap(model)[0].state_dict()
    for index, how in enumerate(WRITES):
        assert torch.equal(found[f"{index}.weight"], plain[index].weight), how


def _write_all(model: nn.Sequential) -> None:
    for layer, write in zip(model, WRITES.values(), strict=True):
        write(layer.weight.data)


def test_what_wrap_repeats_may_write_as_it_likes(wrap: Wrap) -> None:
    """An initialiser's table, copied in rows, takes no RAM before `wrap` makes it."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4, 8))
            self.reset_parameters()

        def reset_parameters(self) -> None:
            with torch.no_grad():
                self.weight[:2] = torch.arange(16.0).view(2, 8)
                self.weight[2:].copy_(torch.ones(2, 8))

    with pagoda.deferred_init():
        model = Table()
        assert is_waiting(model.weight)
    found = wrap(model)[0].state_dict()["weight"]
    assert torch.equal(found, torch.cat([torch.arange(16.0).view(2, 8), torch.ones(2, 8)]))


def test_casting_and_freezing_what_waits_is_no_write(wrap: Wrap) -> None:
    with pagoda.deferred_init():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = deepcopy(model.to(torch.bfloat16).train())
    model[0].requires_grad_(False)
    assert wrap(model)[0].state_dict()["1.weight"].std() > 0
