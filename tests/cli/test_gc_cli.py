"""`pagoda gc` lists what looks orphaned, deletes it only if the user agrees, and nothing else."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from pagoda.cli.main import main
from tests.cli.workspace import Saved
from tests.memory.ssd_parts import PAGE, Tier, make_checkpoint, make_directory, names


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    return Saved(tmp_path)


def answer(text: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the user says when asked; returns the questions."""
    questions: list[str] = []

    def says(question: str) -> str:
        questions.append(question)
        if not text:
            raise EOFError
        return text

    monkeypatch.setattr("builtins.input", says)
    return questions


def test_what_looks_orphaned_is_listed_with_the_reason_and_deleted_on_yes(
    saved: Saved, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(saved.run / "checkpoints" / "step-1")
    questions = answer("y", monkeypatch)
    assert main(["gc", str(saved.ssd)]) == 0
    shown = capsys.readouterr().out
    table = saved.ssd / f"pagoda-{saved.references[0]['store']}" / "commits" / saved.references[0]["commit"]
    assert f"pages {table}, 20" in shown
    assert "4.00 KiB\n" in shown, "the other pages are those of step 2, too"
    assert f"of checkpoint {saved.run}/checkpoints/step-1: it is not at that path: it was moved or deleted" in shown
    assert f"pagoda gc {saved.ssd} --keep PATH" in shown
    assert questions == ["Delete these 1, 4.00 KiB in all, for good? [y/N] "]
    assert saved.there() == [False, True]


def test_the_pages_of_a_checkpoint_that_was_renamed_are_kept(saved: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    first = saved.run / "checkpoints" / "step-1"
    first.rename(first.with_name("step-1.later"))
    assert main(["gc", str(saved.ssd), "--yes"]) == 0
    assert "nothing looks orphaned" in capsys.readouterr().out
    assert saved.there() == [True, True]


def test_without_a_yes_or_an_orphan_nothing_is_deleted(
    saved: Saved, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["gc", str(saved.ssd), "--yes"]) == 0
    assert capsys.readouterr().out == f"nothing looks orphaned in {saved.ssd}\n"
    shutil.rmtree(saved.run)
    for says in ("", "n", "yess"):
        answer(says, monkeypatch)
        assert main(["gc", str(saved.ssd)]) == 1
        assert "nothing was deleted" in capsys.readouterr().out
        assert saved.there() == [True, True]


def test_a_moved_run_is_kept_where_it_is_said_to_be(
    saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = make_directory(tmp_path / "archive" / "runs") / "renamed"
    saved.run.rename(moved)
    assert main(["gc", str(saved.ssd), "--yes", "--keep", str(tmp_path / "renmaed")]) == 2
    assert "renmaed: there is no checkpoint at this path" in capsys.readouterr().err
    links = make_directory(tmp_path / "links")
    (links / "runs").symlink_to(moved.parent)
    (links / "circle").symlink_to(links)
    for kept in (moved, tmp_path / "archive", links):
        assert main(["gc", str(saved.ssd), "--yes", "--keep", str(kept)]) == 0
        assert saved.there() == [True, True]
    assert main(["gc", str(saved.ssd), "--yes", "--keep", str(moved / "checkpoints" / "step-2")]) == 0
    assert saved.there() == [False, True]


def test_what_this_process_may_not_look_at_counts_as_there(
    saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    barred, before = str(saved.run / "checkpoints"), (os.lstat, os.scandir)

    def looks(at: int, path: Any, **how: Any) -> Any:
        if str(path).startswith(barred):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return before[at](path, **how)

    elsewhere = saved.run.rename(tmp_path / "elsewhere")
    monkeypatch.setattr(os, "lstat", lambda path, **how: looks(0, path, **how))
    assert main(["gc", str(saved.ssd), "--yes"]) == 0
    assert "nothing looks orphaned" in capsys.readouterr().out
    elsewhere.rename(saved.run)
    monkeypatch.setattr(os, "scandir", lambda path: looks(1, path))
    assert main(["gc", str(saved.ssd), "--yes", "--keep", str(saved.run)]) == 2
    assert "checkpoints cannot be read: Permission denied; nothing was deleted" in capsys.readouterr().err
    assert saved.there() == [True, True]


def test_another_checkpoint_at_the_path_does_not_stand_in(saved: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(saved.run / "checkpoints" / "step-1")
    assert main(["gc", str(saved.ssd), "--yes"]) == 0
    assert "another checkpoint is at that path: this one was moved or deleted" in capsys.readouterr().out
    assert saved.there() == [False, True]


def test_a_directory_in_use_a_missing_one_and_none_are_refused(
    saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(saved.run)
    with Tier({saved.ssd: None}, 4, PAGE, 8):
        assert main(["gc", str(saved.ssd), "--yes"]) == 2
    assert "is in use by" in capsys.readouterr().err
    assert saved.there() == [True, True]
    assert main(["gc", str(tmp_path / "none"), "--yes"]) == main(["gc", "--yes"]) == 2
    assert capsys.readouterr().err.count("pagoda: ") == 2


def test_a_striped_store_goes_only_where_all_its_directories_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = Saved(tmp_path, "a", "b")
    shutil.rmtree(saved.run)
    before = names(saved.drives[1])
    assert main(["gc", str(saved.drives[1]), "--yes"]) == 0
    assert main(["gc", str(saved.drives[0]), "--yes"]) == 0
    assert "name all of its directories" in capsys.readouterr().out
    assert names(saved.drives[1]) == before
    assert main(["gc", *map(str, saved.drives), "--yes"]) == 0
    assert names(saved.drives[0]) == names(saved.drives[1]) == []


def test_a_copy_of_one_drive_does_not_take_the_other_drive_along(tmp_path: Path) -> None:
    saved = Saved(tmp_path, "a", "b")
    shutil.copytree(saved.drives[0], tmp_path / "copy")
    saved.run.rename(tmp_path / "moved")
    assert main(["gc", str(tmp_path / "copy"), str(saved.drives[1]), "--yes"]) == 0
    assert saved.there() == [True, True]


def test_directories_of_ranks_are_included_but_not_links_to_others(tmp_path: Path) -> None:
    saved = Saved(tmp_path, "ssd/rank-0")
    other = Saved(tmp_path / "other")
    shutil.rmtree(saved.run)
    shutil.rmtree(other.run)
    (tmp_path / "ssd" / "rank-1").symlink_to(other.ssd)
    assert main(["gc", str(tmp_path / "ssd"), "--yes"]) == 0
    assert saved.there() == [False, False]
    assert other.there() == [True, True]
