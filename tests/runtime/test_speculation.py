"""Updates during backward before the norm is known: same bits whether they stand or are undone, and both counted."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from pairwise import each_once
from torch import nn
from zoo import ALL_ON_SSD, ARENA, ARENA_ALL_ON_SSD, HOST_WEIGHTS, PAGE, Outcome, run, squeeze

import pagoda
from pagoda.errors import NonFiniteGradientError, StorageError, UsageError
from pagoda.memory.page import PageRun
from pagoda.memory.ssd.tier import SSDTier
from pagoda.optimizer import PagedOptimizer
from pagoda.plan.layout import GRAD, WEIGHT
from pagoda.plan.placement import VERSIONS
from pagoda.plan.tiers import DEVICE, HOST
from pagoda.schedule import updates

from .loops import inputs, layers, learn

LIMIT = 0.5
CLIPPED, CALM = 30.0, 1e-3
"""Factors of the loss with which its gradients are clipped, and are not."""
PATTERNS = ("....", "xxxx", ".x.x.", "..x.xx.")
ALL_IN_RAM, ARENA_ALL_IN_RAM = "all-in-ram", "arena-all-in-ram"
PASSING = "states in RAM pass the device for their update"
WEIGHTS_AT_HOME = "the device is home to all weights, and other states pass it for their update"
PLACEMENTS = (ALL_IN_RAM, HOST_WEIGHTS, ALL_ON_SSD, ARENA_ALL_ON_SSD, PASSING, WEIGHTS_AT_HOME)
UNIT_LIMIT = "64KiB"
RESIDENT = pagoda.Memory(host="64MiB", unit_limit=UNIT_LIMIT, page_size=PAGE)
IN_RAM = replace(RESIDENT, device="cpu:256KiB", split=pagoda.Split())
"""A device computes. If the CPU does, it is not idle during backward."""
LAYERS = 6
Between = Callable[[Any, Any, Outcome], None]
"""What a user does between backward and `step()`."""


@pytest.fixture(autouse=True)
def always_speculate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "CALM_STEPS", 0)


def loss_of(model: nn.Module, seed: int = 100) -> torch.Tensor:
    return model(inputs(seed), [*range(LAYERS)])


def memory_of(placement: str, directory: Path, accumulation: int = 1) -> pagoda.Memory:
    """The smallest budgets, and room for copies of what is in RAM."""
    if placement == ALL_IN_RAM:
        return IN_RAM
    if placement == ARENA_ALL_IN_RAM:
        placement = ARENA
    if placement == PASSING:
        split = pagoda.Split(device_update_share=0.5)
        return replace(RESIDENT, device="cpu:16MiB", split=split)
    if placement == WEIGHTS_AT_HOME:
        split = pagoda.Split(device_home_share=1.0, device_update_share=1.0)
        return replace(RESIDENT, device="cpu:1MiB", split=split)
    model = layers(LAYERS)
    memory = squeeze(model, placement, directory, announced=accumulation, unit_limit=UNIT_LIMIT)
    if placement != HOST_WEIGHTS:
        return memory
    return replace(memory, host=memory.host + sum(p.numel() for p in model.parameters()) * 2 + 16 * PAGE)


class Training:
    """Steps some of which are clipped, with something done between the backward and the step of one of them, or all."""

    def __init__(self, pattern: str, accumulation: int = 1, between: Between | None = None, at: int | None = 1) -> None:
        self.pattern, self.accumulation, self.between, self.at = pattern, accumulation, between, at
        self.counts: list[tuple[int, int]] = []
        """Updates kept and undone in each step."""

    def __call__(self, model: nn.Module, optimizer: Any, outcome: Outcome) -> None:
        for step, sign in enumerate(self.pattern):
            for number in range(self.accumulation):
                loss = loss_of(model, self.accumulation * step + number) * (CLIPPED if sign == "x" else CALM)
                learn(loss, outcome)
            if self.between is not None and self.at in (None, step):
                self.between(model, optimizer, outcome)
            optimizer.step()
            optimizer.zero_grad()
            outcome.norms.append(optimizer.stats.grad_norm)
            if optimizer.stats.grad_norm is not None:
                assert (optimizer.stats.grad_norm > LIMIT) == (sign == "x")
            self.counts.append((optimizer.stats.updates_kept, optimizer.stats.updates_called_off))


def train(training: Training, memory: pagoda.Memory, speculate: bool = True) -> Outcome:
    return run(
        layers(LAYERS),
        memory,
        training,
        max_grad_norm=LIMIT,
        gradient_accumulation_steps=training.accumulation,
        update=pagoda.Updates(speculate=speculate),
    )


@cache
def reference(pattern: str, accumulation: int = 1, between: Between | None = None) -> Outcome:
    training = Training(pattern, accumulation, between)
    outcome = train(training, RESIDENT, speculate=False)
    assert set(training.counts) == {(0, 0)}
    return outcome


@each_once(pattern=PATTERNS, placement=PLACEMENTS, accumulation=[1, 2])
def test_no_guess_changes_a_bit(pattern: str, placement: str, accumulation: int, tmp_path: Path) -> None:
    training = Training(pattern, accumulation)
    outcome = train(training, memory_of(placement, tmp_path, accumulation))
    outcome.assert_same_bits(reference(pattern, accumulation))
    for sign, (kept, undone) in zip(pattern, training.counts, strict=True):
        assert (kept == 0 and undone) if sign == "x" else (kept and undone == 0)
    plan = outcome.plan
    speculated = plan.placement.speculated
    assert training.counts[-1][0] + training.counts[-1][1] <= len(speculated)
    copied = sum(plan.layout.pages(plan.units[unit], GRAD) for unit in speculated) * PAGE
    if placement in (ALL_IN_RAM, PASSING):
        states = sum(plan.layout.pages(unit, state.name) for unit in plan.units for state in plan.layout.states) * PAGE
        assert plan.bytes["host"][VERSIONS] == states
        assert speculated == {unit.index for unit in plan.units}
        return
    if placement == WEIGHTS_AT_HOME:
        there = plan.placement.units_with(DEVICE, [WEIGHT]) & speculated
        assert there
        assert not plan.placement.units_with(DEVICE, ["exp_avg"])
        copied = sum(plan.layout.pages(plan.units[unit], WEIGHT) for unit in there) * PAGE
        assert plan.bytes[DEVICE][VERSIONS] == copied
        return
    assert plan.placement.pages("ssd", VERSIONS) > plan.placement.spare_on_ssd
    assert (plan.bytes["host"].get(VERSIONS, 0) >= copied) is (placement == HOST_WEIGHTS)


def test_states_in_ram_are_speculated_on_by_default_where_a_device_computes(tmp_path: Path) -> None:
    """The CPU is idle during backward then. If the CPU computes, updates would take its time."""
    training = Training("...")
    train(training, RESIDENT).assert_same_bits(reference(training.pattern))
    assert set(training.counts) == {(0, 0)}
    memory = replace(memory_of(ARENA_ALL_IN_RAM, tmp_path), host="64MiB")
    outcome = train(training, memory)
    outcome.assert_same_bits(reference(training.pattern))
    assert outcome.plan.bytes["host"][VERSIONS]
    assert training.counts[-1][0]


def freezing(model: Any, optimizer: Any, outcome: Outcome) -> None:
    """Some parameters of most units, and all of one unit, do not train in the second and third step."""
    for step, sign in enumerate("..x.."):
        for number, param in enumerate(model.parameters()):
            param.requires_grad_(step not in (1, 2) or (number % 3 != 1 and number > 2))
        learn(loss_of(model, step) * (CLIPPED if sign == "x" else CALM), outcome)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("rule", "placement"),
    [
        *((pagoda.AdamW(lr=1e-2, moments="8bit"), placement) for placement in PLACEMENTS[:2] + PLACEMENTS[4:]),
        *((pagoda.Adafactor(lr=1e-2), placement) for placement in (ALL_IN_RAM, PASSING, WEIGHTS_AT_HOME)),
    ],
)
def test_what_an_update_does_not_change_is_in_the_new_states_too(rule: Any, placement: str, tmp_path: Path) -> None:
    def trained(memory: pagoda.Memory, speculate: bool) -> Outcome:
        update = pagoda.Updates(speculate=speculate)
        return run(
            layers(LAYERS),
            memory,
            freezing,
            rule=rule,
            max_grad_norm=LIMIT,
            gradient_accumulation_steps=1,
            update=update,
        )

    outcome = trained(memory_of(placement, tmp_path), True)
    assert outcome.plan.bytes["host"][VERSIONS]
    outcome.assert_same_bits(trained(RESIDENT, False))


def let_them_end(_model: nn.Module, optimizer: Any, _outcome: Outcome) -> None:
    """A confirmed update that has not begun is done in place. A lane's thread may refer to weights for a moment after
    its work, so that an update waits for the next question."""
    engine = optimizer._engine
    for _ in range(100):
        engine.accesses.wait_until_idle()
        if not engine._executor._held:
            break
        time.sleep(0.001)
        engine._executor.poll()


def test_confirming_an_update_exchanges_the_runs_and_the_old_ones_are_poisoned() -> None:
    """No state is copied: the new values are where the update has written them, in the pages of the line."""
    model, optimizer = speculating(IN_RAM)
    store = optimizer._engine.store
    region = store._regions[HOST]
    keys = [(unit.index, state.name) for unit in store.plan.units for state in store.plan.layout.states]
    before = [store.newest(*key) for key in keys]
    for sign, moves in (".", True), (".", True), ("x", False), (".", True):
        Training(sign, between=let_them_end, at=None)(model, optimizer, Outcome())
        optimizer.synchronize()
        homes = [store.newest(*key) for key in keys]
        assert all((old != new) is moves for old, new in zip(before, homes, strict=True)), sign
        free = {*range(region.count)} - {page for home in homes for page in range(home.start, home.stop)}
        assert len(free) * PAGE >= store.plan.bytes[HOST][VERSIONS]
        assert {bytes(region.part(PageRun(page, 1)).view()) for page in free} == {b"\xff" * PAGE}, sign
        before = homes
    optimizer.close()


def test_it_pauses_until_some_steps_were_not_clipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "CALM_STEPS", 3)
    training = Training(".x..x.....")
    train(training, memory_of(ALL_ON_SSD, tmp_path)).assert_same_bits(reference(training.pattern))
    assert [bool(kept) for kept, _ in training.counts] == [True] + [False] * 7 + [True] * 2
    assert [bool(undone) for _, undone in training.counts] == [False, True] + [False] * 8


def gathered_to_modify(model: nn.Module, _optimizer: Any, _outcome: Outcome) -> None:
    with pagoda.gathered(model, modify=True):
        for param in model.parameters():
            param.data.mul_(0.5)


def evaluation(model: nn.Module, _optimizer: Any, outcome: Outcome) -> None:
    with torch.no_grad():
        outcome.losses.append(loss_of(model).item())


def state_dicts(model: nn.Module, optimizer: Any, outcome: Outcome) -> None:
    outcome.losses += [weight.double().sum().item() for weight in model.state_dict().values()]
    for state in optimizer.state_dict()["state"].values():
        outcome.losses += [value.double().sum().item() for value in state.values()]


def drained(_model: nn.Module, optimizer: Any, _outcome: Outcome) -> None:
    optimizer.synchronize()


def another_learning_rate(_model: nn.Module, optimizer: Any, _outcome: Outcome) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.1


def gradients_dropped(_model: nn.Module, optimizer: Any, _outcome: Outcome) -> None:
    optimizer.zero_grad()


def one_gradient_dropped(model: nn.Module, _optimizer: Any, _outcome: Outcome) -> None:
    for param in list(model.parameters())[::5]:
        param.grad = None


def clipped_by_torch(model: nn.Module, _optimizer: Any, _outcome: Outcome) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-6)


def another_backward(model: nn.Module, optimizer: Any, _outcome: Outcome) -> None:
    with pytest.raises(UsageError, match="announced"):
        loss_of(model).backward()
    optimizer.zero_grad()


def gradients_that_are_not_finite(model: nn.Module, optimizer: Any, _outcome: Outcome) -> None:
    optimizer.zero_grad()
    (loss_of(model) * torch.nan).backward()
    with pytest.raises(NonFiniteGradientError):
        optimizer.step()


def interrupted_backward(model: Any, optimizer: Any, _outcome: Outcome) -> None:
    optimizer.zero_grad()

    def interrupt(_grad: torch.Tensor) -> None:
        raise KeyboardInterrupt

    hook = model.layers[0].register_forward_hook(lambda _m, _i, out: out.register_hook(interrupt) and None)
    with pytest.raises(KeyboardInterrupt):
        loss_of(model).backward()
    hook.remove()
    optimizer.zero_grad()


BETWEEN = (
    gathered_to_modify,
    evaluation,
    state_dicts,
    drained,
    another_learning_rate,
    gradients_dropped,
    one_gradient_dropped,
    clipped_by_torch,
    another_backward,
    gradients_that_are_not_finite,
    interrupted_backward,
)


@each_once(between=BETWEEN, placement=[ALL_IN_RAM, HOST_WEIGHTS, ALL_ON_SSD, WEIGHTS_AT_HOME])
def test_whatever_is_done_before_the_step_finds_the_old_state(between: Between, placement: str, tmp_path: Path) -> None:
    training = Training("...", between=between)
    train(training, memory_of(placement, tmp_path)).assert_same_bits(reference("...", 1, between))
    (first, at, last) = training.counts
    assert all(kept and not undone for kept, undone in (first, last))
    assert at[1] > 0


def speculating(memory: pagoda.Memory) -> tuple[nn.Module, PagedOptimizer]:
    return pagoda.wrap(
        layers(LAYERS),
        pagoda.AdamW(lr=1e-2),
        memory=memory,
        max_grad_norm=LIMIT,
        gradient_accumulation_steps=1,
        precision="bf16",
    )


def test_closing_before_the_step_frees_every_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    model, optimizer = speculating(memory_of(ALL_ON_SSD, tmp_path))
    (loss_of(model) * CALM).backward()
    optimizer.close()
    assert threading.active_count() == before


@pytest.mark.parametrize(("placement", "wait"), [(HOST_WEIGHTS, True), (ARENA_ALL_ON_SSD, False)])
def test_a_checkpoint_has_no_update_that_no_step_has_asked_for(placement: str, wait: bool, tmp_path: Path) -> None:
    """One that is saved between backward and step is that of the step before, and the run that goes on is no other."""
    (tmp_path / "pages").mkdir()

    def save(_model: nn.Module, optimizer: Any, _outcome: Outcome) -> None:
        optimizer.save_checkpoint(tmp_path / "saved", {}, wait=wait)

    def resumed(_model: nn.Module, optimizer: Any, _outcome: Outcome) -> None:
        optimizer.load_checkpoint(tmp_path / "saved")

    training = Training("..x.", between=save)
    train(training, memory_of(placement, tmp_path / "pages")).assert_same_bits(reference(training.pattern))
    loaded = run(layers(LAYERS), RESIDENT, resumed, max_grad_norm=LIMIT, gradient_accumulation_steps=1)
    first = reference(".")
    loaded.losses, loaded.norms = first.losses, first.norms
    loaded.assert_same_bits(first)


def test_an_update_that_failed_before_the_step_is_done_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every speculated update some block's state cannot be written; those that `step()` queues can be."""
    store, share = SSDTier.store, SSDTier.share
    doomed: set[int] = set()

    def share_doomed(tier: SSDTier, run: PageRun, into: PageRun) -> None:
        doomed.add(into.start)
        share(tier, run, into)

    def broken(tier: SSDTier, run: PageRun, offset_bytes: int, data: memoryview) -> None:
        if run.start in doomed:
            doomed.discard(run.start)
            raise StorageError("the disk failed")
        store(tier, run, offset_bytes, data)

    monkeypatch.setattr(SSDTier, "share", share_doomed)
    monkeypatch.setattr(SSDTier, "store", broken)
    training = Training("...", between=let_them_end, at=None)
    train(training, memory_of(HOST_WEIGHTS, tmp_path)).assert_same_bits(reference(training.pattern))
    assert all(undone and not kept for kept, undone in training.counts), training.counts
    assert len(training.counts) == 3


def test_an_update_that_fails_after_the_step_has_let_it_stand_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SSDTier.store
    broken, stepped = threading.Event(), threading.Event()

    def fail(tier: SSDTier, run: PageRun, offset_bytes: int, data: memoryview) -> None:
        if broken.is_set():
            assert stepped.wait(30)
            raise StorageError("the disk failed")
        store(tier, run, offset_bytes, data)

    monkeypatch.setattr(SSDTier, "store", fail)
    training = Training(".")

    def first_fails(model: nn.Module, optimizer: Any, outcome: Outcome) -> None:
        broken.set()
        training(model, optimizer, outcome)
        stepped.set()
        assert training.counts[0][0]
        with pytest.raises(StorageError, match=r"the disk failed -- .* Nothing is lost"):
            optimizer.synchronize()
        broken.clear()

    outcome = run(
        layers(LAYERS),
        memory_of(HOST_WEIGHTS, tmp_path),
        first_fails,
        max_grad_norm=LIMIT,
        gradient_accumulation_steps=1,
        update=pagoda.Updates("sync", speculate=True),
    )
    outcome.assert_same_bits(reference("."))


def test_a_checkpoint_right_after_a_step_keeps_the_pages_that_running_updates_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update that the step has confirmed writes to other pages than those that states have until it ends."""
    (tmp_path / "pages").mkdir()
    store, slow = SSDTier.store, threading.Event()

    def slowly(tier: SSDTier, run: PageRun, offset_bytes: int, data: memoryview) -> None:
        if slow.is_set():
            time.sleep(0.02)
        store(tier, run, offset_bytes, data)

    monkeypatch.setattr(SSDTier, "store", slowly)

    def save(_model: nn.Module, optimizer: Any, _outcome: Outcome) -> None:
        optimizer.save_checkpoint(tmp_path / "saved", {}, wait=False)

    def resumed(_model: nn.Module, optimizer: Any, _outcome: Outcome) -> None:
        optimizer.load_checkpoint(tmp_path / "saved")

    memory = replace(memory_of(ARENA_ALL_ON_SSD, tmp_path / "pages"), ssd_checkpoints=1)
    training = Training("..")

    def trained(model: nn.Module, optimizer: Any, outcome: Outcome) -> None:
        slow.set()
        training(model, optimizer, outcome)
        save(model, optimizer, outcome)
        optimizer.wait_for_checkpoint()

    settings = {"max_grad_norm": LIMIT, "gradient_accumulation_steps": 1}
    run(layers(LAYERS), memory, trained, update=pagoda.Updates("sync", speculate=True), **settings)
    slow.clear()
    assert training.counts[-1][0], "updates were confirmed"
    loaded = run(layers(LAYERS), RESIDENT, resumed, **settings)
    whole = reference("..")
    loaded.losses, loaded.norms = whole.losses, whole.norms
    loaded.assert_same_bits(whole)


def test_questions_about_weights_that_a_graph_keeps_do_not_pile_up() -> None:
    model, optimizer = speculating(IN_RAM)
    held = []
    for _ in range(4):
        loss = loss_of(model) * CALM
        loss.backward(retain_graph=True)
        held.append(loss)
        optimizer.step()
        optimizer.zero_grad()
    assert len(optimizer._engine._executor._held) <= 2 * len(optimizer._engine.units)
    held.clear()
    optimizer.close()
