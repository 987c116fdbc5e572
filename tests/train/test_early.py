"""What settings, files and packages show by themselves is refused before data are read."""

import sys
from contextlib import closing
from pathlib import Path

import pytest

from pagoda.errors import ConfigError
from pagoda.memory.lock import Lock
from pagoda.train import assembly
from pagoda.train.run_dir import RunDir, locked
from tests.tiny import command, tiny_run, trained, write_model, write_text

REFUSED = {
    "--memory.ssd none": "SSD directory none cannot be used",
    "--memory.ssd used": "SSD directory used is in use by",
    "--output-dir used": "--output-dir used is in use by another run",
    "--output-dir old": "--output-dir old already holds a run (run.yaml",
    "--output-dir text": "--output-dir text: text is a file",
    "--tokenizer none": "--tokenizer none is not a directory",
    "--eval-data none": "'none' does not exist",
    "--report-to wandb": "--report-to wandb needs wandb: pip install wandb",
    "--plan search": "--plan search needs a machine that was measured",
}
"""Flags -> what is said of them."""


@pytest.mark.parametrize("flags", REFUSED)
def test_places_that_cannot_be_used_are_refused_before_data_are_read(
    flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path / "model")
    write_text(tmp_path / "text")
    for name in ("used", "old"):
        (tmp_path / name).mkdir()
    RunDir(tmp_path / "old").create(tiny_run(tmp_path, output_dir=tmp_path / "old"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pagoda.train.tokens.documents", lambda *_: pytest.fail("nothing is read"))
    with closing(Lock(Path("used"))), locked(Path("used")):
        assert command(f"train --model model --data text {flags}") == 2
    assert REFUSED[flags] in capsys.readouterr().err


def test_without_accelerate_one_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    assert command("train --model llama-15m") == 2
    assert capsys.readouterr().err == "pagoda: pagoda train needs accelerate: pip install 'pagoda-train[train]'\n"


@pytest.mark.parametrize("setting", ["optim", "quantized", "built in"])
def test_what_needs_torch_is_refused_before_data_are_read(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An optimizer that does not fit the other settings, and a format for weights that the model lacks."""
    cases = {"optim": {"optim": "muon", "tile_limit": "64KiB"}, "quantized": {"load_in_4bit": True, "lora_r": 2}}
    cases["built in"] = {**cases["quantized"], "model": "llama-15m"}
    monkeypatch.setattr("pagoda.train.tokens.open_tokens", lambda *_: pytest.fail("nothing is read"))
    monkeypatch.setattr(assembly, "check_installed", lambda *_: None)
    with pytest.raises(ConfigError, match=r"does not work with|is for pretrained weights"):
        trained(tiny_run(tmp_path, max_steps=0, **cases[setting]))
