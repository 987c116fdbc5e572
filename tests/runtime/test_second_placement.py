"""The second placement: after some steps, states move to the memory that these have left, and no bit changes."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from pairwise import each_once
from zoo import PAGE, RESIDENT, Outcome, Recipe, batch, least, loss_of, losses_of, train, usual_loop

import pagoda
from pagoda import budgets
from pagoda.errors import StorageError
from pagoda.memory.arena import Arena
from pagoda.memory.ssd.tier import SSDTier
from pagoda.plan.planner import Plan
from pagoda.plan.tiers import DEVICE, HOST
from pagoda.runtime import moving, needs
from pagoda.runtime.device import Device
from pagoda.schedule.event_log import replay

from .test_lora import RULE, adapted, loss_of as lora_loss, on_ssd

RECIPES = {
    "clipped": Recipe("plain"),
    "accumulated": Recipe("plain", accumulation=2, announced=True),
    "during backward": Recipe("plain", clip=None, announced=True, frozen=True),
    "checkpointed": Recipe("llama", checkpointing=True, precision="fp32"),
    "8bit": Recipe("gpt2", moments="8bit"),
    "offloaded": Recipe("plain", activations="offload"),
    "as it fits": Recipe("plain", activations="auto"),
}


@cache
def resident(recipe: Recipe) -> Outcome:
    return train(replace(recipe, activations="keep"), RESIDENT)


def adapting(device: str | None = "4MiB", host: str | int | None = "64MiB", ssd: Path | None = None) -> pagoda.Memory:
    return pagoda.Memory(
        device=None if device is None else f"cpu:{device}",
        host=host,
        ssd=None if ssd is None else f"{ssd}:64MiB",
        unit_limit="64KiB",
        page_size=PAGE,
        adapt_after=2,
    )


def watched(recipe: Recipe, said: dict[int, str], each: Callable[[int, Any, Any], None] | None = None) -> Any:
    """The usual loop, which notes what moved after which step. `each` is called after every step."""

    def after(step: int, model: Any, optimizer: Any) -> None:
        if optimizer.stats.moved is not None:
            said[step] = optimizer.stats.moved
        if each is not None:
            each(step, model, optimizer)

    return usual_loop(recipe, after=after)


@each_once(recipe=[*RECIPES], drive=[False, True])
def test_what_steps_leave_of_the_device_becomes_home_to_states(recipe: str, drive: bool, tmp_path: Path) -> None:
    made, said = RECIPES[recipe], {}
    host = least(made, "all-on-ssd", tmp_path, unit_limit="64KiB").host_bytes * 2 if drive else "64MiB"
    outcome = train(made, adapting(host=host, ssd=tmp_path if drive else None), watched(made, said))
    outcome.assert_same_bits(resident(made))
    plan = outcome.plan
    assert plan.placement.resident
    assert plan.budgets.device > 2 << 20
    assert set(said) == {2}
    assert said[2].startswith("After 2 steps, activations and all else but pages had taken ")
    assert " of states from host to device" in said[2]
    assert said[2] == plan.reasons[-1]


def test_a_device_that_needs_more_for_the_rest_is_home_to_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the second placement, steps happened to have enough. With less, there may be none of it left."""
    recipe, said = Recipe("plain"), {}
    monkeypatch.setattr(Device, "peak_without_pages", lambda *_: 3 << 20)
    outcome = train(recipe, adapting(), watched(recipe, said))
    outcome.assert_same_bits(resident(recipe))
    assert outcome.plan.peak_bytes[DEVICE] <= (4 << 20) - 1.2 * (3 << 20)
    assert "leases take" in said[2]


def test_where_the_rest_leaves_no_room_for_a_lease_states_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, said = Recipe("plain"), {}
    monkeypatch.setattr(Device, "peak_without_pages", lambda *_: 4 << 20)
    outcome = train(recipe, adapting(), watched(recipe, said))
    outcome.assert_same_bits(resident(recipe))
    assert not said
    assert outcome.plan.budgets.device == 2 << 20


def test_memory_that_something_else_has_taken_meanwhile_leaves_states_where_they_were(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also those that had lived on the device, whose memory is given back for the new homes."""
    recipe, said, opened = Recipe("plain"), {}, []
    open_arena = Device.arena

    def arena(self: Device, nbytes: int) -> Arena:
        opened.append(nbytes)
        if len(opened) == 2:
            raise pagoda.BudgetError("taken", tier=DEVICE)
        return open_arena(self, nbytes)

    monkeypatch.setattr(Device, "arena", arena)
    memory = replace(adapting("3MiB"), split=pagoda.Split(device_home_share=1.0))
    outcome = train(recipe, memory, watched(recipe, said))
    outcome.assert_same_bits(resident(recipe))
    assert opened[0] == opened[2] < opened[1]
    assert len(opened) == 3
    assert not said
    assert outcome.plan.placement.resident


def test_a_step_whose_update_a_drive_delays_is_taken_and_states_move_after_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, said, tried = RECIPES["clipped"], {}, []

    def fail(*_: Any) -> None:
        tried.append(1)
        raise StorageError("the disk failed")

    def loop(model: Any, optimizer: Any, outcome: Outcome) -> None:
        step = optimizer.step

        def step_on_a_broken_drive() -> None:
            with monkeypatch.context() as patch:
                if len(outcome.norms) == 1:
                    patch.setattr(SSDTier, "store", fail)
                step()

        monkeypatch.setattr(optimizer, "step", step_on_a_broken_drive)
        watched(recipe, said)(model, optimizer, outcome)

    host = least(recipe, "all-on-ssd", tmp_path, unit_limit="64KiB").host_bytes * 2
    outcome = train(recipe, adapting(host=host, ssd=tmp_path), loop)
    outcome.assert_same_bits(resident(recipe))
    assert tried
    assert set(said) == {3}


def test_a_checkpoint_can_be_loaded_after_a_move_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = RECIPES["clipped"]
    generator = torch.Generator().manual_seed(1)
    batches = [batch(recipe.model, generator) for _ in range(recipe.steps)]

    def fail(*_: Any) -> None:
        raise StorageError("the disk failed")

    def loop(model: Any, optimizer: Any, outcome: Outcome) -> None:
        def step(inputs: Any) -> None:
            loss = loss_of(model(**inputs))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            outcome.losses.append(loss.item())
            outcome.norms.append(optimizer.stats.grad_norm)

        step(batches[0])
        optimizer.save_checkpoint(tmp_path / "saved")
        with monkeypatch.context() as patch:
            patch.setattr(moving, "_fill", fail)
            with pytest.raises(StorageError, match="the disk failed"):
                step(batches[1])
        with pytest.raises(StorageError, match="the disk failed"):
            model(**batches[1])
        optimizer.load_checkpoint(tmp_path / "saved")
        for inputs in batches[1:]:
            step(inputs)

    host = least(recipe, "all-on-ssd", tmp_path, unit_limit="64KiB").host_bytes * 2
    train(recipe, adapting(host=host, ssd=tmp_path), loop).assert_same_bits(resident(recipe))


@pytest.mark.parametrize("given", [False, True], ids=["open", "given"])
def test_ram_beside_activations_is_home_to_states_on_ssd_but_never_more_than_was_given(
    given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, said = Recipe("plain"), {}
    whole = int(least(recipe, "host-weights", tmp_path, unit_limit="64KiB").host_bytes / 0.8) + (200 << 10)
    monkeypatch.setattr(budgets, "free_ram", lambda: whole)
    monkeypatch.setattr(needs, "resident_bytes", lambda peak=False: 0)
    memory = adapting(device=None, host=int(0.8 * whole) if given else None, ssd=tmp_path)
    outcome = train(recipe, memory, watched(recipe, said))
    outcome.assert_same_bits(resident(recipe))
    if given:
        assert not said
        assert outcome.plan.peak_bytes[HOST] <= int(0.8 * whole)
    else:
        assert " of states from ssd to host" in said[2]
        assert 0.8 * whole < outcome.plan.peak_bytes[HOST] <= 0.95 * whole


def test_states_wait_until_nobody_holds_weights_of_a_lease() -> None:
    recipe, said, held = Recipe("plain"), {}, []

    def each(step: int, model: Any, _: Any) -> None:
        held.clear()
        if step == 1:
            model.blocks[1].register_forward_hook(lambda block, *_: held.append(block.up.weight.data[0]))
        if step == 2:
            model.blocks[1]._forward_hooks.clear()

    train(recipe, adapting(), watched(recipe, said, each)).assert_same_bits(resident(recipe))
    assert set(said) == {3}


def test_states_stay_if_weights_are_held_from_step_to_step(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, said = Recipe("plain"), {}
    monkeypatch.setattr("pagoda.engine._TRIES", 1)
    tried: list[None] = []
    monkeypatch.setattr("pagoda.engine.Engine._can_move", lambda _: tried.append(None))
    train(recipe, adapting(), watched(recipe, said)).assert_same_bits(resident(recipe))
    assert len(tried) == 2
    assert not said


@pytest.mark.parametrize("wait", [True, False])
def test_checkpoints_of_before_and_after_resume_anywhere(wait: bool, tmp_path: Path) -> None:
    """The one of before, whose pages on SSD are kept in place, is perhaps still being written when states move."""
    recipe = Recipe("plain")
    losses = resident(recipe).losses
    drive = tmp_path / "drive"
    drive.mkdir()
    host = least(recipe, "all-on-ssd", tmp_path, unit_limit="64KiB").host_bytes * 3 // 2
    memory = replace(adapting(host=host, ssd=drive), ssd_checkpoints=2)

    def each(step: int, _: Any, optimizer: Any) -> None:
        if step in (1, 3):
            optimizer.save_checkpoint(tmp_path / f"step-{step}", wait=wait)

    said: dict[int, str] = {}
    train(recipe, memory, watched(recipe, said, each)).assert_same_bits(resident(recipe))
    assert set(said) == {2}
    for step, where in product((1, 3), (RESIDENT, replace(memory, adapt_after=1))):
        model, optimizer = pagoda.wrap(
            recipe.build(),
            pagoda.AdamW(lr=1e-2, weight_decay=0.1),
            memory=where,
            max_grad_norm=recipe.clip,
            precision="bf16",
        )
        optimizer.load_checkpoint(tmp_path / f"step-{step}")
        generator = torch.Generator().manual_seed(1)
        batches = [batch(recipe.model, generator) for _ in range(recipe.steps)]
        found = []
        for inputs in batches[step:]:
            loss = loss_of(model(**inputs))
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        optimizer.close()
        assert found == losses[step:]


def test_frozen_weights_under_adapters_move_too(tmp_path: Path) -> None:
    def trained(memory: pagoda.Memory) -> tuple[list[float], Plan]:
        model, optimizer = pagoda.wrap(adapted(), RULE, memory=memory, precision="fp32", max_grad_norm=0.5)
        losses = losses_of(lambda step: lora_loss(model, step), optimizer, 4)
        plan = pagoda.plan_of(model)
        optimizer.close()
        return losses, plan

    memory = on_ssd(tmp_path)
    losses, plan = trained(replace(memory, device="cpu:8MiB", adapt_after=2))
    assert losses == trained(pagoda.Memory(host="64MiB"))[0]
    assert len(plan.placement.resident) == len(plan.units) - 1


def test_a_scheduler_that_was_given_other_homes_replays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGODA_EVENT_LOG", str(tmp_path / "events.jsonl"))
    recipe, said = Recipe("plain"), {}
    train(recipe, adapting(), watched(recipe, said))
    assert said
    assert replay(tmp_path / "events.jsonl") > 0


def test_asynchronous_updates_whose_lag_a_move_would_change_are_refused() -> None:
    with pytest.raises(pagoda.ConfigError, match="asynchronous updates"):
        pagoda.wrap(Recipe("plain").build(), pagoda.AdamW(), memory=adapting(), update="async", precision="bf16")
