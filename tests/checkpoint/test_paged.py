"""A checkpoint of state on SSD keeps pages where they are: nothing is copied, nothing that is kept is overwritten."""

import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from files import flip
from torch import nn
from zoo import RESIDENT

import pagoda
from pagoda.checkpoint.directory import MANIFEST, read_manifest
from pagoda.checkpoint.paged import PAGED
from pagoda.checkpoint.reader import SavedCheckpoint
from pagoda.checkpoint.state import ParameterState
from pagoda.cli.main import main
from pagoda.errors import StorageError
from pagoda.memory.ssd.tier import PageSnapshot, SSDTier
from pagoda.runtime.capture import Capture
from pagoda.runtime.lanes import Handle

from .test_resume import HALF, LLAMA, Run, assert_resumes, on_ssd, other_pages, uninterrupted


@pytest.fixture
def ssd(tmp_path: Path) -> Path:
    (tmp_path / "ssd").mkdir()
    return tmp_path / "ssd"


def saved(directory: Path, ssd: Path) -> pagoda.Memory:
    """A checkpoint of a run with everything on SSD, which has ended; returns its memory."""
    memory = on_ssd(LLAMA, ssd)
    run = Run(LLAMA, memory).train(0, HALF)
    run.save(directory)
    run.train(HALF, HALF + 1)
    run.optimizer.close()
    return memory


def test_pages_are_not_copied_and_are_loaded_into_another_geometry_or_adopted_without_being_read(
    ssd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = saved(tmp_path / "step", ssd)
    assert PAGED in read_manifest(tmp_path / "step")
    for file in (tmp_path / "step").glob("*.safetensors"):
        assert file.stat().st_size <= 4096, "headers only"
    (tmp_path / "other").mkdir()
    assert_resumes(tmp_path / "step", other_pages(LLAMA, tmp_path / "other"))

    def never(*_: object) -> None:
        pytest.fail("a state was copied")

    monkeypatch.setattr(ParameterState, "copy_in", never)
    assert_resumes(tmp_path / "step", memory)


def test_a_name_that_the_file_system_refuses_is_an_error_that_names_it(ssd: Path, tmp_path: Path) -> None:
    run = Run(LLAMA, on_ssd(LLAMA, ssd)).train(0, HALF)
    with pytest.raises(pagoda.StorageError, match=r"aaa could not be written: .*File name too long"):
        run.save(tmp_path / ("a" * 300))
    run.goes_on()


@pytest.mark.parametrize("asked_for", [1, None])
def test_checkpoints_beyond_those_that_have_room_are_copied_and_that_is_a_warning_if_room_was_asked_for(
    asked_for: int | None, ssd: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(LLAMA, replace(on_ssd(LLAMA, ssd), ssd_checkpoints=asked_for))
    for step in range(2 * HALF):
        run.train(step, step + 1)
        run.save(tmp_path / f"step-{step}")
    run.finish().assert_continues_as(uninterrupted(LLAMA))
    assert [PAGED in read_manifest(tmp_path / f"step-{step}") for step in range(3)] == [True, False, False]
    said = [record.message for record in caplog.records if "this checkpoint copies" in record.message]
    assert len(said) == (0 if asked_for is None else 2 * HALF - 1)
    assert all("--save-total-limit" in warning for warning in said)


def test_training_goes_on_after_a_checkpoint_failed_while_the_one_before_kept_all_other_pages(
    ssd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update that is under way then has only the pages of the version before it."""
    run = Run(LLAMA, replace(on_ssd(LLAMA, ssd), ssd_checkpoints=1)).train(0, 1)
    run.save(tmp_path / "kept")
    run.train(1, HALF)
    run.optimizer.synchronize()
    assert run.optimizer._engine.store.ssd.free_slots == 0
    errors: list[Exception] = []
    read = Capture.read

    def read_slowly(capture: Capture, unit: int, runs: Any) -> Handle:
        read(capture, unit, runs)
        handle = Handle()
        threading.Timer(0.3, handle.finish).start()  # updates have begun
        return handle

    def fail(*_: object) -> None:
        time.sleep(1)
        raise StorageError("the disk failed")

    monkeypatch.setattr(Capture, "read", read_slowly)
    monkeypatch.setattr(PageSnapshot, "commit", fail)
    run.save(tmp_path / "fails", wait=False, replaces=[tmp_path / "kept"], on_error=errors.append)
    run.goes_on()
    assert [str(error) for error in errors] == ["the disk failed"]


def test_checkpoints_of_another_run_in_the_directory_make_none_of_this_one_a_copy(ssd: Path, tmp_path: Path) -> None:
    memory = saved(tmp_path / "first" / "step", ssd)
    for place, seed in ((tmp_path / "second", 1), (tmp_path / "third", 2)):
        run = Run(LLAMA, memory, seed=seed).train(0, HALF)
        for step in range(2):
            run.save(place / f"step-{step}", replaces=[place / f"step-{step - 1}"] if step else [])
            assert PAGED in read_manifest(place / f"step-{step}")
            run.train(HALF + step, HALF + step + 1)
        run.optimizer.close()
    assert_resumes(tmp_path / "first" / "step", memory)


def test_a_frozen_base_on_ssd_is_kept_by_every_checkpoint_without_spare_pages(ssd: Path, tmp_path: Path) -> None:
    """Also when a checkpoint without pages is loaded meanwhile."""

    def wrapped(**memory: Any) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(9)), nn.Linear(64, 8))
        model[:9].requires_grad_(False)
        memory = {"unit_limit": "16KiB", "page_size": 4096, **memory}
        return pagoda.wrap(model, pagoda.AdamW(lr=1e-2), memory=pagoda.Memory(**memory), precision="fp32")

    def train(model: Any, optimizer: Any) -> None:
        model(torch.ones(2, 64)).square().sum().backward()
        optimizer.step()

    model, optimizer = wrapped(host="8MiB")
    optimizer.save_checkpoint(tmp_path / "in-ram")
    optimizer.close()
    with pytest.raises(pagoda.BudgetError) as refused:
        wrapped(host=4096, ssd=str(ssd))
    frozen = sum(param.nbytes for param in model.parameters() if not param.requires_grad)
    room = int(1.2 * frozen) + (64 << 10)
    model, optimizer = wrapped(host=refused.value.needed_bytes, ssd=f"{ssd}:{room}", ssd_checkpoints=2)
    assert pagoda.plan_of(model).bytes["ssd"]["weight"] >= frozen * 0.8
    for step in range(4):
        train(model, optimizer)
        old = [tmp_path / f"step-{step - 2}"] if step > 1 else []
        optimizer.save_checkpoint(tmp_path / f"step-{step}", replaces=old)
        assert PAGED in read_manifest(tmp_path / f"step-{step}")
    expected = model.state_dict()
    train(model, optimizer)
    optimizer.load_checkpoint(tmp_path / "in-ram")
    train(model, optimizer)
    optimizer.load_checkpoint(tmp_path / "step-3")
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    optimizer.close()


def test_a_failed_checkpoint_keeps_no_pages(ssd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(LLAMA, on_ssd(LLAMA, ssd)).train(0, 1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("pagoda.checkpoint.snapshot.write_manifest", full)
        with pytest.raises(pagoda.StorageError, match="No space left"):
            run.save(tmp_path / "step")
    ssd = run.optimizer._engine.store.ssd
    assert isinstance(ssd, SSDTier)
    assert not ssd.commits
    run.train(1, HALF)
    run.save(tmp_path / "step")
    assert PAGED in read_manifest(tmp_path / "step")
    run.goes_on()


# --- damage: a clear error, and the checkpoint before is whole ------------------------------------------------


def two_checkpoints(ssd: Path, tmp_path: Path) -> tuple[Path, Path]:
    """One with all state in RAM, and a later one whose state is on SSD."""
    run = Run(LLAMA, RESIDENT).train(0, HALF)
    run.save(tmp_path / "first")
    run.optimizer.close()
    saved(tmp_path / "second", ssd)
    return tmp_path / "first", tmp_path / "second"


def place_of_page(checkpoint: Path, state: str, ssd: Path) -> tuple[Path, int]:
    """The file of pages, and where in it the first one of a state is."""
    (pages,) = ssd.glob("pagoda-*/pages")
    with SavedCheckpoint(checkpoint) as opened:
        (rank,) = opened.pages.ranks
        slot = int(rank.committed._table.slots[next(iter(rank.units.values())).extents[state][0]])
        return pages, slot * rank.committed.page_bytes


def test_damage_of_a_page_or_the_manifest_is_found_and_a_missing_directory_is_named(ssd: Path, tmp_path: Path) -> None:
    first, second = two_checkpoints(ssd, tmp_path)
    run = Run(LLAMA, RESIDENT, seed=1)

    def refused(message: str) -> None:
        with pytest.raises(pagoda.CheckpointError, match=message):
            run.load(second)

    pages, at = place_of_page(second, "weight", ssd)
    flip(pages, at + 100)
    refused("second is damaged: .* cannot be read")
    flip(pages, at + 100)
    manifest = second / MANIFEST
    whole = manifest.read_bytes()
    flip(manifest, whole.index(b'"steps"') + 60)
    refused(r"manifest\.json is damaged")
    manifest.write_bytes(whole[:-10])
    refused(r"manifest\.json is damaged")
    manifest.write_bytes(whole)
    shutil.rmtree(ssd)
    refused("second cannot be read: .*ssd")
    run.load(first).goes_on()


def test_inspect_verifies_files_and_pages_and_those_that_are_adopted_are_checked_when_they_are_first_read(
    ssd: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = two_checkpoints(ssd, tmp_path)
    for whole, pages in ((first, "0 are pages"), (second, "29 are pages")):
        assert main(["inspect", str(whole), "--verify"]) == 0
        shown = capsys.readouterr().out
        assert pages in shown
        assert "every tensor is as it was written" in shown
    flip(first / "exp_avg.safetensors", -1000)
    assert main(["inspect", str(first)]) == 0
    assert main(["inspect", str(first), "--verify"]) == 1
    assert "exp_avg.safetensors is damaged" in capsys.readouterr().out
    flip(first / "exp_avg.safetensors", -1000)
    file, at = place_of_page(second, "exp_avg", ssd)
    flip(file, at + 100)
    assert main(["inspect", str(second), "--verify"]) == 1
    assert f"{file} at offset {at} does not hold what was written there" in capsys.readouterr().out
    run = Run(LLAMA, on_ssd(LLAMA, ssd), seed=1).load(second)
    with pytest.raises(pagoda.StorageError, match="does not hold what was written there"):
        run.train(HALF, HALF + 1).optimizer.synchronize()
    run.load(first).goes_on()
