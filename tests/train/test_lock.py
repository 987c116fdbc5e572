"""One run at a time in a run directory: who holds it, for how long, and what the lock leaves behind."""

from pathlib import Path

from forked import ended, fork

from pagoda.errors import ConfigError
from pagoda.train.run_dir import locked


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
        assert not is_free(tmp_path)
    holding.__exit__(None, None, None)
    assert is_free(tmp_path)
