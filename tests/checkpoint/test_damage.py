"""A disk that fails: an error that says what, a state that can do no harm, and a checkpoint to go on from."""

import copy
import errno
import itertools
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from files import flip
from torch import nn
from zoo import ALL_ON_SSD, PAGE, RESIDENT, squeeze

import pagoda
from pagoda.errors import StorageError
from pagoda.memory import page

from .test_resume import HALF, LLAMA, Run, data, on_ssd, uninterrupted

Transfer = Callable[[int, Sequence[memoryview], int], int]


def fails(_real: Transfer, *_: object) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def takes_no_more(_real: Transfer, *_: object) -> int:
    return 0


def flips_a_bit(real: Transfer, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
    moved = real(descriptor, buffers, offset)
    buffers[0].cast("B")[100] ^= 4
    return moved


FAULTS = {
    "a flipped bit": ("preadv", flips_a_bit, "does not hold what was written there"),
    "a short write": ("pwritev", takes_no_more, "failed to write .*the disk took no more after 0 bytes"),
}


def break_moment(run: Run, verb: str, fault: Callable[..., int], patch: pytest.MonkeyPatch) -> None:
    """From now on, transfers of one unit's `exp_avg` meet a fault."""
    run.optimizer.synchronize()
    store = run.optimizer._engine.store
    broken, met = store.run_on_ssd(1, "exp_avg"), threading.local()
    move, real = ("load" if verb == "preadv" else "store"), getattr(os, verb)
    moved = getattr(store.ssd, move)

    def transfer(run: page.PageRun, *rest: object) -> None:
        met.fault = run == broken
        moved(run, *rest)
        met.fault = False

    patch.setattr(store.ssd, move, transfer)
    patch.setattr(os, verb, lambda *args: fault(real, *args) if getattr(met, "fault", False) else real(*args))


def assert_of_no_use(run: Run, directory: Path) -> None:
    with suppress(StorageError):
        run.optimizer.synchronize()  # raises what nobody has seen yet
    assert_refused(run, directory, r"The training state is damaged.*Load a checkpoint")


def assert_refused(run: Run, directory: Path, message: str) -> None:
    """Nothing can be computed from it, nor read, nor saved."""
    for use in (
        run.optimizer.synchronize,
        lambda: run.model(**data(LLAMA, 0)),
        run.optimizer.state_dict,
        lambda: run.optimizer.save_checkpoint(directory),
    ):
        with pytest.raises(StorageError, match=message):
            use()
    assert not directory.exists()


@pytest.mark.parametrize("loads", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_once_a_drive_works_again_training_goes_on_with_the_same_bits_or_from_a_checkpoint(
    fault: str, loads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verb, happens, message = FAULTS[fault]
    run = Run(LLAMA, on_ssd(LLAMA, tmp_path)).train(0, HALF)
    run.save(tmp_path / "good")
    with monkeypatch.context() as patch:
        break_moment(run, verb, happens, patch)
        run.train(HALF, HALF + 1)
        assert_refused(run, tmp_path / "bad", message)
    if loads:
        run.load(tmp_path / "good").goes_on()
    else:
        run.optimizer.zero_grad()
        run.train(HALF + 1, 2 * HALF).finish().assert_continues_as(uninterrupted(LLAMA))


def test_an_optimizer_closes_while_a_drive_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(LLAMA, on_ssd(LLAMA, tmp_path)).train(0, HALF)
    break_moment(run, "pwritev", fails, monkeypatch)
    run.train(HALF, HALF + 1)
    with pytest.raises(StorageError, match="failed to write"):
        run.optimizer.close()


def test_a_checkpoint_replaces_a_moment_of_which_no_page_can_be_read(tmp_path: Path) -> None:
    """Parameters share pages, and each is written by itself: what one has written, the next one must not lose."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(30, 50), nn.Linear(50, 30)) for _ in range(6)))
    settings = {"ssd": str(tmp_path), "unit_limit": "16KiB", "page_size": PAGE, "ssd_checkpoints": 0}
    with pytest.raises(pagoda.BudgetError) as refused:
        pagoda.wrap(model, pagoda.AdamW(), memory=pagoda.Memory(host=PAGE, **settings), precision="fp32")
    memory = pagoda.Memory(host=refused.value.needed_bytes, **settings)
    model, optimizer = pagoda.wrap(model, pagoda.AdamW(), memory=memory, precision="fp32")
    model(torch.ones(2, 30)).square().mean().backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.save_checkpoint(tmp_path / "good")
    store = optimizer._engine.store
    for unit in range(len(store.plan.units)):
        moment = store.run_on_ssd(unit, "exp_avg")
        assert moment.count > 2
        store.ssd._table._live.part(moment).hashes[:] ^= 1
    optimizer.load_checkpoint(tmp_path / "good")
    assert all(
        torch.equal(each["exp_avg"], before[at]["exp_avg"]) for at, each in optimizer.state_dict()["state"].items()
    )
    optimizer.close()


def test_a_load_fails_if_it_cannot_read_what_it_has_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page has the end of one parameter and the beginning of the next."""
    (tmp_path / "ssd").mkdir()
    model: Any = nn.Sequential(*(nn.Linear(40, 40) for _ in range(20)))
    memory = squeeze(model, ALL_ON_SSD, tmp_path / "ssd", precision="fp32", clipping=False, unit_limit="8KiB")
    memory = replace(memory, ssd_checkpoints=0)
    model, optimizer = pagoda.wrap(model, pagoda.AdamW(lr=0.1), memory=memory, precision="fp32")
    model(torch.ones(1, 40)).sum().backward()
    optimizer.step()
    optimizer.save_checkpoint(tmp_path / "saved")
    store, wanted = optimizer._engine.store, model.state_dict()
    with monkeypatch.context() as patch:
        patch.setattr(store, "load", lambda *_: fail())
        with pytest.raises(StorageError):
            optimizer.load_checkpoint(tmp_path / "saved")
    optimizer.load_checkpoint(tmp_path / "saved")
    assert all(torch.equal(model.state_dict()[name], value) for name, value in wanted.items())
    optimizer.close()


def fail() -> None:
    raise StorageError("the drive has failed")


def test_an_update_that_fails_ends_a_checkpoint_that_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saving = threading.Event()

    def fails_while_saving(real: Transfer, *_: object) -> int:
        assert saving.wait(60)
        return fails(real)

    run = Run(LLAMA, on_ssd(LLAMA, tmp_path)).train(0, HALF)
    run.save(tmp_path / "good")
    with monkeypatch.context() as patch:
        break_moment(run, "pwritev", fails_while_saving, patch)
        run.train(HALF, HALF + 1).optimizer.save_checkpoint(tmp_path / "bad", wait=False)
        saving.set()
        with pytest.raises(StorageError, match="failed to write"):
            run.optimizer.wait_for_checkpoint()
        assert not (tmp_path / "bad").exists()
    run.optimizer.zero_grad()
    run.train(HALF + 1, 2 * HALF).finish().assert_continues_as(uninterrupted(LLAMA))


def test_a_checkpoint_loads_after_a_drive_has_failed_an_asynchronous_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = pagoda.Memory(host="1MiB", ssd=str(tmp_path), unit_limit="16KiB", page_size=PAGE)
    run = Run(LLAMA, memory, options={"update": "async"})
    run.train(0, HALF).save(tmp_path / "good")
    expected = run.model.state_dict()
    with monkeypatch.context() as patch:
        break_moment(run, "pwritev", fails, patch)
        with pytest.raises(StorageError, match="failed to write"):
            run.train(HALF, HALF + 4).optimizer.synchronize()
    run.load(tmp_path / "good")
    assert all(torch.equal(value, expected[name]) for name, value in run.model.state_dict().items())
    run.train(HALF, 2 * HALF).optimizer.synchronize()
    run.optimizer.close()


def test_damage_found_in_the_middle_of_a_load_leaves_a_state_of_no_use(tmp_path: Path) -> None:
    run = Run(LLAMA, RESIDENT).train(0, HALF)
    run.save(tmp_path / "good")
    shutil.copytree(tmp_path / "good", tmp_path / "damaged")
    flip(tmp_path / "damaged" / "exp_avg_sq.safetensors", -1000)
    run.train(HALF, HALF + 1)
    with pytest.raises(pagoda.CheckpointError, match=r"exp_avg_sq.*damaged"):
        run.load(tmp_path / "damaged")
    assert_of_no_use(run, tmp_path / "bad")
    run.load(tmp_path / "good").goes_on()


def test_a_state_dict_that_is_cut_short_leaves_a_state_of_no_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(LLAMA, RESIDENT).train(0, HALF)
    run.save(tmp_path / "good")
    with monkeypatch.context() as patch:
        written, write = itertools.count(), run.optimizer._engine.store.write

        def interrupted(*args: Any) -> None:
            if next(written) == 3:
                raise KeyboardInterrupt
            write(*args)

        states = run.optimizer.state_dict()
        patch.setattr(run.optimizer._engine.store, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.optimizer.load_state_dict(states)
    assert_of_no_use(run, tmp_path / "bad")
    run.load(tmp_path / "good").goes_on()


def test_a_state_dict_of_other_shapes_is_refused_and_changes_nothing() -> None:
    run = Run(LLAMA, RESIDENT).train(0, HALF)
    states = copy.deepcopy(run.optimizer.state_dict())
    for state in states["state"].values():
        state["exp_avg"] += 1
    states["param_groups"][0]["lr"] = 7.0
    states["state"][2]["exp_avg"] = torch.zeros(3)
    with pytest.raises(pagoda.CheckpointError, match=r"'exp_avg' of .* has shape \(3,\)"):
        run.optimizer.load_state_dict(states)
    run.goes_on()
