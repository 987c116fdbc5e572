"""Updates give the bits of the flat kernel, within the ring, and say when they fail."""

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from pairwise import each_once
from zoo import ALL_ON_SSD as EVERYTHING_ON_SSD, Outcome, squeeze

import pagoda
from pagoda.config.training import Precision
from pagoda.errors import NonFiniteGradientError
from pagoda.memory.page import Run
from pagoda.optim import AdamW, flat
from pagoda.optimizer import PagedOptimizer
from pagoda.runtime.unit import LiveUnit

from .conftest import Wrap
from .loops import WIDTH, Layers
from .parts import ALL_ON_SSD, MOMENTS_ON_SSD, PAGE, RESIDENT, Parts, Sizes, parts

SOON_S = 30
SIZES: Sizes = [[9000, 130], [2048], [40, 7000, -3000], [5000]]


class Updates:
    """Steps over `Parts`, and what their results must be."""

    def __init__(self, part: Parts) -> None:
        self.part = part
        self.states = part.plan.layout.states
        self.expected: dict[int, dict[str, torch.Tensor]] = {}
        for unit in part.units:
            self.write(unit)

    def write(self, unit: LiveUnit) -> None:
        """Give a unit its first states."""
        part, total = self.part, unit.spec.trainable_numel
        master = torch.randn(unit.spec.numel, generator=torch.Generator().manual_seed(unit.index))
        flats = {"weight": master.clone(), "exp_avg": master[:total] * 0.1, "exp_avg_sq": master[:total] ** 2}
        if part.dtype is torch.bfloat16:
            flats["weight"] = torch.empty(unit.spec.numel, dtype=torch.bfloat16)
            low = torch.empty(unit.spec.numel, dtype=torch.int16)
            flat.split(master, flats["weight"], low)
            flats["weight_low"] = low[:total].clone()
        for name, values in flats.items():
            part.store.write(unit.index, name, 0, values)
        self.expected[unit.index] = flats

    def step(self, *units: int, seed: int = 1) -> None:
        """A step with gradients of these units; notes what it must give."""
        for index in units:
            unit = self.part.units[index]
            self.part.arrive(unit, seed)
            for slot in range(unit.trainable):
                placed, rule = unit.spec.slots[slot], AdamW().with_group(self.part.groups[index, slot])
                piece = slice(placed.offset, placed.offset + placed.param.numel)
                views = {name: values[piece] for name, values in self.expected[index].items()}
                grad = self.part.random_gradient(unit, slot, seed)
                flat.update(rule, views, grad, rule.scalars(unit.steps[slot] + 1, 1.0))
        self.part.step()

    def assert_all_as_expected(self) -> None:
        for unit in self.part.units:
            for name, values in self.expected[unit.index].items():
                for slot in unit.spec.slots:
                    if name != "weight" and not slot.param.trainable:
                        continue
                    found = self.part.store.read(unit.index, name, slot.offset, slot.param.numel)
                    wanted = values[slot.offset : slot.offset + slot.param.numel]
                    assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)), (unit.index, name)

    def assert_ended(self) -> None:
        """All updates have ended as expected, and have given back what they had."""
        self.part.engine.drain()
        self.assert_all_as_expected()
        assert self.part.scheduler.gradients.pages.in_use == 0


@contextmanager
def updates(directory: Path, sizes: Sizes = SIZES, **settings: object) -> Iterator[Updates]:
    with parts(directory, sizes, **settings) as part:
        yield Updates(part)


# --- results -----------------------------------------------------------------------------------------------


@each_once(precision=["bf16", "fp32"], placement=[RESIDENT, MOMENTS_ON_SSD, ALL_ON_SSD], block_limit=[1, 4000, 1 << 20])
def test_results_are_those_of_the_flat_kernel_on_the_whole_unit_however_it_is_cut(
    tmp_path: Path, placement: str, precision: Precision, block_limit: int
) -> None:
    with updates(tmp_path, placement=placement, precision=precision, block_limit=block_limit) as running:
        for seed in (1, 2, 3):
            running.step(0, 1, 2, 3, seed=seed)
        running.assert_ended()


def test_weights_in_ram_can_be_used_while_moments_are_still_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with updates(tmp_path, placement=MOMENTS_ON_SSD) as running:
        part, ssd = running.part, running.part.store.ssd
        gate, store, gradient = threading.Event(), ssd.store, part.store.run(1, "grad")

        def slow(run: Run, offset: int, data: memoryview) -> None:
            assert run == gradient or gate.wait(SOON_S)
            store(run, offset, data)

        monkeypatch.setattr(ssd, "store", slow)
        try:
            running.step(1)
            weights = part.engine.accesses.read(part.units[1])
            assert torch.equal(weights, running.expected[1]["weight"])
            assert not part.scheduler.updates.drained
        finally:
            gate.set()
        running.assert_ended()


# --- the ring ----------------------------------------------------------------------------------------------


def test_an_update_moves_each_byte_of_its_states_once_each_way(tmp_path: Path) -> None:
    with updates(tmp_path, [[4 * PAGE]], placement=MOMENTS_ON_SSD) as running:
        part = running.part
        part.arrive(part.units[0])
        part.settle()
        for lane in ("ssd_read", "ssd_write"):
            part.bytes_moved(lane)
        part.step()
        part.settle()
        states = 4 * PAGE * sum(state.dtype.itemsize for state in running.states[1:])
        assert part.bytes_moved("ssd_read") == states
        assert part.bytes_moved("ssd_write") == states


def test_states_are_not_read_through_a_slot_that_a_dropped_read_still_fills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with updates(tmp_path, placement=ALL_ON_SSD, block_limit=1) as running:
        path, store = running.part.engine._executor.feeders[0].path, running.part.store
        load, go_on, being_filled = store.ssd.load, threading.Event(), set[int]()

        def load_later(run: Run, offset: int, into: memoryview) -> None:
            address = torch.frombuffer(into, dtype=torch.uint8).data_ptr()
            if threading.current_thread() is threading.main_thread():
                assert address not in being_filled
            else:
                being_filled.add(address)
                go_on.wait(SOON_S)
                being_filled.remove(address)
            load(run, offset, into)

        monkeypatch.setattr(store.ssd, "load", load_later)
        path.read_ahead(0)
        while not being_filled:
            time.sleep(0.001)
        path.drop_ahead()
        timer = threading.Timer(0.1, go_on.set)
        timer.start()
        running.assert_all_as_expected()
        timer.join()


@each_once(placement=[MOMENTS_ON_SSD, ALL_ON_SSD], rng_seed=range(2))
def test_units_may_be_updated_in_any_order_though_nobody_waits_for_writes(
    tmp_path: Path, placement: str, rng_seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(rng_seed)
    with updates(tmp_path, placement=placement, staged_units=8, block_limit=1) as running:
        order, ssd = list(range(len(SIZES))), running.part.store.ssd
        store = ssd.store

        def slow(run: Run, offset: int, data: memoryview) -> None:
            time.sleep(0.002)
            store(run, offset, data)

        monkeypatch.setattr(ssd, "store", slow)
        for seed in range(1, 9):
            if seed > 4:
                rng.shuffle(order)
            for index in order:
                running.step(index, seed=seed)
                if rng.random() < 0.5:
                    running.part.settle()
                    time.sleep(0.005)
            if seed % 3 == 0:
                running.assert_ended()
        running.assert_ended()


# --- errors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", ["every gradient", "one gradient"])
def test_an_update_during_backward_that_is_refused_counts_as_no_step(bad: str, wrap: Wrap) -> None:
    memory = pagoda.Memory(host="64MiB", unit_limit="64KiB", page_size=PAGE)  # a unit for each layer
    model, optimizer = wrap(Layers(2), memory, accumulation_steps=1)

    def backward(scale: float = 1.0) -> None:
        (model(torch.ones(2, WIDTH), [0, 1]) * scale).backward()

    backward()
    optimizer.step()
    if bad == "every gradient":
        backward(torch.nan)
    else:
        spoil = model.layers[0][0].bias.register_hook(lambda grad: grad * torch.nan)
        backward()
        spoil.remove()
    with pytest.raises(NonFiniteGradientError):
        optimizer.step()
    refused = {"layers.0.0.weight", "layers.0.0.bias"} if bad == "one gradient" else {n for n, _ in steps_of(optimizer)}
    assert dict(steps_of(optimizer)) == {name: 2 - (name in refused) for name, _ in steps_of(optimizer)}
    backward()
    optimizer.step()
    assert dict(steps_of(optimizer)) == {name: 3 - (name in refused) for name, _ in steps_of(optimizer)}


def test_states_that_are_read_across_a_step_are_refused_and_the_step_is_whole(wrap: Wrap, tmp_path: Path) -> None:
    outcomes = []
    for reads in (True, False):
        torch.manual_seed(0)
        model, optimizer = wrap(Layers(2), squeeze(Layers(2), EVERYTHING_ON_SSD, tmp_path, clipping=False))
        states = optimizer.named_states()
        for _ in range(3):
            model(torch.ones(2, WIDTH), [0, 1]).backward()
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
