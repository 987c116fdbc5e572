"""A closed optimizer refuses use; closed or dropped, it gives its threads, its memory and its SSD directory back."""

import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pairwise import each_once
from torch import nn
from zoo import ALL_ON_SSD, ARENA, HOST_WEIGHTS, RESIDENT, squeeze

import pagoda
from pagoda.optimizer import PagedOptimizer
from pagoda.runtime.gradients import UnitGradient
from pagoda.runtime.updates import Update

from .conftest import Wrap
from .loops import USES, Layers, loss_of_layers

SOON_S = 30


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("pagoda-")}


@pytest.fixture(autouse=True)
def _nothing_else_runs() -> None:
    """And collections look at what the test makes alone."""
    gc.collect()
    gc.freeze()
    assert threads() == set()


def wrapped(placement: str, directory: Path, **settings: Any) -> tuple[nn.Module, PagedOptimizer]:
    staleness = 1 if "update" in settings else None
    memory = RESIDENT
    if placement != "resident":
        memory = squeeze(Layers(), placement, directory, clipping=False, max_staleness=staleness)
    return pagoda.wrap(Layers(), pagoda.AdamW(), memory=memory, **settings)


def train(model: nn.Module, optimizer: PagedOptimizer, until: str) -> None:
    """A step, and a part of the next one."""
    if until == "nothing":
        return
    loss_of_layers(model).backward()
    optimizer.step()
    if until == "backward":
        loss_of_layers(model).backward()


# --- closed ------------------------------------------------------------------------------------


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
    model, optimizer = wrapped(ALL_ON_SSD, tmp_path)

    def fail() -> None:
        with optimizer:
            loss_of_layers(model).backward()
            optimizer.step()
            assert threads()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert threads() == set()
    assert list(tmp_path.iterdir()) == []
    optimizer.close()  # again does nothing


# --- dropped -----------------------------------------------------------------------------------


@each_once(
    placement=["resident", HOST_WEIGHTS, ALL_ON_SSD, ARENA, "async"],
    until=["nothing", "step", "backward"],
    closed=[False, True, False, False],
)
def test_what_an_optimizer_held_is_given_back(placement: str, until: str, closed: bool, tmp_path: Path) -> None:
    if placement == "async":
        model, optimizer = wrapped(HOST_WEIGHTS, tmp_path, update="async")
    else:
        model, optimizer = wrapped(placement, tmp_path)
    train(model, optimizer, until)
    store = optimizer._engine.store
    mappings = [weakref.ref(tier.arena._memory) for tier in (store.host, store.device) if tier]
    if closed:
        optimizer.close()
        gc.collect()
        assert [each() for each in mappings] == [None] * len(mappings)
    held = [*mappings, *(weakref.ref(each) for each in (model, optimizer, optimizer._engine))]
    del model, optimizer, store
    gc.collect()
    assert threads() == set()
    assert [each() for each in held] == [None] * len(held)
    assert list(tmp_path.iterdir()) == []


def test_updates_that_have_not_begun_are_dropped_with_their_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = wrapped(ALL_ON_SSD, tmp_path)
    feeder = optimizer._engine._executor.feeders[0]
    begun, end, updated = threading.Event(), threading.Event(), list[int]()

    def slowly(feed: Callable[[Update], None], update: Update) -> None:
        begun.set()
        assert end.wait(SOON_S)
        updated.append(update.unit.index)
        feed(update)

    monkeypatch.setattr(feeder, "feed", partial(slowly, feeder.feed))
    train(model, optimizer, "step")
    assert begun.wait(SOON_S)
    threading.Timer(0.05, end.set).start()
    monkeypatch.undo()
    del model, optimizer, feeder
    gc.collect()
    assert threads() == set()
    assert len(updated) <= 2, "the one under way, and the one whose gradient had been loaded"


@pytest.mark.parametrize("speculate", [False, True])
def test_nothing_is_kept_of_the_steps_that_are_over(speculate: bool) -> None:
    settings: dict[str, Any] = {"clip_grad_norm": 1e6, "accumulation_steps": 1} if speculate else {}
    model, optimizer = pagoda.wrap(
        Layers(), pagoda.AdamW(), memory=RESIDENT, update=pagoda.Updates(speculate=speculate or None), **settings
    )
    kept = []
    for _ in range(3):
        train(model, optimizer, "step")
        optimizer.drain()
        gc.collect()
        kept.append(sum(type(each) is UnitGradient for each in gc.get_objects()))
    assert (optimizer.stats.updates_kept > 0) == speculate
    optimizer.close()
    assert kept == [kept[0]] * 3


@pytest.mark.parametrize("kept", ["model", "a layer", "optimizer", "graph"])
def test_it_goes_on_as_long_as_a_part_of_it_is_held(kept: str, tmp_path: Path) -> None:
    model, optimizer = wrapped(ALL_ON_SSD, tmp_path)
    expected = model.state_dict()
    held: Any = model
    if kept == "a layer":
        held = model.layers[0]  # type: ignore[operator,index]
    elif kept == "optimizer":
        held = optimizer
    elif kept == "graph":
        held = loss_of_layers(model)
    del model, optimizer
    gc.collect()
    assert threads()
    if kept == "model":
        assert all(torch.equal(value, expected[name]) for name, value in held.state_dict().items())
    elif kept == "a layer":
        assert torch.equal(held.state_dict()["0.weight"], expected["layers.0.0.weight"])
    elif kept == "optimizer":
        assert held.state_dict()["state"] == {}
    else:
        held.backward()
    del held
    gc.collect()
    assert threads() == set()


def test_a_parameter_whose_model_was_dropped_is_refused(tmp_path: Path) -> None:
    model, optimizer = wrapped("resident", tmp_path)
    param = next(model.parameters())
    del model, optimizer
    gc.collect()
    assert threads() == set()
    with pytest.raises(pagoda.UsageError, match=r"'layers\.0\.0\.weight' .*dropped"), pagoda.gathered([param]):
        pass


def test_the_directory_of_a_dropped_optimizer_can_be_used_at_once(tmp_path: Path) -> None:
    gc.disable()
    try:
        for _ in range(2):
            model, optimizer = wrapped(ALL_ON_SSD, tmp_path)
            train(model, optimizer, "step")
            del model, optimizer
    finally:
        gc.enable()
    gc.collect()
    assert threads() == set()


def test_a_checkpoint_that_is_being_written_is_finished_though_its_optimizer_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "ssd").mkdir()
    model, optimizer = wrapped(ALL_ON_SSD, tmp_path / "ssd")
    train(model, optimizer, "step")
    optimizer.save_checkpoint(tmp_path / "checkpoint", wait=False)
    job = optimizer._engine.saver._job
    assert job is not None
    del model, optimizer
    gc.collect()
    job.wait()
    del job
    _, optimizer = wrapped("resident", tmp_path)
    optimizer.load_checkpoint(tmp_path / "checkpoint")
    optimizer.close()
