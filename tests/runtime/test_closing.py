"""A closed optimizer: nothing that would have to read a state gives something else without a word."""

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from zoo import ALL_ON_SSD, PLACEMENTS, RESIDENT, squeeze

import pagoda
from pagoda.optimizer import PagedOptimizer

from .conftest import Wrap
from .loops import WIDTH, Layers

Use = Callable[[nn.Module, PagedOptimizer, Path], object]


def forward(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(2, WIDTH), [0, 1, 2])  # type: ignore[no-any-return]


def evaluate(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return forward(model)


USES: dict[str, Use] = {
    "forward": lambda model, optimizer, path: forward(model),
    "evaluation": lambda model, optimizer, path: evaluate(model),
    "a-layer": lambda model, optimizer, path: model.layers[0](torch.ones(2, WIDTH)),  # type: ignore[operator,index]
    "state-dict": lambda model, optimizer, path: model.state_dict(),
    "load-state-dict": lambda model, optimizer, path: model.load_state_dict(Layers().state_dict()),
    "full-state-dict": lambda model, optimizer, path: pagoda.full_state_dict(model),
    "model-state": lambda model, optimizer, path: pagoda.ModelState(model).state_dict(),
    "gathered": lambda model, optimizer, path: pagoda.gathered(model).__enter__(),
    "step": lambda model, optimizer, path: optimizer.step(),
    "zero-grad": lambda model, optimizer, path: optimizer.zero_grad(),
    "drain": lambda model, optimizer, path: optimizer.drain(),
    "optimizer-state": lambda model, optimizer, path: optimizer.state_dict(),
    "checkpoint": lambda model, optimizer, path: optimizer.save_checkpoint(path / "checkpoint"),
}


@pytest.mark.parametrize("use", USES)
def test_use_after_close_is_refused(use: str, tmp_path: Path) -> None:
    model, optimizer = pagoda.wrap(Layers(), pagoda.AdamW(), memory=RESIDENT)
    with optimizer:
        forward(model).backward()
        optimizer.step()
    with pytest.raises(pagoda.UsageError, match="closed"):
        USES[use](model, optimizer, tmp_path)


def test_backward_of_a_graph_from_before_close_is_refused(wrap: Wrap, tmp_path: Path) -> None:
    model: nn.Module = Layers()
    model, optimizer = wrap(model, squeeze(model, ALL_ON_SSD, tmp_path))
    loss = forward(model)
    optimizer.close()
    with pytest.raises(pagoda.UsageError, match="closed"):
        loss.backward()


def test_a_with_block_closes_also_after_an_error(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    model: nn.Module = Layers()
    model, optimizer = pagoda.wrap(model, pagoda.AdamW(), memory=squeeze(model, ALL_ON_SSD, tmp_path))

    def fail() -> None:
        with optimizer:
            forward(model).backward()
            optimizer.step()
            assert {t.name for t in set(threading.enumerate()) - before if t.name.startswith("pagoda-")}
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not [t for t in set(threading.enumerate()) - before if t.name.startswith("pagoda-")]
    assert list(tmp_path.iterdir()) == []
    optimizer.close()  # again does nothing


@pytest.mark.parametrize("placement", ["resident", *PLACEMENTS])
def test_memory_is_given_back_at_close_and_a_model_that_nobody_holds_is_gone(placement: str, tmp_path: Path) -> None:
    model: nn.Module = Layers()
    memory = RESIDENT if placement == "resident" else squeeze(model, placement, tmp_path)
    model, optimizer = pagoda.wrap(model, pagoda.AdamW(), memory=memory)
    forward(model).backward()
    optimizer.step()
    arenas = [tier.arena for tier in (optimizer._engine.store.host, optimizer._engine.store.device) if tier is not None]
    mappings = [weakref.ref(arena._memory) for arena in arenas]
    optimizer.close()
    gc.collect()
    assert all(mapping() is None for mapping in mappings)
    held = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert held() is None
