"""Gradient extents hold what autograd would have accumulated, wherever their frames have been meanwhile."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagoda.errors import BudgetError, StorageError
from pagoda.optim import Precision
from pagoda.runtime.gradients import UnitGradient
from pagoda.runtime.lanes import Handle

from .parts import ALL_ON_SSD, RESIDENT, Parts, parts

SOON_S = 30
SIZES = [[3000, 17], [2000], [1, 129, 2500], [2048], [700, -900]]
EQUAL = [[2048]] * 4


def contents(part: Parts, record: UnitGradient, slot: int) -> torch.Tensor:
    """One parameter's gradient, brought back from SSD if need be; its frames are free afterwards."""
    assert part.gradients.load(record, block=True)
    record.settle()
    assert record.buffer is not None
    placed = record.unit.spec.slots[slot]
    return record.buffer[placed.offset : placed.offset + placed.param.numel].clone()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    placement=st.sampled_from([RESIDENT, ALL_ON_SSD]),
    precision=st.sampled_from(["bf16", "fp32"]),
    passes=st.integers(1, 3),
    staged_units=st.integers(2, 6),
    write_behind=st.booleans(),
    data=st.data(),
)
def test_extents_hold_the_bits_torch_would_accumulate(
    tmp_path: Path,
    placement: str,
    precision: Precision,
    passes: int,
    staged_units: int,
    write_behind: bool,
    data: st.DataObject,
) -> None:
    with parts(
        tmp_path,
        SIZES,
        placement=placement,
        precision=precision,
        staged_units=staged_units,
        write_behind=write_behind,
    ) as part:
        expected = {(unit.index, slot): torch.zeros(()) for unit in part.units for slot in range(unit.trainable)}
        for number in range(passes):
            for unit in data.draw(st.permutations(part.units)):
                part.arrive(unit, seed=number, accumulate=number > 0)
                for slot in range(unit.trainable):
                    grad = part.random_gradient(unit, slot, number)
                    key = (unit.index, slot)
                    expected[key] = grad.clone() if number == 0 else expected[key].add_(grad)
        records = part.gradients.records()
        assert [record.unit for record in records] == part.units
        for record in records:
            part.gradients.take(record)
            for slot in range(record.unit.trainable):
                wanted = expected[record.unit.index, slot]
                assert torch.equal(bits(contents(part, record, slot)), bits(wanted))
                assert record.square_sums[slot] == pytest.approx(wanted.double().square().sum().item(), rel=1e-12)
                assert record.arrivals[slot] == passes
            assert record.complete
            part.gradients.release(record)
        assert part.staging.pool.in_use == 0
        assert part.gradients.staging_peak_bytes <= part.staging.pool.frames * part.staging.page_bytes


def test_extents_in_ram_take_no_staging_and_no_traffic_to_ssd(tmp_path: Path) -> None:
    with parts(tmp_path, SIZES, placement=RESIDENT) as part:
        for unit in part.units:
            part.arrive(unit)
        part.settle()
        assert part.staging.pool.peak == 0
        assert part.bytes_moved("ssd_write") == 0


def test_complete_units_are_written_behind_and_give_their_frames_to_others(tmp_path: Path) -> None:
    with parts(tmp_path, EQUAL, staged_units=2) as part:
        for unit in part.units:
            part.arrive(unit)
            part.settle()
        extent = part.plan.layout.pages(part.plan.units[0], "grad") * part.plan.page_bytes
        assert part.bytes_moved("ssd_write") == len(EQUAL) * extent
        resident = [record.buffer is not None for record in part.gradients.records()]
        assert resident == [False, False, True, True], "oldest first"
        assert part.bytes_moved("ssd_read") == 0


def test_the_oldest_clean_buffer_makes_room_first(tmp_path: Path) -> None:
    with parts(tmp_path, EQUAL, staged_units=2) as part:
        first, second, third, fourth = part.units
        part.arrive(second)
        part.arrive(first)
        part.settle()
        part.arrive(third)
        resident = {unit.index for unit in part.units if (r := part.gradients.get(unit)) and r.buffer is not None}
        assert resident == {first.index, third.index}
        part.settle()
        part.arrive(fourth)
        resident = {unit.index for unit in part.units if (r := part.gradients.get(unit)) and r.buffer is not None}
        assert resident == {third.index, fourth.index}


def test_a_gradient_used_before_others_need_its_frames_does_not_come_back_from_ssd(tmp_path: Path) -> None:
    with parts(tmp_path, EQUAL, staged_units=2) as part:
        records = [part.arrive(unit) for unit in part.units[:2]]
        part.settle()
        for record in records:
            contents(part, record, 0)
        assert part.bytes_moved("ssd_read") == 0


def test_an_incomplete_gradient_moves_to_ssd_only_when_its_frames_are_needed(tmp_path: Path) -> None:
    sizes = [[1500, 548]] * 3
    with parts(tmp_path, sizes, staged_units=2) as part:
        grads = [part.random_gradient(unit, 0, 5) for unit in part.units]
        for unit, grad in zip(part.units[:2], grads[:2], strict=True):
            part.gradients.add(unit, 0, grad, accumulate=False)
        part.settle()
        assert part.bytes_moved("ssd_write") == 0
        part.gradients.add(part.units[2], 0, grads[2], accumulate=False)
        part.settle()
        assert part.bytes_moved("ssd_write") > 0
        for record, grad in zip(part.gradients.records(), grads, strict=True):
            part.gradients.take(record)
            assert torch.equal(contents(part, record, 0), grad)
            part.gradients.release(record)


def test_without_ssd_the_units_that_hold_the_buffers_are_named(tmp_path: Path) -> None:
    with parts(tmp_path, [[1500, 548]] * 3, staged_units=2, write_behind=False) as part:
        part.store._runs.clear()  # as where no SSD was given
        for unit in part.units[:2]:
            part.gradients.add(unit, 0, part.random_gradient(unit, 0, 0), accumulate=False)
        part.settle()
        with pytest.raises(BudgetError) as refused:
            part.gradients.add(part.units[2], 0, part.random_gradient(part.units[2], 0, 0), accumulate=False)
        for text in ("'layers.0'", "'layers.1'", "unit 'layers.2'", "memory.ssd", "accumulation_steps"):
            assert text in str(refused.value)


def test_clear_drops_everything_and_the_next_gradient_starts_afresh(tmp_path: Path) -> None:
    for placement in (RESIDENT, ALL_ON_SSD):
        with parts(tmp_path, EQUAL, staged_units=2, placement=placement) as part:
            for unit in part.units:
                part.arrive(unit, seed=1)
            part.gradients.clear()
            assert part.gradients.records() == []
            assert part.staging.pool.in_use == 0
            record = part.arrive(part.units[0], seed=2)
            assert record.arrivals == [1]
            assert torch.equal(contents(part, record, 0), part.random_gradient(part.units[0], 0, 2))


def test_clear_leaves_alone_what_an_update_has_been_queued_for(tmp_path: Path) -> None:
    with parts(tmp_path, EQUAL, staged_units=2) as part:
        queued = part.arrive(part.units[0], seed=1)
        part.gradients.take(queued)
        part.arrive(part.units[1], seed=1)
        part.gradients.clear()
        assert torch.equal(contents(part, queued, 0), part.random_gradient(part.units[0], 0, 1))


def test_after_an_update_took_it_a_units_next_gradient_has_a_record_of_its_own(tmp_path: Path) -> None:
    with parts(tmp_path, EQUAL, staged_units=2) as part:
        unit = part.units[0]
        first = part.arrive(unit, seed=1)
        part.gradients.take(first)
        second = part.arrive(unit, seed=2)
        assert second is not first
        assert torch.equal(contents(part, second, 0), part.random_gradient(unit, 0, 2))


def test_adding_waits_until_an_update_gives_frames_back(tmp_path: Path) -> None:
    with parts(tmp_path, EQUAL, staged_units=2, write_behind=False) as part:
        held = [part.arrive(unit) for unit in part.units[:2]]
        part.settle()
        for record in held:
            part.gradients.take(record)
            part.gradients.load(record, block=True)
        added = threading.Event()

        def add() -> None:
            part.arrive(part.units[2])
            added.set()

        thread = threading.Thread(target=add, daemon=True)
        thread.start()
        assert not added.wait(0.05)
        assert not part.gradients.load(UnitGradient(part.units[3], None), block=False), "asking does not wait"
        part.gradients.release(held[0])
        assert added.wait(SOON_S)
        thread.join(SOON_S)
        assert "update" in part.stalls


def test_a_gradient_that_is_not_finite_names_its_first_parameter(tmp_path: Path) -> None:
    with parts(tmp_path, [[100, 200, 300]]) as part:
        unit = part.units[0]
        for slot in range(unit.trainable):
            grad = part.random_gradient(unit, slot, 0)
            grad[7] = (1.0, float("inf"), float("nan"))[slot]
            record = part.gradients.add(unit, slot, grad, accumulate=False)
        record.settle()
        assert record.non_finite() == (1, "layers.0.p1")


def test_gradients_of_another_dtype_or_layout_are_taken_as_the_extent_keeps_them(tmp_path: Path) -> None:
    with parts(tmp_path, [[6]], precision="bf16") as part:
        unit = part.units[0]
        grad = torch.arange(12, dtype=torch.float32)[::2] / 3
        record = part.gradients.add(unit, 0, grad, accumulate=False)
        assert torch.equal(contents(part, record, 0), grad.bfloat16())


def refuse(*_: object) -> None:
    raise StorageError("the disk is gone")


def test_a_failed_read_back_reaches_whoever_waits_for_the_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with parts(tmp_path, EQUAL, staged_units=2) as part:
        for unit in part.units:
            part.arrive(unit)
        part.settle()
        monkeypatch.setattr(part.store.ssd, "load", refuse)
        record = part.gradients.records()[0]
        part.gradients.load(record, block=True)
        with pytest.raises(StorageError, match="the disk is gone"):
            record.settle()


def test_a_failed_write_to_ssd_reaches_the_compute_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with parts(tmp_path, EQUAL, staged_units=2) as part:
        monkeypatch.setattr(part.store.ssd, "store", refuse)
        raised: list[BaseException] = []

        def backward() -> None:
            try:
                for unit in part.units:
                    part.arrive(unit)
                for record in part.gradients.records():
                    record.settle()
            except StorageError as error:
                raised.append(error)

        thread = threading.Thread(target=backward, daemon=True)
        thread.start()
        thread.join(3)
        assert not thread.is_alive()
        assert "the disk is gone" in str(raised[0])


def failing(times: int, real: Callable[..., None]) -> Callable[..., None]:
    """`real`, but for the first calls, which fail."""
    left = iter(range(times))

    def transfer(*args: object) -> None:
        if next(left, None) is not None:
            raise StorageError("the disk is gone")
        real(*args)

    return transfer


def test_a_write_to_ssd_that_failed_once_is_done_again_when_the_frames_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with parts(tmp_path, EQUAL, staged_units=2) as part:
        assert part.store.ssd is not None
        monkeypatch.setattr(part.store.ssd, "store", failing(1, part.store.ssd.store))
        for unit in part.units:
            part.arrive(unit)
        for record in part.gradients.records():
            record.settle()
            grad = part.random_gradient(record.unit, 0, 0)
            assert torch.equal(bits(contents(part, record, 0)), bits(grad.reshape(-1)))
            part.gradients.release(record)
        assert part.staging.pool.in_use == 0


def test_after_a_failed_write_to_ssd_the_step_can_be_dropped_and_the_next_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with parts(tmp_path, EQUAL, staged_units=2) as part:
        with monkeypatch.context() as patch:
            patch.setattr(part.store.ssd, "store", refuse)
            with pytest.raises(StorageError, match="the disk is gone"):
                [part.arrive(unit) for unit in part.units]
        part.gradients.clear()
        assert part.staging.pool.in_use == 0
        for unit in part.units:
            part.arrive(unit, seed=1)
        for record in part.gradients.records():
            grad = part.random_gradient(record.unit, 0, 1)
            assert torch.equal(bits(contents(part, record, 0)), bits(grad.reshape(-1)))
            part.gradients.release(record)


def test_gradients_that_could_not_be_read_back_can_be_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with parts(tmp_path, EQUAL, staged_units=2) as part:
        for unit in part.units:
            part.arrive(unit)
        part.settle()
        monkeypatch.setattr(part.store.ssd, "load", refuse)
        part.gradients.load(part.gradients.records()[0], block=True)
        part.gradients.clear()
        assert part.staging.pool.in_use == 0


def test_a_write_to_ssd_that_ends_at_once_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drive may be done before anybody is told that there is something to wait for."""
    with parts(tmp_path, EQUAL, staged_units=2, write_behind=False) as part:
        lane = part.lanes["ssd_write"]
        submit = lane.submit

        def submit_and_end(*args: Any) -> Handle:
            handle = submit(*args)
            handle.wait()
            return handle

        monkeypatch.setattr(lane, "submit", submit_and_end)
        thread = threading.Thread(target=lambda: [part.arrive(unit) for unit in part.units], daemon=True)
        thread.start()
        thread.join(SOON_S)
        assert not thread.is_alive()
