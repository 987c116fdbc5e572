"""The directory of a run: where one may begin, its configuration, and which checkpoint is the last."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pagoda.errors import CheckpointError, ConfigError
from pagoda.train import TrainConfig
from pagoda.train.run_dir import RunDir

CONFIG = TrainConfig(
    model="llama-15m", max_steps=20, per_device_train_batch_size=4, max_length=128, output_dir=Path("run")
)


def test_a_run_starts_in_a_missing_an_empty_or_an_unrelated_directory(tmp_path: Path) -> None:
    RunDir(tmp_path / "a" / "b").check_free()
    RunDir(tmp_path).check_free()
    (tmp_path / "ssd").mkdir()
    RunDir(tmp_path).check_free()
    assert [entry.name for entry in tmp_path.iterdir()] == ["ssd"]
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="is a file"):
            RunDir(out).check_free()
    (tmp_path / "plan.json").touch()
    with pytest.raises(ConfigError, match=r"files that a run would replace .plan\.json.: give another directory$"):
        RunDir(tmp_path).check_free()
    (tmp_path / "plan.json").unlink()
    RunDir(tmp_path).create(CONFIG)
    with pytest.raises(ConfigError, match=r"already holds a run .*--resume-from-checkpoint last"):
        RunDir(tmp_path).check_free()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="not writable"):
        RunDir(tmp_path / "run").check_free()


def test_the_latest_checkpoint_is_the_complete_one_with_the_most_steps(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        run_dir.latest()
    for name in ("checkpoint-10", "checkpoint-2", "checkpoint-20.tmp", ".checkpoint-30", "checkpoint-1000000"):
        (run_dir.path / name).mkdir()
    (run_dir.path / "checkpoint-2000000").touch()
    assert run_dir.latest().step == 1_000_000
    assert run_dir.latest().path == run_dir.checkpoint(1_000_000)


HOSTILE: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.touch(),
    "not UTF-8": lambda path: path.write_bytes(b"\xff\xfe{}"),
    "nested deeply": lambda path: path.write_bytes(b'{"a":' * 100_000),
    "a list": lambda path: path.write_text("[]"),
    "a huge number": lambda path: path.write_text('{"max_steps": ' + "9" * 5000 + "}"),
    "without a model": lambda path: path.write_text('{"max_steps": 4}'),
    "a directory": lambda path: path.mkdir(),
    "a FIFO": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_broken_configuration_is_refused(case: str, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    with pytest.raises(ConfigError, match="there is no run in"):
        run_dir.started_config()
    HOSTILE[case](run_dir.config)
    with pytest.raises(ConfigError, match=r"run\.yaml"):
        run_dir.started_config()
