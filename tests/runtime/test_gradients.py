"""Gradients come to their updates as autograd would have accumulated them, wherever they have been meanwhile."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import pagoda
from pagoda.config.memory import Memory
from pagoda.errors import BudgetError, StorageError
from pagoda.runtime import gradients

from .parts import LARGE, SHARED, Parts, parts

EQUAL = [[2048]] * 4


def assert_sees(part: Parts, seed: int) -> None:
    """A step's updates see the whole gradients of all units, as they arrived, and give their buffers back."""
    seen = part.see_all()
    wanted = {(unit.index, slot): (unit, slot) for unit in part.units for slot in range(unit.trainable)}
    assert seen.keys() == wanted.keys()
    for key, (unit, slot) in wanted.items():
        assert torch.equal(seen[key], part.random_gradient(unit, slot, seed))
    assert part.scheduler.gradients.pages.in_use == 0


def test_without_ssd_the_units_that_hold_the_buffers_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where gradients come to buffers one by one, as large ones do: not once all of a unit have been made."""
    monkeypatch.setattr(gradients, "_WORTH_BYTES", 1)
    with parts(tmp_path, [[1500, 548]] * 3, placement=SHARED, staged_units=2) as part:
        for unit in part.units[:2]:
            part.arrive(unit, slots=[0])
        part.settle()
        with pytest.raises(BudgetError) as refused:
            part.arrive(part.units[2], slots=[0])
        for text in ("'layers.0'", "'layers.1'", "unit 'layers.2'", "memory.ssd", "accumulation_steps"):
            assert text in str(refused.value)


def test_gradients_of_another_dtype_or_layout_are_taken_as_the_extent_keeps_them(tmp_path: Path) -> None:
    with parts(tmp_path, [[6]]) as part:
        grad = torch.arange(12, dtype=torch.float32)[::2] / 3
        part.deliver(part.units[0], 0, grad)
        assert torch.equal(part.see_all()[0, 0], grad.bfloat16())


# --- a disk that fails -------------------------------------------------------------------------------------


def failing(times: int, real: Callable[..., None]) -> Callable[..., None]:
    """`real`, but for the first calls, which fail."""
    left = iter(range(times))

    def transfer(*args: object) -> None:
        if next(left, None) is not None:
            raise StorageError("the disk is gone")
        real(*args)

    return transfer


def test_a_gradient_that_cannot_be_read_back_reaches_whoever_waits_until_all_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with parts(tmp_path, EQUAL, staged_units=2) as part:
        for unit in part.units:
            part.arrive(unit)
        part.settle()
        seen = part.only_look()
        with monkeypatch.context() as patch:
            patch.setattr(part.store.ssd, "load", failing(LARGE, part.store.ssd.load))
            part.step()
            with pytest.raises(StorageError, match="the disk is gone"):
                part.engine.drain()
        assert len(seen) <= 2, "no update sees a gradient that was not read back"
        with part.engine.replacing():
            pass
        assert part.scheduler.gradients.pages.in_use == 0
        for unit in part.units:
            part.arrive(unit, seed=1)
        assert_sees(part, seed=1)


def test_after_a_failed_write_to_ssd_the_step_can_be_dropped_and_the_next_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with parts(tmp_path, EQUAL, staged_units=2) as part:
        with monkeypatch.context() as patch:
            patch.setattr(part.store.ssd, "store", failing(LARGE, part.store.ssd.store))
            with pytest.raises(StorageError, match="the disk is gone"):
                [part.arrive(unit) for unit in part.units]
        part.zero_grad()
        assert part.scheduler.gradients.pages.in_use == 0
        for unit in part.units:
            part.arrive(unit, seed=1)
        assert_sees(part, seed=1)


def test_a_write_to_ssd_that_failed_once_is_done_again_when_the_buffer_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with parts(tmp_path, EQUAL, staged_units=2) as part:
        monkeypatch.setattr(part.store.ssd, "store", failing(1, part.store.ssd.store))
        for unit in part.units:
            part.arrive(unit)
        assert_sees(part, seed=0)


def test_a_sparse_gradient_trains_as_the_same_gradient_made_dense(tmp_path: Path) -> None:
    """With repeated tokens, two micro-batches a step, and a norm that clips."""

    def losses(sparse: bool, memory: Memory) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(64, 128, sparse=sparse), nn.Linear(128, 64))
        model, optimizer = pagoda.wrap(model, pagoda.AdamW(lr=0.1), memory=memory, clip_grad_norm=0.1)
        found = []
        for tokens in torch.randint(0, 64, (6, 4, 8), generator=torch.Generator().manual_seed(1)):
            loss = nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
            loss.backward()
            found.append(loss.item())
            if len(found) % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
        optimizer.close()
        return found

    in_ram = Memory(host="64MiB")
    assert losses(True, in_ram) == losses(False, in_ram) == losses(True, Memory(host="1MiB", ssd=tmp_path))
