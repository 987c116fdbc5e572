"""What settings, files and packages show by themselves is refused before torch is imported."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pagoda.errors import ConfigError
from pagoda.train import early
from pagoda.train.run_dir import RunDir
from tests.tiny import tiny_run, trained, write_model, write_text

REFUSED = {
    "--model llama-9b": "Did you mean 'llama-8b'",
    "--model text": "neither a directory with a config.json nor a GGUF file",
    "--model org/none": "neither a directory nor in the Hugging Face cache",
    "--data none": "'none' does not exist",
    "--eval-data none": "'none' does not exist",
    "--tokenizer none": "--tokenizer none is not a directory",
    "--memory.ssd none": "SSD directory none cannot be used",
    "--memory.ssd used": "SSD directory used is in use by",
    "--memory.ssd free --output-dir used": "--output-dir used is in use by another run",
    "--output-dir old": "--output-dir old already holds a run (config.json, ",
    "--output-dir text": "--output-dir text: text is a file",
    "--resume-from-checkpoint checkpoint-9 --output-dir old": "old has no checkpoint 'checkpoint-9'",
    "--report-to wandb": "--report-to wandb needs wandb: pip install wandb",
    "--plan search": "--plan search needs a machine that was measured",
    "--trace none/file": "--trace none/file cannot be written",
    "--lora-r 8 --plan search": "leave it out with --lora-r",
    "--betas 2 3": "--betas is (2.0, 3.0); it must be in",
}
"""Flags, the later of which count -> what is said of them."""

RUN = """
import contextlib, io, json, sys
from contextlib import closing
from pathlib import Path
from pagoda.cli.main import main
from pagoda.memory.lock import Lock
from pagoda.train.run_dir import locked
class Absent:
    def find_spec(name, *_):
        if name in ("torch", "wandb"):
            raise ModuleNotFoundError(f"{name} is imported")
sys.meta_path.insert(0, Absent)
with closing(Lock(Path("used"))), locked(Path("used")):
    for flags in json.load(sys.stdin):
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            code = main(["train", "--model", "model", "--data", "text", *flags.split()])
        print(json.dumps([code, said.getvalue()]))
"""


def test_mistakes_that_need_no_torch_are_refused_before_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "model")
    write_text(tmp_path / "text")
    for name in ("used", "free", "old"):
        (tmp_path / name).mkdir()
    RunDir(tmp_path / "old").create(tiny_run(tmp_path, output_dir=tmp_path / "old"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    program = [sys.executable, "-c", RUN]
    done = subprocess.run(program, cwd=tmp_path, input=json.dumps([*REFUSED]), capture_output=True, text=True)
    assert not done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines()]
    wrong = [(flags, found) for (flags, why), found in zip(REFUSED.items(), said, strict=True) if why not in found[1]]
    assert not wrong
    assert {code for code, _ in said} == {2}
    assert sorted(path.name for path in (tmp_path / "used").iterdir()) == []


@pytest.mark.parametrize("setting", ["optim", "quantized", "built in"])
def test_what_needs_torch_is_refused_before_data_are_read(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An optimizer that does not fit the other settings, and a format for weights that the model lacks."""
    cases = {"optim": {"optim": "muon", "tile_limit": "64KiB"}, "quantized": {"load_in_4bit": True, "lora_r": 2}}
    cases["built in"] = {**cases["quantized"], "model": "llama-15m"}
    monkeypatch.setattr("pagoda.train.tokens.open_tokens", lambda *_: pytest.fail("nothing is read"))
    monkeypatch.setattr(early, "check_installed", lambda *_: None)
    with pytest.raises(ConfigError, match=r"does not work with|is for pretrained weights"):
        trained(tiny_run(tmp_path, max_steps=0, **cases[setting]))
