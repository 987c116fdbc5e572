"""Checkpoints are deleted only when Pagoda made them; nothing else is, wherever names and manifests point."""

import os
import shutil
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from pagoda.checkpoint.directory import Removable, committed, remove, write_manifest
from pagoda.errors import CheckpointError, PagodaError
from pagoda.memory.identity import new_checkpoint_id, partial, removed
from pagoda.memory.ssd.committed import open_commit
from tests.memory.ssd_parts import PAGE, Tier, make_directory, names, pattern


@pytest.fixture
def ssd(tmp_path: Path) -> Path:
    return make_directory(tmp_path / "ssd")


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """Something of the user's."""
    (make_directory(tmp_path / "home") / "thesis.tex").write_text("years of work")
    return tmp_path / "home"


def save(checkpoint: Path, ssd: Path | None = None, **changes: object) -> dict[str, Any]:
    """A checkpoint with an empty file of weights, and pages on SSD; returns the reference to these."""
    checkpoint_id = new_checkpoint_id()
    content: dict[str, Any] = {"id": checkpoint_id, "hashes": {"weight": {}}}
    reference: dict[str, Any] = {}
    with committed(checkpoint, checkpoint_id) as folder:
        (folder / "weight.safetensors").touch()
        if ssd is not None:
            with Tier({ssd: None}, 4, PAGE, 4) as tier:
                tier.store(tier.alloc(4), 0, pattern(4, 1))
                with closing(tier.freeze_all()) as frozen:
                    reference = frozen.commit(checkpoint, checkpoint_id)
            content["paged"] = {"ranks": [{"reference": {**reference, **changes}}]}
        write_manifest(folder, content)
    return reference


def remove_from(checkpoint: Path, places: list[Path]) -> None:
    """Delete a checkpoint, and its pages in SSD directories, as a save does that replaces it."""
    removable = Removable.of(checkpoint)
    removable.retire()
    removable.forget(places)
    removable.delete()


def test_a_removed_checkpoint_goes_with_its_pages(tmp_path: Path, ssd: Path) -> None:
    save(tmp_path / "run" / "step-1", ssd)
    remove_from(tmp_path / "run" / "step-1", [ssd])
    assert names(tmp_path / "run") == names(ssd) == []


@pytest.mark.parametrize("way", ["absolute", "relative", "store"])
def test_a_manifest_that_names_other_files_deletes_none(way: str, tmp_path: Path, ssd: Path, precious: Path) -> None:
    victim = precious / "thesis.tex"
    forged = {
        "absolute": {"commit": str(victim)},
        "relative": {"commit": f"../../../{precious.name}/{victim.name}"},
        "store": {"store": f"x/../../{precious.name}"},
    }
    save(tmp_path / "run" / "step-1", ssd, **forged[way])
    with pytest.raises(CheckpointError, match="not a reference to committed pages"):
        remove_from(tmp_path / "run" / "step-1", [ssd])
    assert (tmp_path / "run" / "step-1").exists()
    assert victim.read_text() == "years of work"


def test_pages_in_a_directory_that_the_user_did_not_name_are_kept(tmp_path: Path, ssd: Path) -> None:
    reference = save(tmp_path / "run" / "step-1", ssd)
    remove_from(tmp_path / "run" / "step-1", [make_directory(tmp_path / "other")])
    open_commit(reference).close()


def test_a_symlinked_folder_of_page_tables_deletes_nothing_elsewhere(tmp_path: Path, ssd: Path, precious: Path) -> None:
    reference = save(tmp_path / "run" / "step-1", ssd)
    commits = ssd / f"pagoda-{reference['store']}" / "commits"
    commits.rename(precious / "commits")
    commits.symlink_to(precious / "commits")
    with pytest.raises(PagodaError):
        remove_from(tmp_path / "run" / "step-1", [ssd])
    Tier({ssd: None}, 4, PAGE, 4).close()
    assert names(precious) == ["commits", f"commits/{reference['commit']}", "thesis.tex"]


def test_a_damaged_page_table_is_kept_when_its_checkpoint_is_deleted(tmp_path: Path, ssd: Path) -> None:
    """Whose it is can no longer be told; the run that deletes the checkpoint goes on."""
    reference = save(tmp_path / "run" / "step-1", ssd)
    table = ssd / f"pagoda-{reference['store']}" / "commits" / reference["commit"]
    table.write_bytes(b"damaged")
    remove_from(tmp_path / "run" / "step-1", [ssd])
    assert names(tmp_path / "run") == []
    assert table.read_bytes() == b"damaged"


def test_a_checkpoint_that_holds_something_of_the_users_is_kept_with_its_pages(tmp_path: Path, ssd: Path) -> None:
    reference = save(tmp_path / "run" / "step-1", ssd)
    (tmp_path / "run" / "step-1" / "notes.txt").write_text("the best one")
    with pytest.raises(CheckpointError, match=r"step-1 is kept: notes\.txt in it is not part of the checkpoint"):
        remove_from(tmp_path / "run" / "step-1", [ssd])
    assert (tmp_path / "run" / "step-1" / "notes.txt").exists()
    open_commit(reference).close()


def test_a_symlinked_checkpoint_is_kept(tmp_path: Path, ssd: Path) -> None:
    reference = save(tmp_path / "archive" / "step-1", ssd)
    make_directory(tmp_path / "run")
    (tmp_path / "run" / "step-1").symlink_to(tmp_path / "archive" / "step-1")
    with pytest.raises(CheckpointError, match="symbolic link"):
        remove_from(tmp_path / "run" / "step-1", [ssd])
    assert (tmp_path / "run" / "step-1" / "manifest.json").exists()
    open_commit(reference).close()


def test_a_deleted_copy_leaves_the_pages_of_the_original(tmp_path: Path, ssd: Path) -> None:
    reference = save(tmp_path / "run" / "step-1", ssd)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    remove_from(tmp_path / "copy" / "step-1", [ssd])
    open_commit(reference).close()


@pytest.mark.parametrize("content", ["nothing", "a file", "a manifest"])
def test_only_what_pagoda_was_deleting_is_deleted_with_the_next_checkpoint(content: str, tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path / f"step-{step}")
    (tmp_path / "step-1").rename(removed(tmp_path / "step-1"))  # as a crash leaves it
    users = make_directory(tmp_path / ".mine.removed")
    if content != "nothing":
        (users / ("file" if content == "a file" else "manifest.json")).write_text("{}")
    remove(tmp_path / "step-2")
    assert [path.name for path in tmp_path.iterdir()] == [".mine.removed"]
    assert len(list(users.iterdir())) == (content != "nothing")


def test_what_lies_where_a_checkpoint_is_to_be_written_is_not_emptied(tmp_path: Path, precious: Path) -> None:
    target = tmp_path / "run" / "step-1"
    make_directory(target.parent)
    shutil.copytree(precious, partial(target))
    with pytest.raises(CheckpointError, match="Pagoda did not write"):
        save(target)
    shutil.rmtree(partial(target))
    partial(target).symlink_to(precious)
    with pytest.raises(PagodaError):
        save(target)
    assert names(precious) == ["thesis.tex"]


def test_a_partial_checkpoint_is_taken_over_without_following_links(tmp_path: Path, precious: Path) -> None:
    target = tmp_path / "run" / "step-1"
    with suppress(KeyboardInterrupt), committed(target) as folder:
        (folder / "elsewhere").symlink_to(precious)
        shutil.copytree(folder, tmp_path / "kept", symlinks=True)
        raise KeyboardInterrupt
    assert names(precious) == ["thesis.tex"]
    assert names(target.parent) == []
    (tmp_path / "kept").rename(partial(target))
    save(target)
    assert names(precious) == ["thesis.tex"]
    assert sorted(os.listdir(target)) == ["manifest.json", "weight.safetensors"]
