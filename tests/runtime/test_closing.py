"""A closed optimizer refuses use; closed or dropped, it gives its threads, its memory and its SSD directory back."""

import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from garbage import all_of_earlier_tests, only_of_this_test
from pairwise import each_once
from torch import nn
from zoo import ALL_ON_SSD, ARENA, HOST_WEIGHTS, RESIDENT, assert_equal, squeeze

import pagoda
from pagoda.optimizer import PagedOptimizer
from pagoda.runtime.gradients import UnitGradient
from pagoda.runtime.updates import BlockUpdate

from .loops import USES, Layers, loss_of_layers

SOON_S = 30


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("pagoda-")}


@pytest.fixture(autouse=True)
def _nothing_else_runs() -> None:
    """And collections look at what the test makes alone."""
    only_of_this_test()
    if threads():
        all_of_earlier_tests()
    assert threads() == set()


def wrapped(placement: str, directory: Path, **settings: Any) -> tuple[nn.Module, PagedOptimizer]:
    memory = RESIDENT
    if placement != "resident":
        memory = squeeze(Layers(), placement, directory, clipping=False, asynchronous="update" in settings)
    return pagoda.wrap(Layers(), pagoda.AdamW(), memory=memory, **{"precision": "bf16", **settings})


def train(model: nn.Module, optimizer: PagedOptimizer, until: str) -> None:
    """A step, and a part of the next one."""
    if until == "nothing":
        return
    loss_of_layers(model).backward()
    optimizer.step()
    if until == "backward":
        loss_of_layers(model).backward()


# --- closed ------------------------------------------------------------------------------------


def test_use_after_close_is_refused(tmp_path: Path) -> None:
    """So is the backward of a graph from before. A block closes also after an error, and closing again does nothing."""
    model, optimizer = wrapped(ALL_ON_SSD, tmp_path)
    with suppress(ZeroDivisionError), optimizer:
        train(model, optimizer, "step")
        optimizer.save_checkpoint(tmp_path / "checkpoint")
        loss = loss_of_layers(model)
        raise ZeroDivisionError
    assert threads() == set()
    optimizer.close()
    with pytest.raises(pagoda.UsageError, match="closed"):
        loss.backward()
    for use in USES.values():
        with pytest.raises(pagoda.UsageError, match="closed"):
            use(model, optimizer, tmp_path)
    with torch.no_grad(), pytest.raises(pagoda.UsageError, match="closed"):
        loss_of_layers(model)


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


def test_updates_that_have_not_begun_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = wrapped(ALL_ON_SSD, tmp_path)
    updater = optimizer._engine._executor.updates._updaters[0]
    begun, end, updated = threading.Event(), threading.Event(), set[int]()

    def slowly(apply: Callable[..., None], block: BlockUpdate, *others: Any) -> None:
        begun.set()
        assert end.wait(SOON_S)
        updated.add(block.update.unit.index)
        apply(block, *others)

    monkeypatch.setattr(updater, "_apply", partial(slowly, updater._apply))
    train(model, optimizer, "step")
    assert begun.wait(SOON_S)
    threading.Timer(0.05, end.set).start()
    monkeypatch.undo()
    del model, optimizer, updater
    gc.collect()
    assert threads() == set()
    assert 1 <= len(updated) <= 2, "the one under way, and the one that had begun to be read"


@pytest.mark.parametrize("speculate", [False, True])
def test_nothing_is_kept_of_the_steps_that_are_over(speculate: bool) -> None:
    settings: dict[str, Any] = {"precision": "bf16"}
    memory = RESIDENT
    if speculate:
        settings |= {"max_grad_norm": 1e6, "gradient_accumulation_steps": 1}
        memory = replace(RESIDENT, device="cpu:1MiB", split=pagoda.Split())
    model, optimizer = pagoda.wrap(Layers(), pagoda.AdamW(), memory=memory, **settings)
    kept = []
    for _ in range(3):
        train(model, optimizer, "step")
        optimizer.synchronize()
        gc.collect()
        kept.append(sum(type(each) is UnitGradient for each in gc.get_objects()))
    assert (optimizer.stats.updates_kept > 0) == speculate
    optimizer.close()
    assert kept == [kept[0]] * 3


KEPT: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, dict[str, torch.Tensor]], object]]] = {
    "model": (lambda model, _: model, lambda held, weights: assert_equal(held.state_dict(), weights)),
    "a layer": (
        lambda model, _: model.layers[0],
        lambda held, weights: assert_equal(
            held.state_dict(), {name: weights[f"layers.0.{name}"] for name in ("0.weight", "0.bias")}
        ),
    ),
    "optimizer": (lambda _, optimizer: optimizer, lambda held, _: assert_equal(held.state_dict()["state"], {})),
    "graph": (lambda model, _: loss_of_layers(model), lambda held, _: held.backward()),
}


@pytest.mark.parametrize("kept", KEPT)
def test_it_goes_on_as_long_as_a_part_of_it_is_held(kept: str, tmp_path: Path) -> None:
    model, optimizer = wrapped(ALL_ON_SSD, tmp_path)
    expected = model.state_dict()
    hold, use = KEPT[kept]
    held = hold(model, optimizer)
    del model, optimizer
    gc.collect()
    assert threads()
    use(held, expected)
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
