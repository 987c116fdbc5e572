"""One run at a time in a run directory: who holds it, for how long, and what the lock leaves behind."""

import os
import signal
from pathlib import Path

import pytest
from forked import ended, fork

from pagoda.errors import ConfigError
from pagoda.train.lock import LOCK, locked


def is_free(directory: Path) -> bool:
    try:
        with locked(directory):
            return True
    except ConfigError:
        return False


def test_the_directory_and_its_parents_are_there_while_it_is_held_and_gone_if_nothing_came_of_it(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "a" / "b"
    with locked(directory):
        assert directory.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_what_a_run_wrote_stays_and_the_lock_leaves_no_file(tmp_path: Path) -> None:
    with locked(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b" / "config.json").touch()
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["config.json"]


def test_the_end_of_a_forked_child_leaves_the_lock_to_its_parent(tmp_path: Path) -> None:
    def unwind(holding: object) -> None:
        holding.__exit__(None, None, None)  # type: ignore[attr-defined]

    holding = locked(tmp_path)
    holding.__enter__()
    for work in (lambda: None, lambda: unwind(holding)):
        ended(fork(work))
        assert (tmp_path / LOCK).exists()
        assert not is_free(tmp_path)
    holding.__exit__(None, None, None)
    assert is_free(tmp_path)


def test_a_lock_ends_with_the_process_that_took_it_also_where_its_children_live_on(tmp_path: Path) -> None:
    ready, say_ready = os.pipe()
    stay, let_go = os.pipe()

    def hold() -> None:
        with locked(tmp_path):
            fork(lambda: (os.close(let_go), os.write(say_ready, b"."), os.read(stay, 1)))
            signal.pause()

    holder = fork(hold)
    assert os.read(ready, 1) == b"."
    assert not is_free(tmp_path)
    os.kill(holder, signal.SIGKILL)
    assert ended(holder) == -signal.SIGKILL
    assert (tmp_path / LOCK).exists()
    assert is_free(tmp_path)
    os.close(let_go)  # which ends the child's child
    for descriptor in (ready, say_ready, stay):
        os.close(descriptor)


@pytest.mark.parametrize("kind", ["symlink", "FIFO", "directory"])
def test_what_is_no_lock_of_a_run_is_refused_and_left_alone(kind: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("someone's")
    directory = tmp_path / "run"
    directory.mkdir()
    path = directory / LOCK
    if kind == "symlink":
        path.symlink_to(other)
    elif kind == "FIFO":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(ConfigError, match=f"--out {directory} cannot be"), locked(directory):
        pass
    assert other.read_text() == "someone's"
    assert path.lstat()
