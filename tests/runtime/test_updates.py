"""Updates overlap with what needs no result of theirs, and say when they fail."""

import threading
import time
import weakref
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from zoo import ALL_ON_SSD, HOST_WEIGHTS, PAGE, RESIDENT, Outcome, assert_equal, squeeze

import pagoda
from pagoda.errors import NonFiniteGradientError
from pagoda.memory.page import PageRun
from pagoda.memory.ssd.tier import SSDTier
from pagoda.optimizer import PagedOptimizer
from pagoda.runtime.updaters import HostUpdater

from .conftest import Wrap
from .loops import WIDTH, Layers

SOON_S = 30


def loss_of(model: Any) -> torch.Tensor:
    loss: torch.Tensor = model(torch.ones(2, WIDTH), [*range(len(model.layers))])
    return loss


def test_weights_in_ram_can_be_used_while_moments_are_still_being_written(
    wrap: Wrap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = wrap(Layers(6), squeeze(Layers(6), HOST_WEIGHTS, tmp_path, unit_limit="64KiB"))
    x, gate, store = torch.ones(2, WIDTH), threading.Event(), SSDTier.store
    before = model(x, [0]).item()

    def store_later(*args: Any) -> None:
        assert gate.wait(SOON_S)
        store(*args)

    monkeypatch.setattr(SSDTier, "store", store_later)
    loss_of(model).backward()
    optimizer.step()
    try:
        with torch.no_grad():
            assert model(x, [0]).item() != before
        assert not optimizer._engine.scheduler.updates.drained
    finally:
        gate.set()


def test_states_are_not_read_through_a_slot_that_a_dropped_read_still_fills(
    wrap: Wrap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, optimizer = wrap(Layers(6), squeeze(Layers(6), ALL_ON_SSD, tmp_path, unit_limit="64KiB"))
    updates, held = optimizer._engine._executor.updates, optimizer._engine.store
    values = torch.arange(9000, dtype=torch.float32)
    held.write(0, "exp_avg", 0, values)
    load, go_on, being_filled = held.ssd.load, threading.Event(), set[int]()

    def load_later(run: PageRun, offset: int, into: memoryview) -> None:
        address = torch.frombuffer(into, dtype=torch.uint8).data_ptr()
        if threading.current_thread() is threading.main_thread():
            assert address not in being_filled
        else:
            being_filled.add(address)
            go_on.wait(SOON_S)
            being_filled.remove(address)
        load(run, offset, into)

    monkeypatch.setattr(held.ssd, "load", load_later)
    updates.read_ahead(0)
    while not being_filled:
        time.sleep(0.001)
    timer = threading.Timer(0.1, go_on.set)
    timer.start()
    updates.drop_ahead()
    updates.wait_until_idle()
    for _ in held.slots:  # through each of them
        assert torch.equal(held.read(0, "exp_avg", 0, 9000), values)
    timer.join()


def test_a_read_ahead_that_failed_is_dropped_with_its_error(
    wrap: Wrap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody needs what it read, such as `load_checkpoint` after a failing disk."""
    _, optimizer = wrap(Layers(6), squeeze(Layers(6), ALL_ON_SSD, tmp_path, unit_limit="64KiB"))

    def fail(*_: object) -> None:
        raise pagoda.StorageError("the disk failed")

    with monkeypatch.context() as failing:
        failing.setattr(optimizer._engine.store.ssd, "load", fail)
        optimizer._engine._executor.updates.read_ahead(0)
        optimizer._engine.drain()


@pytest.mark.inline
def test_an_update_of_hundreds_of_small_parameters_needs_no_deeper_stack_than_one(wrap: Wrap) -> None:
    """Each is a block, which the update lane does at once."""

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList(torch.ones(999) for _ in range(400))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum((x * scale).sum() for scale in self.scales)

    model, optimizer = wrap(Many(), pagoda.Memory(host="64MiB"), rule=pagoda.Adafactor())
    model(torch.ones(999)).backward()
    optimizer.step()
    optimizer.synchronize()
    assert all(step == 1 for _, step in steps_of(optimizer))


# --- errors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", ["every gradient", "one gradient"])
def test_an_update_during_backward_that_is_refused_counts_as_no_step_and_others_are_named(bad: str, wrap: Wrap) -> None:
    memory = pagoda.Memory(host="64MiB", unit_limit="64KiB", page_size=PAGE)  # a unit for each layer
    model, optimizer = wrap(Layers(2), memory, gradient_accumulation_steps=1)

    def backward(scale: float = 1.0) -> None:
        (loss_of(model) * scale).backward()

    backward()
    optimizer.step()
    if bad == "every gradient":
        backward(torch.nan)
    else:
        spoil = model.layers[0][0].bias.register_hook(lambda grad: grad * torch.nan)
        backward()
        spoil.remove()
    told = (
        "No weight was changed"
        if bad == "every gradient"
        else "But 1 of 2 units, such as 'layers.1', were updated during"
    )
    with pytest.raises(NonFiniteGradientError, match=told):
        optimizer.step()
    refused = {"layers.0.0.weight", "layers.0.0.bias"} if bad == "one gradient" else {n for n, _ in steps_of(optimizer)}
    assert dict(steps_of(optimizer)) == {name: 2 - (name in refused) for name, _ in steps_of(optimizer)}
    backward()
    optimizer.step()
    assert dict(steps_of(optimizer)) == {name: 3 - (name in refused) for name, _ in steps_of(optimizer)}


@pytest.mark.inline
def test_a_refused_update_keeps_nothing_that_the_thread_that_began_it_has_in_use(wrap: Wrap) -> None:
    """Such as weights in a lease, whose frames are then free at another time on each rank."""
    model, _ = wrap(Layers(2), pagoda.Memory(host="64MiB", page_size=PAGE), gradient_accumulation_steps=1)

    def backward() -> weakref.ref[torch.Tensor]:
        in_use = torch.ones(1)
        (loss_of(model) * torch.nan).backward()
        return weakref.ref(in_use)

    assert backward()() is None


def test_states_that_are_read_across_a_step_are_refused_and_the_step_is_whole(wrap: Wrap, tmp_path: Path) -> None:
    outcomes = []
    for reads in (True, False):
        torch.manual_seed(0)
        model, optimizer = wrap(Layers(2), squeeze(Layers(2), ALL_ON_SSD, tmp_path, clipping=False))
        states = optimizer.named_states()
        for _ in range(3):
            loss_of(model).backward()
            optimizer.step()
            if reads and optimizer.stats.step == 2:
                with pytest.raises(pagoda.UsageError, match=r"finish the iteration before the next step"):
                    next(states)
            elif reads:
                states = optimizer.named_states()
                next(states)
        outcomes.append(Outcome(weights=model.state_dict(), optimizer=optimizer.state_dict()))
        optimizer.close()
    outcomes[0].assert_same_bits(outcomes[1])


def steps_of(optimizer: PagedOptimizer) -> Iterator[tuple[str, int]]:
    """Updates that each parameter has had, by name."""
    return ((name, int(state["step"])) for name, state in optimizer.named_states())


@pytest.mark.parametrize("placement", [ALL_ON_SSD, HOST_WEIGHTS])
def test_a_kernel_that_fails_is_tried_again_if_it_changes_no_state_where_it_was(
    placement: str, wrap: Wrap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = squeeze(Layers(6), placement, tmp_path, clipping=False)
    start = Layers(6)
    (model, optimizer), (alone, other) = wrap(deepcopy(start), memory), wrap(start, RESIDENT)
    apply, fails = HostUpdater._apply, True

    def apply_and_fail(*arguments: Any) -> None:
        apply(*arguments)
        if fails and arguments[0] is updater:
            raise MemoryError("no room")

    updater = optimizer._engine._executor.updates._updaters[0]
    monkeypatch.setattr(HostUpdater, "_apply", apply_and_fail)
    loss_of(model).backward()
    optimizer.step()
    with pytest.raises((pagoda.PagodaError, MemoryError), match="no room"):
        loss_of(model)
    optimizer.zero_grad()
    fails = False
    if placement == HOST_WEIGHTS:
        with pytest.raises(pagoda.StorageError, match="damaged"):
            loss_of(model)
        return
    loss_of(alone).backward()
    other.step()
    for _ in range(2):
        for one, its in ((model, optimizer), (alone, other)):
            its.zero_grad()
            loss_of(one).backward()
            its.step()
    assert_equal(pagoda.full_state_dict(model), pagoda.full_state_dict(alone))
