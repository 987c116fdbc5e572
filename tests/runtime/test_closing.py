"""A closed optimizer: nothing that would have to read a state gives something else without a word."""

import gc
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from zoo import ALL_ON_SSD, PLACEMENTS, RESIDENT, squeeze

import pagoda

from .conftest import Wrap
from .loops import USES, Layers, loss_of_layers


@pytest.mark.parametrize("use", USES)
def test_use_after_close_is_refused(use: str, tmp_path: Path) -> None:
    model, optimizer = pagoda.wrap(Layers(), pagoda.AdamW(), memory=RESIDENT)
    with optimizer:
        loss_of_layers(model).backward()
        optimizer.step()
        optimizer.save_checkpoint(tmp_path / "checkpoint")
    with torch.set_grad_enabled(use != "forward"), pytest.raises(pagoda.UsageError, match="closed"):
        USES[use](model, optimizer, tmp_path)


def test_backward_of_a_graph_from_before_close_is_refused(wrap: Wrap, tmp_path: Path) -> None:
    model: nn.Module = Layers()
    model, optimizer = wrap(model, squeeze(model, ALL_ON_SSD, tmp_path))
    loss = loss_of_layers(model)
    optimizer.close()
    with pytest.raises(pagoda.UsageError, match="closed"):
        loss.backward()


def test_a_with_block_closes_also_after_an_error(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    model: nn.Module = Layers()
    model, optimizer = pagoda.wrap(model, pagoda.AdamW(), memory=squeeze(model, ALL_ON_SSD, tmp_path))

    def fail() -> None:
        with optimizer:
            loss_of_layers(model).backward()
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
    loss_of_layers(model).backward()
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
