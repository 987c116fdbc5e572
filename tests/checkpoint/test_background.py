"""A checkpoint that is written while training goes on is the state at the call, and changes nothing of the run."""

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from zoo import RESIDENT, Recipe

import pagoda
from pagoda.checkpoint.rank_files import Files
from pagoda.checkpoint.tensors import TensorWriter
from pagoda.runtime import capture
from pagoda.runtime.updates import RunningUpdate, UpdateStream

from .test_resume import HALF, LLAMA, PLACES, Run, assert_resumes, assert_same, on_ssd

Patch = pytest.MonkeyPatch


@pytest.fixture
def slow_disk(monkeypatch: Patch) -> None:
    """Every piece takes so long to write that updates overtake the writer."""
    write = TensorWriter.write

    def slowly(self: TensorWriter, name: str, piece: int, data: memoryview) -> None:
        time.sleep(0.002)
        write(self, name, piece, data)

    monkeypatch.setattr(TensorWriter, "write", slowly)


def moves(monkeypatch: Patch) -> list[int]:
    """Grows by one entry at every update that leaves the old states where they are."""
    calls: list[int] = []
    submit = UpdateStream.submit

    def seen(self: UpdateStream, update: RunningUpdate) -> None:
        if update.extents.moved:
            calls.append(1)
        submit(self, update)

    monkeypatch.setattr(UpdateStream, "submit", seen)
    return calls


def hold_the_writer(monkeypatch: Patch, until: Callable[[], bool]) -> None:
    """No piece is written before `until()`, or for 20 seconds."""
    write, end = TensorWriter.write, time.monotonic() + 20

    def behind(self: TensorWriter, name: str, piece: int, data: memoryview) -> None:
        while not until() and time.monotonic() < end:
            time.sleep(0.002)
        write(self, name, piece, data)

    monkeypatch.setattr(TensorWriter, "write", behind)


@pytest.mark.usefixtures("slow_disk")
@pytest.mark.parametrize("place", ["resident", "on_ssd"])
def test_training_goes_on_while_a_checkpoint_is_written(place: str, tmp_path: Path, monkeypatch: Patch) -> None:
    kept, returned = moves(monkeypatch), threading.Event()
    hold_the_writer(monkeypatch, lambda: bool(kept) if place == "resident" else returned.is_set())
    run = Run(LLAMA, PLACES[place](LLAMA, tmp_path)).train(0, HALF)
    run.save(tmp_path / "step", wait=False)
    assert run.optimizer.checkpoint_pending
    assert not (tmp_path / "step").exists()
    returned.set()
    run.goes_on()
    if place == "resident":
        assert kept, "updates overtook the writer"
    assert_resumes(tmp_path / "step")


@pytest.mark.usefixtures("slow_disk")
def test_an_update_waits_for_the_writer_without_room_for_another_version(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr("pagoda.plan.place.MOVED_SHARE", 1 << 40)
    run = Run(LLAMA, pagoda.Memory(host="64MiB", unit_limit="16KiB", page_size=4096)).train(0, HALF)
    run.save(tmp_path / "step", wait=False)
    run.goes_on()
    assert_resumes(tmp_path / "step")


@pytest.mark.usefixtures("slow_disk")
@pytest.mark.parametrize("place", ["resident", "on_ssd"])
def test_updates_during_backward_are_held_off_what_is_not_written_yet(place: str, tmp_path: Path) -> None:
    on_ssd = pagoda.Memory(host="256KiB", ssd=str(tmp_path), unit_limit="16KiB", page_size=4096)
    memory = RESIDENT if place == "resident" else on_ssd
    recipe, options = replace(LLAMA, clip=None), {"gradient_accumulation_steps": 1}
    run = Run(recipe, memory, options=options).train(0, HALF)
    run.optimizer.synchronize()
    expected = run.model.state_dict(), run.optimizer.state_dict()
    run.save(tmp_path / "step", wait=False)
    run.train(HALF, 2 * HALF).optimizer.close()
    run = Run(recipe, RESIDENT, options=options).load(tmp_path / "step")
    assert_same((run.model.state_dict(), run.optimizer.state_dict()), expected)
    run.optimizer.close()


@pytest.mark.usefixtures("slow_disk")
def test_what_the_caller_changes_after_the_call_is_not_in_the_checkpoint(tmp_path: Path) -> None:
    recipe = Recipe("batch_norm", clip=None, precision="fp32")
    run = Run(recipe, RESIDENT).train(0, HALF)
    buffers = {name: buffer.clone() for name, buffer in run.model.named_buffers() if name != "scratch"}
    extra = {"seen": [1]}
    rng = torch.get_rng_state()
    run.optimizer.save_checkpoint(tmp_path / "step", extra, wait=False)
    extra["seen"].append(2)
    run.optimizer.param_groups[0]["lr"] = 5.0
    run.model.calls += 7
    torch.manual_seed(99)
    with pagoda.gathered(run.model, modify=True), torch.no_grad():
        run.model.head.weight.zero_()
    run.optimizer.wait_for_checkpoint()
    assert run.optimizer.load_checkpoint(tmp_path / "step") == {"seen": [1]}
    assert run.optimizer.param_groups[0]["lr"] != 5.0
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(buffer, buffers[n]) for n, buffer in run.model.named_buffers() if n != "scratch")
    assert run.model.state_dict()["head.weight"].any()
    assert safetensors.torch.load_file(tmp_path / "step" / "buffers.safetensors").keys() == buffers.keys()
    run.optimizer.close()


@pytest.mark.usefixtures("slow_disk")
def test_relative_paths_are_those_of_the_call(tmp_path: Path, monkeypatch: Patch) -> None:
    run = Run(LLAMA, RESIDENT)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    run.save(Path("old"))
    run.optimizer.save_checkpoint("new", wait=False, replaces=["old"])
    monkeypatch.chdir(tmp_path / "elsewhere")
    run.optimizer.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "new"]


def test_one_checkpoint_is_written_at_a_time_and_close_finishes_the_last(tmp_path: Path) -> None:
    run = Run(LLAMA, on_ssd(LLAMA, tmp_path)).train(0, 1)
    run.optimizer.save_checkpoint(tmp_path / "first", wait=False)
    run.train(1, HALF)
    run.save(tmp_path / "second", wait=False)
    assert (tmp_path / "first").exists()
    run.optimizer.close()
    assert_resumes(tmp_path / "second")


@pytest.mark.parametrize("place", ["resident", "on_ssd"])
def test_threads_may_save_at_once_while_another_trains(place: str, tmp_path: Path) -> None:
    run = Run(LLAMA, PLACES[place](LLAMA, tmp_path)).train(0, 1)

    def save(name: str) -> None:
        for number in range(2):
            run.save(tmp_path / f"{name}{number}", wait=number == 1)

    threads = [threading.Thread(target=save, args=(name,), daemon=True) for name in "ab"]
    for thread in threads:
        thread.start()
    steps, deadline = 1, time.monotonic() + 60
    while any(thread.is_alive() for thread in threads):
        assert time.monotonic() < deadline, "a save never returned"
        run.train(steps, steps := steps + 1)
    run.optimizer.close()
    again, states = Run(LLAMA, RESIDENT), {}
    for step in range(steps):
        again.train(step, step + 1)
        states[step + 1] = again.model.state_dict(), again.optimizer.state_dict()["state"]
    for saved in [tmp_path / f"{name}{number}" for name in "ab" for number in range(2)]:
        again.load(saved)
        state = again.optimizer.state_dict()["state"]
        assert_same((again.model.state_dict(), state), states[int(state[0]["step"])])
    again.optimizer.close()


@pytest.mark.usefixtures("slow_disk")
def test_a_checkpoint_that_is_being_written_can_be_loaded(tmp_path: Path) -> None:
    run = Run(LLAMA, RESIDENT).train(0, HALF)
    run.save(tmp_path / "step", wait=False)
    run.optimizer.load_checkpoint(tmp_path / "step")
    run.goes_on()
    run.optimizer.close()


def test_an_error_in_the_background_is_raised_once_by_the_next_call(tmp_path: Path, monkeypatch: Patch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TensorWriter, "write", full)
    run = Run(LLAMA, RESIDENT).train(0, 1)
    for asks in (
        run.optimizer.step,
        lambda: run.optimizer.save_checkpoint(tmp_path / "next"),
        run.optimizer.wait_for_checkpoint,
        run.optimizer.close,
    ):
        run.optimizer.save_checkpoint(tmp_path / "step", wait=False)
        deadline = time.monotonic() + 30
        while run.optimizer.checkpoint_pending and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(pagoda.StorageError, match=r"step could not be written.*No space left"):
            asks()
        assert list(tmp_path.iterdir()) == []
        run.optimizer.wait_for_checkpoint()
    run.optimizer.close()


def test_states_are_written_in_the_order_in_which_updates_will_change_them(tmp_path: Path, monkeypatch: Patch) -> None:
    """All states of a parameter before those of the next one, as its update goes, from forward's first on."""
    monkeypatch.setattr(capture, "SSD_THREADS", 1)
    written: list[str] = []
    write = Files.write

    def noted(self: Files, file: str, name: str, start: int, piece: memoryview) -> None:
        written.append(name)
        write(self, file, name, start, piece)

    monkeypatch.setattr(Files, "write", noted)
    run = Run(LLAMA, RESIDENT).train(0, 1)
    run.optimizer.synchronize()
    run.optimizer.save_checkpoint(tmp_path / "step")
    names = [name for name, _ in itertools.groupby(written)]
    assert len(written) == 4 * len(names)
    assert sorted(names) == sorted(name for name, _ in run.model.named_parameters())
    assert names[0].endswith("embed_tokens.weight")
    assert "norm" in names[-1] or "head" in names[-1]
    run.optimizer.close()
