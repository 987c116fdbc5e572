"""A run saves often enough, and goes on where a checkpoint cannot be written, because its state still exists."""

import errno
import io
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from files import fill_disk
from rich.console import Console

from pagoda.checkpoint import snapshot
from pagoda.config.memory import Memory
from pagoda.errors import ConfigError, StorageError
from pagoda.integrations import checkpoints as saving
from pagoda.memory.sizes import format_bytes
from pagoda.train import TrainConfig, run
from pagoda.train.metrics import read_metrics
from pagoda.train.run_dir import RunDir
from tests.tiny import before_step, tiny_run, trained


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    return tiny_run(tmp_path, save_steps=1, plan="usual")


def checkpoints(config: TrainConfig) -> list[int]:
    return [checkpoint.step for checkpoint in RunDir(config.output_dir).all_checkpoints()]


def test_by_default_a_checkpoint_is_saved_after_half_an_hour_of_training(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert TrainConfig(model="gpt2").saves_by_time
    now = [0.0]
    monkeypatch.setattr("pagoda.integrations.checkpoints.time", SimpleNamespace(monotonic=lambda: now[0]))
    for number in range(1, 6):
        before_step(number, lambda: now.append(now.pop() + 901.0), monkeypatch)
    config = replace(config, save_steps=0, save_at_end=False, max_steps=5)
    result, _ = trained(config)
    assert checkpoints(config) == [2, 4]
    assert result is not None
    assert result.checkpoint == RunDir(config.output_dir).checkpoint(4)
    other = replace(config, save_minutes=0.0, output_dir=config.output_dir.with_name("other"))
    trained(other)
    assert checkpoints(other) == []


def test_a_checkpoint_with_a_file_of_the_user_is_kept(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    notes = RunDir(config.output_dir).checkpoint(1) / "notes.txt"
    before_step(3, lambda: notes.write_text("the one to keep"), monkeypatch)
    trained(config)
    assert checkpoints(config) == [1, 3, 4]
    assert notes.exists()
    assert "notes.txt in" in caplog.text


def test_room_for_a_checkpoint_by_time_is_in_the_plan_if_there_is_any(config: TrainConfig, tmp_path: Path) -> None:
    (tmp_path / "ssd").mkdir()
    memory = Memory(host="300KiB", ssd=str(tmp_path / "ssd"), unit_limit="16KiB", page_size="4KiB")
    config = replace(config, save_steps=0, memory=memory, max_steps=1, verbose=True)
    result, shown = trained(config)
    assert result is not None
    needed = sum(pages for line, pages in result.plan.bytes["ssd"].items() if line != "versions")
    assert result.plan.bytes["ssd"]["versions"] > 0
    assert "for the pages of 1 checkpoint" in shown
    tight = replace(memory, ssd=f"{tmp_path / 'ssd'}:{needed + (64 << 10)}")
    result, shown = trained(replace(config, memory=tight, output_dir=config.output_dir.with_name("tight")))
    assert result is not None
    assert result.plan.placement.spare_on_ssd == 0
    assert f"The {format_bytes(needed + (64 << 10))} of SSD that the run may use have no room" in shown
    with pytest.raises(ConfigError, match="save_minutes is -1"):
        replace(config, save_minutes=-1.0)


def test_a_run_goes_on_from_a_checkpoint_that_was_not_saved_to_the_same_bits(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = replace(config, output_dir=config.output_dir.with_name("whole"))
    trained(whole)
    before_step(2, lambda: fill_disk(1, monkeypatch), monkeypatch)
    result, shown = trained(config)
    assert result is not None
    assert "The checkpoint after step 2 was not saved" in shown
    assert ".." not in shown
    assert "No space left on device" in shown
    assert checkpoints(config) == [3, 4]
    for file in ("weight", "exp_avg"):
        first, second = (
            RunDir(each.output_dir).checkpoint(4) / "pagoda" / f"{file}.safetensors" for each in (config, whole)
        )
        assert first.read_bytes() == second.read_bytes()


def test_a_signal_ends_the_tries_which_are_said_each_minute(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(saving, "RETRY_S", 0.01)
    monkeypatch.setattr(saving, "_SAY_S", 0.0)
    config, tries = replace(config, save_steps=0, max_steps=2), [0]

    def full(*_: Any) -> None:
        tries[0] += 1
        if tries[0] == 3:
            monkeypatch.setattr(saving, "RETRY_S", 1e6)
            os.kill(os.getpid(), signal.SIGTERM)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(snapshot, "write_manifest", full)
    shown = io.StringIO()
    with pytest.raises(StorageError, match=r"checkpoint-2/pagoda could not be written: .*No space left"):
        run(config, Console(file=shown, width=500))
    assert shown.getvalue().count("The state is still in memory") >= 2
    assert [line["step"] for line in read_metrics(RunDir(config.output_dir).metrics)] == [1, 2]
    assert "SIGTERM: stops without" in capfd.readouterr().err


def test_a_disk_without_room_is_named_before_the_first_step(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [100 << 10]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free[0]))
    with pytest.raises(StorageError, match=r"has 100.00 KiB free, and a checkpoint takes .* KiB: free space"):
        trained(config)
    assert not config.output_dir.exists()
    free[0] = 600 << 10
    _, shown = trained(config)
    assert "The run may add 3 checkpoints of up to" in shown


@pytest.mark.parametrize("what", ["checkpoint", pytest.param("run", marks=pytest.mark.slow)])
def test_what_is_moved_while_the_run_goes_on_is_kept_and_the_run_goes_on(
    what: str, config: TrainConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = RunDir(config.output_dir)
    moved = {"checkpoint": run_dir.checkpoint(2), "run": run_dir.path}[what]
    before_step(3, lambda: moved.rename(config.output_dir.with_name("kept")), monkeypatch)
    retire = snapshot.Removable.retire

    def moved_first(old: snapshot.Removable) -> None:
        if old.directory == run_dir.checkpoint(3) / "pagoda":  # after it was looked at
            old.directory.parent.rename(config.output_dir.with_name("late"))
        retire(old)

    monkeypatch.setattr(snapshot.Removable, "retire", moved_first)
    config = replace(config, max_steps=6)
    result, _ = trained(config)
    assert result is not None
    assert checkpoints(config) == [5, 6]
    kept = config.output_dir.with_name("kept")
    assert len([*kept.rglob("manifest.json")]) == (1 if what == "checkpoint" else 2)
    assert (config.output_dir.with_name("late") / "pagoda" / "manifest.json").exists()
    assert "checkpoint-3/pagoda was not deleted" in caplog.text
    again, _ = trained(replace(config, resume_from_checkpoint="last", max_steps=7))
    assert again is not None
    assert again.first_step == 7
