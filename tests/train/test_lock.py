"""One run at a time in a run directory: who holds it, for how long, and what the lock leaves behind."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from forked import ended, fork

from pagoda.errors import ConfigError
from pagoda.train.run_dir import LOCK, locked


def is_free(directory: Path) -> bool:
    try:
        with locked(directory):
            return True
    except ConfigError:
        return False


def test_a_directory_stays_if_a_run_wrote_to_it_and_the_lock_leaves_nothing_behind(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "b"
    with locked(directory):
        assert directory.is_dir()
    assert list(tmp_path.iterdir()) == []
    with locked(directory):
        (directory / "run.yaml").touch()
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["run.yaml"]


def test_the_end_of_a_forked_child_leaves_the_lock_to_its_parent(tmp_path: Path) -> None:
    holding = locked(tmp_path)
    holding.__enter__()
    for work in (lambda: None, lambda: holding.__exit__(None, None, None)):
        assert ended(fork(work)) == 0
        assert (tmp_path / LOCK).exists()
        assert not is_free(tmp_path)
    holding.__exit__(None, None, None)
    assert is_free(tmp_path)


@pytest.mark.parametrize(
    "make",
    [lambda path: path.symlink_to(path.parent / "other"), os.mkfifo, os.mkdir],
    ids=["symlink", "FIFO", "folder"],
)
def test_what_is_no_lock_of_a_run_is_refused_and_left_alone(make: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "other").write_text("someone's")
    make(tmp_path / LOCK)
    with pytest.raises(ConfigError, match=f"--output-dir {tmp_path} cannot be"), locked(tmp_path):
        pass
    assert (tmp_path / "other").read_text() == "someone's"
    assert (tmp_path / LOCK).lstat()
