"""The directory of a run: where one may begin, its configuration, and which checkpoint is the last."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
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


def test_the_configuration_and_the_names_on_its_way_survive_a_power_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each name is synced after it was made or replaced, in the directory that has it; content before its name."""
    done: list[tuple[str, str]] = []
    real = {"fsync": os.fsync, "replace": os.replace, "mkdir": os.mkdir}

    def fsync(descriptor: int) -> None:
        done.append(("fsync", os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path)))
        real["fsync"](descriptor)

    def replaced(source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        directory = os.path.relpath(os.readlink(f"/proc/self/fd/{dst_dir_fd}"), tmp_path)
        done.append(("replace", os.path.join(directory, target)))
        real["replace"](source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    def made(path: Path, mode: int = 0o777) -> None:
        real["mkdir"](path, mode)
        done.append(("mkdir", os.path.relpath(path, tmp_path)))

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replaced)
    monkeypatch.setattr(os, "mkdir", made)
    names = ("a/b/config.json", "a/b/run.yaml")
    rewritten = [step for name in names for step in (("fsync", f"{name}.tmp"), ("replace", name), ("fsync", "a/b"))]
    run_dir = RunDir(tmp_path / "a" / "b")
    run_dir.create(CONFIG)
    assert run_dir.started_config() == CONFIG
    assert done == [("mkdir", "a"), ("fsync", "."), ("mkdir", "a/b"), ("fsync", "a"), *rewritten]
    done.clear()
    run_dir.create(replace(CONFIG, max_steps=40))
    assert run_dir.started_config().max_steps == 40
    assert done == rewritten


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
    with pytest.raises(ConfigError, match=r"config\.json"):
        run_dir.started_config()


def test_a_setting_of_another_type_is_refused_by_name(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for name, value in (
        ("max_steps", True),
        ("max_steps", 10**30),
        ("model", 5),
        ("model", "\0"),
        ("output_dir", ["run"]),
        ("precision", "fp8"),
        ("max_grad_norm", "1"),
        ("batch_tiles", "all"),
        ("optim", [1]),
        ("betas", [0.9]),
        ("lora_target_modules", [1]),
        ("resume_from_checkpoint", 1),
        ("accumulation_steps", 2),
        ("lora", {"rank": 2}),
    ):
        run_dir.config.write_text(json.dumps({**CONFIG.settings(), name: value}))
        with pytest.raises(ConfigError, match=rf"config\.json is damaged, .*{name}"):
            run_dir.started_config()
