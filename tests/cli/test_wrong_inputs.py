"""Wrong inputs of the command: each is one line, with the way out, before anything was written."""

import re
import sys
from pathlib import Path

import pytest

from pagoda.cli.main import main
from tests.text_files import chats, write_lines, write_pretrained

TRAIN, CHATS = "train --model model", "train --model model --data chats.jsonl"
WRONG = {
    # the command and its flags
    "": r"a command is missing\. Commands: train, dpo,",
    "trian": r"no command 'trian'\. Did you mean 'train'\?",
    f"{CHATS} --max-stepz 4": r"pagoda train has no flag or argument '--max-stepz'\. Did you mean '--max-steps'\?",
    f"{CHATS} --out run": r"Did you mean '--output-dir'\?",
    f"{CHATS} --batch-size 2": r"Did you mean '--per-device-train-batch-size'\?",
    f"{CHATS} --resume": r"Did you mean '--resume-from-checkpoint'\?",
    f"{CHATS} --learnin-rate=3": r"'--learnin-rate'\. Did you mean '--learning-rate'\?",
    "inspect model model": r"pagoda inspect has no flag or argument 'model'\. `pagoda inspect --help` lists all\.",
    f"{CHATS} --max-steps -2": "--max-steps is -2; it must be a whole number, at least 0",
    f"{CHATS} --lora-target-module q_proj": r"Did you mean '--lora-target-modules'\?",
    f"{CHATS} --learning-rate -1": r"--learning-rate is -1\.0; it must be above 0",
    f"{CHATS} --output-dir=": "--output-dir is empty: give a value",
    f"{CHATS} --output-dir {'x' * 256}": "x(.run.yaml)? cannot be used: File name too long",
    f"{CHATS} --load-in-4bit": r"--load-in-4bit is for .*: give --lora-r too",
    f"{CHATS} --report-to tensorbord": r"no tracker of transformers\. Did you mean 'tensorboard'\?",
    f"{CHATS} --lora-r 0": "--lora-r is 0; it must be at least",
    f"{CHATS} --lora-r 8 --load-in-4bit --load-in-8bit": "give --load-in-4bit or --load-in-8bit, not both",
    "train --config none.yaml": r"none\.yaml cannot be read: .*name a file of settings",
    "train --resume-from-checkpoint last": "continues a run: name its directory with --output-dir",
    "train --resume-from-checkpoint last --output-dir none": r"no run in none: .*Name the directory of a run",
    # models and data
    "train --model empty --data chats.jsonl": r"config\.json nor a GGUF file\. Name a directory",
    "train --model llama-9b --data chats.jsonl": r"Did you mean 'llama-8b'\? Name a directory .*ORG/NAME",
    "train --model org/none --data chats.jsonl": r"run `hf download org/none`, or .* with --download",
    TRAIN: "--data is missing: name a file or folder",
    f"{TRAIN} --data none.jsonl": "'none.jsonl' does not exist: give a file",
    f"{TRAIN} --data broken.jsonl": r"line 1: not JSON: .*--skip-bad",
    f"{TRAIN} --data empty.jsonl": "holds no text: give a file or folder",
    f"{TRAIN} --data other.jsonl": r"none of its columns \(foo\) .* Name the column with --dataset-text-field",
    f"{TRAIN} --data table.csv": r"table\.csv, row 1: none of its columns \(a, b\)",
    f"{TRAIN} --data binary.jsonl": r"line 1: not UTF-8 text: .*--skip-bad",
    f"{TRAIN} --data chats.jsonl none.jsonl": "'none.jsonl' does not exist: give a file",
    "data none.jsonl --model model": "does not exist: give a file",
    "data --data chats.jsonl --model model": "DATA is missing: name a file or folder, without a flag",
    "train --model t5-moe-15m --data chats.jsonl": r"has an encoder and a decoder, .* train it with .*Seq2SeqTrainer",
    "data chats.jsonl --model t5-moe-15m": r"has an encoder and a decoder, .* train it with .*Seq2SeqTrainer",
    # memory, optimizers and adapters; what needs no data is refused before they are read
    f"{CHATS} --memory.host lots": "--memory.host: 'lots' is not a size",
    f"{CHATS} --memory.host 10KiB": r"does not fit: .* short\. Raise --memory\.host, or add --memory\.ssd DIR",
    f"{TRAIN} --data none.jsonl --memory.ssd none/x": r"none/x cannot be used: .*create it .* in --memory\.ssd",
    f"{CHATS} --optim adamx": "--optim adamx is unknown: use one of adamw",
    f"{TRAIN} --data none.jsonl --lora-r 8": r"adapters need peft: pip install",
    # other commands
    "generate none --prompt hi": "none is neither a run nor a Hugging Face directory: name the --output-dir",
    "export none out": r"none is not a checkpoint: .*Name a directory",
    "report none": "no run in none: .*Name the directory of a run",
    "inspect none": "none is not a directory: name the one of a run",
    "plan --model llama-8b --hardware rtx9090": r"Did you mean 'rtx\d090'\? Named machines",
    "plan --model gpt2 --hardware h100 --tile-limit 1": "--tile-limit is '1'; it must be at least 4096 bytes",
    "plan --model llama-8b --memory.host -5GiB": "write for example '20GiB'",
}
BY_TYRO = {
    "train": "Missing from pagoda train: --model STR",
    "generate model": "Missing from pagoda generate: --prompt",
    f"{CHATS} --learning-rate abc": "Error parsing --learning-rate: no type matching",
    f"{CHATS} --max-steps 1.5": "Error parsing --max-steps: ",
    f"{CHATS} --output-dir": "Missing value for argument '--output-dir'",
    f"{CHATS} --precision fp8": "invalid choice 'fp8' for argument '--precision'",
}
"""What tyro cannot read -> what it says."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which commands run."""
    folder = tmp_path_factory.mktemp("wrong")
    write_pretrained(folder / "model")
    write_lines(folder / "chats.jsonl", [{"messages": chat} for chat in chats(4)])
    write_lines(folder / "other.jsonl", [{"foo": 1}])
    (folder / "broken.jsonl").write_text('{"messages": [}\n')
    (folder / "binary.jsonl").write_bytes(b"\xd3\x05 \xff" * 16)
    (folder / "table.csv").write_text("a,b\n1,2\n")
    (folder / "empty.jsonl").touch()
    (folder / "empty").mkdir()
    return folder


@pytest.mark.parametrize("args", WRONG)
def test_a_wrong_input_is_one_line_with_the_way_out(
    args: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setitem(sys.modules, "peft", None)
    before = sorted(path.name for path in folder.iterdir())
    assert main(args.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("pagoda: ")
    assert len(line) < 450
    assert "tyro" not in line
    assert re.search(WRONG[args], line)
    assert sorted(path.name for path in folder.iterdir()) == before


@pytest.mark.parametrize("args", BY_TYRO)
def test_what_tyro_cannot_read_is_named_with_the_flag(
    args: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as exited:
        main(args.split())
    assert exited.value.code == 2
    said = " ".join(re.sub("[|│]", " ", capsys.readouterr().err).split())
    assert BY_TYRO[args] in said
