"""Updates give the bits of the flat kernel, in the order of need, within the ring, and say when they fail."""

import itertools
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from zoo import ALL_ON_SSD as EVERYTHING_ON_SSD
from zoo import squeeze

import pagoda
from pagoda.errors import NonFiniteGradientError, StorageError
from pagoda.memory import Run
from pagoda.optim import AdamW, Precision, Scalars, flat
from pagoda.plan.layout import RING_SLOTS
from pagoda.runtime.gradients import UnitGradient
from pagoda.runtime.lanes import Handle, Work
from pagoda.runtime.optimizer import PagedOptimizer
from pagoda.runtime.segments import BlockSegment
from pagoda.runtime.updates import BlockStream, Updater

from .conftest import Wrap
from .loops import WIDTH, Layers
from .parts import ALL_ON_SSD, MOMENTS_ON_SSD, PAGE, RESIDENT, Parts, Sizes, parts

SOON_S = 30
SIZES: Sizes = [[9000, 130], [2048], [40, 7000, -3000], [5000]]


def scalars(step: int, lr: float = 1e-2) -> Scalars:
    return AdamW(lr=lr, weight_decay=0.1).scalars(step, grad_scale=0.7)


class Updates:
    """An updater over `Parts`, and what its results must be."""

    def __init__(self, part: Parts) -> None:
        self.part = part
        self.finished: list[int] = []
        self.latest: dict[int, Handle] = {}
        stream = BlockStream(part.store, part.kernel, part.lanes, self._finished)
        self.updater = Updater(part.store, part.gradients, stream)
        self.states = part.plan.layout.states
        self.expected: dict[int, dict[str, torch.Tensor]] = {}
        for unit in part.units:
            total = unit.spec.trainable_numel
            generator = torch.Generator().manual_seed(unit.index)
            master = torch.randn(unit.spec.numel, generator=generator)
            flats = {"weight": master.clone(), "exp_avg": master[:total] * 0.1, "exp_avg_sq": master[:total] ** 2}
            if part.dtype is torch.bfloat16:
                flats["weight"] = torch.empty(unit.spec.numel, dtype=torch.bfloat16)
                low = torch.empty(unit.spec.numel, dtype=torch.int16)
                flat.split(master, flats["weight"], low)
                flats["weight_low"] = low[:total].clone()
            for name, values in flats.items():
                part.store.write(unit.index, name, 0, values)
            self.expected[unit.index] = flats

    def _finished(self, record: UnitGradient) -> None:
        self.finished.append(record.unit.index)
        self.part.gradients.release(record)

    def segments(self, index: int, step: int, slots: Sequence[int] | None = None) -> list[BlockSegment]:
        """One segment for each trainable parameter, each with a learning rate of its own."""
        unit = self.part.units[index]
        return [
            BlockSegment(
                unit.spec.slots[slot].offset,
                unit.spec.slots[slot].offset + unit.spec.slots[slot].param.numel,
                scalars(step, 1e-2 / (1 + slot)),
            )
            for slot in (range(unit.trainable) if slots is None else slots)
        ]

    def submit(self, index: int, step: int = 1, urgency: float = 0.0, slots: Sequence[int] | None = None) -> Handle:
        """Queue the update of a unit whose gradient has just arrived, and note what it must give."""
        part, unit = self.part, self.part.units[index]
        if index in self.latest:
            self.latest[index].wait()  # as the engine does before the next gradient may overwrite this one
        record = part.arrive(unit, seed=step)
        record.settle()
        part.gradients.take(record)
        segments = self.segments(index, step, slots)
        states = self.expected[index]
        gradient = torch.zeros(unit.spec.trainable_numel, dtype=part.dtype)
        for slot in range(unit.trainable):
            placed = unit.spec.slots[slot]
            grad = part.random_gradient(unit, slot, step)
            gradient[placed.offset : placed.offset + placed.param.numel] = grad
        for segment in segments:
            views = {name: values[segment.start : segment.stop] for name, values in states.items()}
            flat.update(AdamW(), views, gradient[segment.start : segment.stop], segment.scalars)
        self.latest[index] = self.updater.submit(record, segments, urgency)
        return self.latest[index]

    def assert_all_as_expected(self, but: Sequence[int] = ()) -> None:
        for unit in self.part.units:
            if unit.index in but:
                continue
            for name, values in self.expected[unit.index].items():
                for slot in unit.spec.slots:
                    if name != "weight" and not slot.param.trainable:
                        continue
                    found = self.part.store.read(unit.index, name, slot.offset, slot.param.numel)
                    wanted = values[slot.offset : slot.offset + slot.param.numel]
                    assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)), (unit.index, name)


@contextmanager
def updates(directory: Path, sizes: Sizes = SIZES, **settings: object) -> Iterator[Updates]:
    """An updater that is closed before its lanes are, whatever the test did."""
    with parts(directory, sizes, **settings) as part:  # type: ignore[arg-type]
        running = Updates(part)
        try:
            yield running
        finally:
            close(running)


def close(running: Updates) -> None:
    """Close the updater; fails instead of hanging."""
    thread = threading.Thread(target=running.updater.close, daemon=True)
    thread.start()
    thread.join(SOON_S)
    assert not thread.is_alive(), "close() never returned"


# --- results -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("placement", [RESIDENT, MOMENTS_ON_SSD, ALL_ON_SSD])
@pytest.mark.parametrize("block_limit", [1, 4000, 1 << 20])
def test_results_are_those_of_the_flat_kernel_on_the_whole_unit_however_it_is_cut(
    tmp_path: Path,
    placement: str,
    precision: Precision,
    block_limit: int,
) -> None:
    with updates(tmp_path, placement=placement, precision=precision, block_limit=block_limit) as running:
        for step in (1, 2, 3):
            for index in range(len(SIZES)):
                running.submit(index, step)
        running.updater.drain()
        running.assert_all_as_expected()
        assert sorted(running.finished) == sorted(list(range(len(SIZES))) * 3)
        assert running.part.staging.pool.in_use == 0


def test_parameters_without_a_gradient_and_frozen_ones_keep_every_bit(tmp_path: Path) -> None:
    for placement in (RESIDENT, ALL_ON_SSD):
        with updates(tmp_path, [[3000, 500, 4000, -700]], placement=placement) as running:
            running.submit(0, slots=[0, 2])
            running.updater.drain()
            running.assert_all_as_expected()


def test_weights_in_ram_can_be_used_while_moments_are_still_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with updates(tmp_path, placement=MOMENTS_ON_SSD) as running:
        part, ssd = running.part, running.part.store.ssd
        assert ssd is not None
        gate, store, gradient = threading.Event(), ssd.store, part.store.run(1, "grad")

        def slow(run: Run, offset: int, data: memoryview) -> None:
            assert run == gradient or gate.wait(SOON_S)
            store(run, offset, data)

        monkeypatch.setattr(ssd, "store", slow)
        try:
            running.submit(1).wait()
            home = part.store.tensor(1, "weight")
            assert home is not None
            assert torch.equal(home[:2048], running.expected[1]["weight"][:2048])
            assert not running.updater._latest[1].done
        finally:
            gate.set()
        running.updater.drain()
        running.assert_all_as_expected()


# --- order -------------------------------------------------------------------------------------------------


class Gate(Handle):
    """Work that ends when the test says so, and tells when somebody waits for it."""

    __slots__ = ("waited_for",)

    def __init__(self) -> None:
        super().__init__("d2h")
        self.waited_for = threading.Event()

    def wait(self) -> None:
        self.waited_for.set()
        super().wait()


def test_the_most_urgent_update_comes_first_and_equals_in_the_order_they_came(tmp_path: Path) -> None:
    sizes = [[100]] * 7
    with updates(tmp_path, sizes, placement=RESIDENT, update_threads=1) as running:
        gate = Gate()
        record = running.part.arrive(running.part.units[0])
        record.settle()
        record.pending.append(gate)
        running.part.gradients.take(record)
        running.updater.submit(record, running.segments(0, 1), urgency=99.0)
        assert gate.waited_for.wait(SOON_S), "the updater is busy with unit 0"
        urgencies = {1: 5.0, 2: 3.0, 3: 8.0, 4: 3.0, 5: 1.0, 6: float("inf")}
        for index, urgency in urgencies.items():
            running.submit(index, urgency=urgency)
        gate.finish()
        running.updater.drain()
        assert running.finished == [0, *sorted(urgencies, key=lambda index: urgencies[index])]


def test_an_urgent_update_whose_gradient_waits_for_an_earlier_one_does_not_go_first(tmp_path: Path) -> None:
    """As on ranks that have all weights: collectives go in order, and one that shares an earlier update's result may
    stand before one that brings a later gradient."""
    with updates(tmp_path, [[100]] * 3, placement=RESIDENT, update_threads=1) as running:
        gate, behind = Gate(), Gate()
        for index, waits_for, urgency in ((0, gate, 99.0), (1, None, 9.0), (2, behind, 1.0)):
            record = running.part.arrive(running.part.units[index])
            record.settle()
            record.pending += [waits_for] if waits_for is not None else []
            running.part.gradients.take(record)
            handle = running.updater.submit(record, running.segments(index, 1), urgency)
            if index == 0:
                assert gate.waited_for.wait(SOON_S), "the updater is busy with unit 0"
            if index == 1:
                handle.then(lambda _: behind.finish())
        gate.finish()
        draining = threading.Thread(target=running.updater.drain, daemon=True)
        draining.start()
        draining.join(SOON_S)
        if not behind.done:
            behind.finish()  # so that all ends, whatever came first
        assert running.finished == [0, 1, 2]


@pytest.mark.parametrize("placement", [RESIDENT, MOMENTS_ON_SSD, ALL_ON_SSD])
def test_an_update_reads_what_the_one_before_wrote_though_nobody_waited_for_its_writes(
    tmp_path: Path, placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with updates(tmp_path, placement=placement, staged_units=3) as running:
        ssd = running.part.store.ssd
        if ssd is not None:
            store = ssd.store

            def slow(run: Run, offset: int, data: memoryview) -> None:
                time.sleep(0.005)
                store(run, offset, data)

            monkeypatch.setattr(ssd, "store", slow)
        for step in range(1, 6):
            running.submit(0, step)
        running.updater.drain()
        running.assert_all_as_expected()


# --- the ring ----------------------------------------------------------------------------------------------


def test_the_ring_bounds_what_is_in_flight_and_blocks_never_share_its_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with updates(tmp_path, [[20_000]] * 4, placement=ALL_ON_SSD, ssd_threads=4, block_limit=1) as running:
        part, ssd = running.part, running.part.store.ssd
        assert ssd is not None
        part.settle()
        lock = threading.Lock()
        extents = {part.store.run(u.index, s.name): (u.index, s) for u in part.units for s in running.states}
        frames: dict[int, tuple[int, int, str]] = {}
        """Address in the ring -> the block and state it holds."""
        written: dict[tuple[int, int], int] = {}
        most = 0
        clashes: list[object] = []

        def address(view: memoryview) -> int:
            return torch.frombuffer(view, dtype=torch.uint8, count=1).data_ptr()

        def block(run: Run, offset: int) -> tuple[int, int, str]:
            unit, state = extents[run]
            return unit, offset // state.dtype.itemsize, state.name

        load, store = ssd.load, ssd.store

        def seen_load(run: Run, offset: int, into: memoryview) -> None:
            nonlocal most
            if run in extents:
                with lock:
                    key = block(run, offset)
                    if address(into) in frames:
                        clashes.append((key, frames[address(into)]))
                    frames[address(into)] = key
                    most = max(most, len({(unit, start) for unit, start, _ in frames.values()}))
            load(run, offset, into)

        def seen_store(run: Run, offset: int, data: memoryview) -> None:
            time.sleep(0.001)
            store(run, offset, data)
            if run in extents:
                with lock:
                    key = block(run, offset)
                    if frames.pop(address(data)) != key:
                        clashes.append(key)
                    written[key[:2]] = written.get(key[:2], 0) + 1

        monkeypatch.setattr(ssd, "load", seen_load)
        monkeypatch.setattr(ssd, "store", seen_store)
        for index in range(4):
            running.submit(index)
        running.updater.drain()
        monkeypatch.undo()
        running.assert_all_as_expected()
        assert clashes == []
        assert frames == {}
        assert set(written.values()) == {len(running.states)}
        assert len(written) > 2 * RING_SLOTS, "the ring is used again and again"
        assert 1 < most <= RING_SLOTS


def test_an_update_moves_each_byte_of_its_states_once_each_way(tmp_path: Path) -> None:
    with updates(tmp_path, [[4 * PAGE]], placement=ALL_ON_SSD) as running:
        running.part.settle()
        record = running.part.arrive(running.part.units[0], seed=1)
        running.part.settle()
        for lane in running.part.lanes:
            running.part.bytes_moved(lane)
        running.part.gradients.take(record)
        running.updater.submit(record, running.segments(0, 1), 0.0)
        running.updater.drain()
        states = 4 * PAGE * sum(state.dtype.itemsize for state in running.states)
        assert running.part.bytes_moved("ssd_read") == states
        assert running.part.bytes_moved("ssd_write") == states


@pytest.mark.parametrize("placement", [MOMENTS_ON_SSD, ALL_ON_SSD])
@pytest.mark.parametrize("seed", range(3))
def test_what_was_read_ahead_is_never_out_of_date(tmp_path: Path, placement: str, seed: int) -> None:
    """Units come in a steady order, then in others; pauses give the updater time to read ahead."""
    rng = random.Random(seed)
    with updates(tmp_path, placement=placement, staged_units=8, block_limit=1) as running:
        order = list(range(len(SIZES)))
        for step in range(1, 9):
            if step > 4:
                rng.shuffle(order)
            for index in order:
                running.submit(index, step)
                if rng.random() < 0.5:
                    running.latest[index].wait()
                    time.sleep(0.005)
            if step % 3 == 0:
                running.updater.drain()
                running.assert_all_as_expected()
        running.updater.drain()
        running.assert_all_as_expected()


def test_blocks_read_ahead_for_nothing_give_way_to_those_that_are_updated(tmp_path: Path) -> None:
    sizes = [[30_000, 10_000], [2048]]
    with parts(tmp_path, sizes, placement=ALL_ON_SSD, staged_units=8, block_limit=1) as part:
        running = Updates(part)
        for step in (1, 2):
            for index in (0, 1):
                running.submit(index, step).wait()
        deadline = time.monotonic() + SOON_S
        while running.updater._stream._free_slots and time.monotonic() < deadline:
            time.sleep(0.01)  # the updater reads ahead the first blocks of unit 0, which came after unit 1
        assert not running.updater._stream._free_slots
        handle = running.submit(0, 3, slots=[1])
        ended = threading.Event()
        handle.then(lambda _: ended.set())
        assert ended.wait(3), "the update waits for a slot that nothing will free"
        running.updater.drain()
        running.assert_all_as_expected()
        close(running)


# --- errors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["load", "store"])
def test_a_failing_disk_reaches_whoever_waits_and_everything_still_ends(
    tmp_path: Path, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with updates(tmp_path, placement=ALL_ON_SSD, staged_units=8) as running:
        part, ssd = running.part, running.part.store.ssd
        assert ssd is not None
        broken = part.store.run(1, "exp_avg")
        real = getattr(ssd, verb)

        def fail(run: Run, offset: int, view: memoryview) -> None:
            if run == broken:
                raise StorageError("the disk is gone")
            real(run, offset, view)

        monkeypatch.setattr(ssd, verb, fail)
        handles = [running.submit(index) for index in range(len(SIZES))]
        with pytest.raises(StorageError, match="the disk is gone"):
            handles[1].wait()
        for index in (0, 2, 3):
            handles[index].wait()
        with pytest.raises(StorageError, match="the disk is gone"):
            running.updater.drain()
        running.assert_all_as_expected(but=[1])
        assert part.staging.pool.in_use == 0
        later = running.submit(0, step=2)
        later.wait()
        running.updater.drain()
        running.assert_all_as_expected(but=[1])


@pytest.mark.parametrize("lane", ["ssd_read", "update", "ssd_write"])
def test_an_update_that_cannot_submit_all_its_work_ends_when_what_runs_has_ended(
    tmp_path: Path, lane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with updates(tmp_path, [[9000], [2048]], placement=ALL_ON_SSD, staged_units=4, block_limit=1) as running:
        part, gate, submitted = running.part, threading.Event(), itertools.count()
        record = part.arrive(part.units[0], seed=1)
        part.settle()
        real = part.lanes[lane].submit

        def submit(work: Work, after: Sequence[Handle] = (), nbytes: int = 0, label: str = "") -> Handle:
            if not label.endswith("layers.0"):
                return real(work, after, nbytes, label)
            if next(submitted):
                raise MemoryError("no room for more work")

            def gated() -> None:
                assert gate.wait(SOON_S)
                work()

            return real(gated, after, nbytes, label)

        monkeypatch.setattr(part.lanes[lane], "submit", submit)
        part.gradients.take(record)
        failing = running.updater.submit(record, running.segments(0, 1), 0.0)
        running.submit(1).wait()  # it is fed after the one that fails
        assert not failing.done
        if lane == "update":
            assert running.finished == [1], "the gradient of unit 0 is still read"
        gate.set()
        with pytest.raises(MemoryError, match="no room"):
            failing.wait()
        with pytest.raises(MemoryError, match="no room"):
            running.updater.drain()
        running.assert_all_as_expected(but=[0])
        assert sorted(running.finished) == [0, 1]
        assert part.staging.pool.in_use == 0
        assert sorted(running.updater._stream._free_slots) == [*range(RING_SLOTS)]


def test_a_gradient_that_cannot_be_read_back_reaches_whoever_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [[2048]] * 4
    with updates(tmp_path, sizes, placement=ALL_ON_SSD, staged_units=2) as running:
        part, ssd = running.part, running.part.store.ssd
        assert ssd is not None
        records = [part.arrive(unit, seed=1) for unit in part.units]
        part.settle()
        assert records[0].buffer is None, "it was written behind and has lost its frames"
        broken, load = part.store.run(0, "grad"), ssd.load

        def fail(run: Run, offset: int, view: memoryview) -> None:
            if run == broken:
                raise StorageError("the disk is gone")
            load(run, offset, view)

        monkeypatch.setattr(ssd, "load", fail)
        handles = []
        for index, record in enumerate(records):
            part.gradients.take(record)
            handles.append(running.updater.submit(record, running.segments(index, 1), float(index)))
        with pytest.raises(StorageError, match="the disk is gone"):
            handles[0].wait()
        for handle in handles[1:]:
            handle.wait()
        with pytest.raises(StorageError):
            running.updater.drain()
        assert part.staging.pool.in_use == 0


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_named(tmp_path: Path) -> None:
    for placement in (RESIDENT, ALL_ON_SSD):
        with updates(tmp_path, placement=placement) as running:
            unit = running.part.units[0]
            bad = running.part.random_gradient(unit, 1, 0)
            bad[3] = float("nan")
            running.part.gradients.add(unit, 0, running.part.random_gradient(unit, 0, 0), accumulate=False)
            record = running.part.gradients.add(unit, 1, bad, accumulate=False)
            running.part.gradients.take(record)
            handle = running.updater.submit(record, running.segments(0, 1), 0.0)
            with pytest.raises(NonFiniteGradientError, match=r"'layers\.0\.p1' is not finite"):
                handle.wait()
            with pytest.raises(NonFiniteGradientError):
                running.updater.drain()
            running.assert_all_as_expected()
            assert running.part.staging.pool.in_use == 0


def test_close_finishes_what_is_queued(tmp_path: Path) -> None:
    with updates(tmp_path, placement=ALL_ON_SSD, staged_units=8) as running:
        for index in range(len(SIZES)):
            running.submit(index)
        close(running)
        running.updater.drain()
        running.assert_all_as_expected()
        assert not running.updater._thread.is_alive()


@pytest.mark.parametrize("bad", ["every gradient", "one gradient"])
def test_an_update_under_backward_that_is_refused_counts_as_no_step(bad: str, wrap: Wrap) -> None:
    memory = pagoda.Memory(host="64MiB", unit_limit="64KiB", page_size=PAGE)  # a unit for each layer
    model, optimizer = wrap(Layers(2), memory, accumulation_steps=1)

    def backward(scale: float = 1.0) -> None:
        (model(torch.ones(2, WIDTH), [0, 1]) * scale).backward()

    backward()
    optimizer.step()
    if bad == "every gradient":
        backward(torch.nan)
    else:
        spoil = model.layers[0][0].bias.register_hook(lambda grad: grad * torch.nan)  # type: ignore[index]
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
                with pytest.raises(pagoda.UsageError, match=r"read all of it before the next step"):
                    next(states)
            elif reads:
                states = optimizer.named_states()
                next(states)
        outcomes.append((model.state_dict(), optimizer.state_dict()["state"]))
        optimizer.close()
    (weights, moments), (expected, expected_moments) = outcomes
    assert all(torch.equal(value, expected[name]) for name, value in weights.items())
    for index, state in moments.items():
        assert all(torch.equal(value, expected_moments[index][name]) for name, value in state.items())


def steps_of(optimizer: PagedOptimizer) -> Iterator[tuple[str, int]]:
    """Updates that each parameter has had, by name."""
    return ((name, int(state["step"])) for name, state in optimizer.named_states())
