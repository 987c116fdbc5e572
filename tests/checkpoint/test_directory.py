"""A checkpoint directory appears complete or not at all, and is never overwritten."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pagoda.checkpoint import directory as module
from pagoda.checkpoint.directory import MANIFEST, committed, read_manifest, write_manifest
from pagoda.errors import CheckpointError, StorageError
from pagoda.memory.files import TEMPORARY
from pagoda.memory.identity import PARTIAL_MARK


def fill(folder: Path) -> None:
    (folder / "data").write_text("all of it")
    write_manifest(folder, {"states": ["weight"]})


def commit(target: Path, action: Callable[[Path], None] = fill) -> None:
    with committed(target) as folder:
        action(folder)


def assert_complete(directory: Path) -> None:
    assert sorted(path.name for path in directory.iterdir()) == ["data", MANIFEST]
    assert (directory / "data").read_text() == "all of it"
    assert read_manifest(directory)["states"] == ["weight"]


@pytest.mark.parametrize("error", [RuntimeError("in the middle"), KeyboardInterrupt()])
def test_an_exception_inside_leaves_nothing_and_is_not_hidden(tmp_path: Path, error: BaseException) -> None:
    def fail(folder: Path) -> None:
        fill(folder)
        raise error

    with pytest.raises(type(error)):
        commit(tmp_path / "step-1", fail)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_exists_is_never_overwritten(tmp_path: Path) -> None:
    target = tmp_path / "step-1"
    commit(target)
    with pytest.raises(CheckpointError, match=r"step-1 exists already.*Name another"), committed(target) as folder:
        (folder / "data").write_text("other")
    assert_complete(target)
    assert list(tmp_path.iterdir()) == [target]


def test_while_somebody_writes_a_directory_nobody_else_may(tmp_path: Path) -> None:
    """Else two exports to one place could become one directory with files of both."""
    with committed(tmp_path / "one") as folder:
        (folder / "mine").touch()
        with pytest.raises(CheckpointError, match="being written by another process"), committed(tmp_path / "one"):
            pass
        (folder / "mine too").touch()
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["mine", "mine too"]
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_a_directory_that_another_process_filled_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    target = tmp_path / "step-1"

    def overtaken(folder: Path) -> None:
        (folder / "data").write_text("other")
        target.mkdir()
        fill(target)

    with pytest.raises(StorageError):
        commit(target, overtaken)
    assert_complete(target)
    assert list(tmp_path.iterdir()) == [target]


def test_everything_is_synced_before_it_gets_its_name_and_nothing_else_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tmp_path / "runs"
    target = runs / "first" / "step-1"
    synced: list[tuple[str, bool]] = []
    fsync = os.fsync

    def seen(descriptor: int) -> None:
        synced.append((os.readlink(f"/proc/self/fd/{descriptor}"), target.exists()))
        fsync(descriptor)

    monkeypatch.setattr(module.os, "fsync", seen)
    with committed(target) as folder:
        assert folder.parent == target.parent, "a rename is atomic only within a file system"
        fill(folder)
    assert_complete(target)
    assert list(target.parent.iterdir()) == [target]
    mark = folder / (PARTIAL_MARK + TEMPORARY)
    manifest = [folder / (MANIFEST + TEMPORARY), folder]
    before = [tmp_path, runs, mark, folder, runs / "first", *manifest, folder]
    in_parents = [tmp_path, runs]  # the first is new, and so is `runs`
    assert synced == [*((str(path), False) for path in (*in_parents, *before[1:])), (str(runs / "first"), True)]


def test_a_disk_that_fails_is_an_error_that_names_the_checkpoint_unless_it_is_another_disk(tmp_path: Path) -> None:
    """Reading the states to save may fail, too."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for error, message in (
        (full, r"step-1 could not be written.*No space left.*Free space"),
        (StorageError("Reading /ssd/pages failed."), r"^Reading /ssd/pages failed\.$"),
    ):
        with pytest.raises(StorageError, match=message), committed(tmp_path / "step-1"):
            raise error
        assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"step-1 could not be written"), committed(tmp_path / "file" / "step-1"):
        pytest.fail("there is nothing to fill")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"is not a checkpoint: manifest\.json cannot be read \(No such file"),
        ("", "is damaged"),
        ("\udcff\udcfe", "is damaged"),
        ('{"format": "pagoda-checkpoint", "vers', "is damaged"),
        ("[]", "is not a Pagoda manifest"),
        ('{"format": "other", "version": 1}', "is not a Pagoda manifest"),
        (json.dumps({"format": module.FORMAT}), "has version None"),
        (json.dumps({"format": module.FORMAT, "version": module.VERSION + 1}), f"reads version {module.VERSION}"),
    ],
)
def test_a_directory_without_a_manifest_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / MANIFEST).write_text(text, errors="surrogateescape")
    with pytest.raises(CheckpointError, match=message):
        read_manifest(tmp_path)
