"""The `pagoda` command: flags become settings, mistakes become messages and exit codes."""

import errno
import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pagoda.__main__ import main as program
from pagoda.cli.main import main, parse
from pagoda.config.memory import Memory
from pagoda.errors import ConfigError
from pagoda.train import TrainConfig
from pagoda.train.run_dir import RunDir

REQUIRED = ("--model", "llama-15m", "--max-steps", "20", "--per-device-train-batch-size", "4", "--max-length", "128")


def parsed(*flags: str | Path) -> TrainConfig:
    config: TrainConfig = parse(["train", *map(str, flags)])[1]
    return config


def exit_code(*args: str) -> int:
    try:
        return main(args)
    except SystemExit as error:
        return int(error.code or 0)


def test_only_the_model_must_be_given_and_flags_reach_the_configuration() -> None:
    assert parsed("--model", "llama-15m") == TrainConfig(model="llama-15m")
    given = parsed(*REQUIRED, "--output-dir", "run")
    assert given == TrainConfig(
        model="llama-15m", max_steps=20, per_device_train_batch_size=4, max_length=128, output_dir=Path("run")
    )
    flags = "--memory.host 64MiB --memory.page-size 1MiB --betas 0.8 0.9 --lr-scheduler-type constant"
    flags += " --max-grad-norm 0 --activations keep --trace t.json"
    assert parsed("--model", "llama-15m", *flags.split()) == TrainConfig(
        model="llama-15m",
        memory=Memory(host="64MiB", page_size="1MiB"),
        betas=(0.8, 0.9),
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        activations="keep",
        trace=Path("t.json"),
    )


def test_resume_keeps_the_settings_of_the_run_for_flags_not_given(tmp_path: Path) -> None:
    shape = {"model": "gpt2", "max_steps": 20, "per_device_train_batch_size": 2, "max_length": 64}
    given = {"learning_rate": 1e-3, "memory": Memory(host="1GiB"), "output_dir": Path("where-it-was-started")}
    started = TrainConfig(**shape, **given)
    RunDir(tmp_path).create(started)
    for flags in (
        ("--output-dir", tmp_path, "--resume-from-checkpoint", "last"),
        (f"--output-dir={tmp_path}", "--resume-from-checkpoint=last"),
    ):
        assert parsed(*flags) == replace(started, output_dir=tmp_path, resume_from_checkpoint="last")
    changed = parsed(*flags, "--max-steps", "40", "--memory.host", "2GiB")
    assert (changed.max_steps, changed.memory.host, changed.learning_rate) == (40, "2GiB", 1e-3)
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        parsed("--model", "llama-15m", "--output-dir", "run\udcff")
    with pytest.raises(ConfigError, match="--config starts another run"):
        parsed(*flags, "--config", tmp_path / "run.yaml")


@pytest.mark.parametrize("whose", ["users", "library's"])
def test_only_errors_of_files_that_the_user_named_are_one_line(
    whose: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    path = str(tmp_path / ("run/inner" if whose == "users" else "cache of a library"))

    def failing(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr("pagoda.cli.inspect.run", failing)
    if whose == "users":
        assert main(["inspect", str(tmp_path / "run")]) == 2
        assert capsys.readouterr().err == f"pagoda: {path} cannot be used: Permission denied\n"
    else:
        with pytest.raises(PermissionError):
            main(["inspect", str(tmp_path / "run")])


def test_help_works_as_a_module_and_imports_neither_torch_nor_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import runpy, sys\n"
        "sys.argv[1:] = ['train', '--help']\n"
        "try: runpy.run_module('pagoda', run_name='__main__')\n"
        "finally: assert not {'torch', 'transformers'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--memory.ssd DIR[:SIZE]" in done.stdout
    assert exit_code("--help") == 0
    assert "train" in capsys.readouterr().out


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # the second one in the locale C
def test_what_the_terminal_cannot_show_is_escaped(errors: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "caf\u00e9"
    directory.mkdir()
    monkeypatch.setattr(sys, "argv", ["pagoda", "inspect", str(directory)])
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, "ascii", errors))
    assert program() == 0
    sys.stdout.flush()
    assert b"caf\\xe9" in shown.getvalue()


def test_who_does_not_read_help_to_its_end_sees_no_traceback() -> None:
    command = f"{sys.executable} -m pagoda train --help | true; exit ${{PIPESTATUS[0]}}"  # `true` ends long before
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("args", [("inspect", "."), ("plan", "--help"), ("gc", ".")])
def test_an_output_that_cannot_be_written_is_named(
    args: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with open("/dev/full", "w") as full, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", full)
        assert exit_code(*args) == 2
    assert capsys.readouterr().err == "pagoda: the output cannot be written: No space left on device\n"
