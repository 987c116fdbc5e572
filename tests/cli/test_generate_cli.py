"""`pagoda generate` and what `pagoda export` writes beside weights, of a run with a tokenizer."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from pagoda.checkpoint.pretrained import INDEX
from pagoda.cli.main import main
from tests.text_files import MARKED, chats, write_lines, write_pretrained


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints and evaluations."""
    folder = tmp_path_factory.mktemp("generate")
    write_pretrained(folder / "model")
    write_lines(folder / "chats.jsonl", [{"messages": chat} for chat in chats()])
    flags = {
        "model": folder / "model", "data": folder / "chats.jsonl", "batch-size": 2, "seq-len": 128, "precision": "fp32",
        "memory.host": "1GiB", "out": folder / "run", "eval-share": 0.2, "steps": 4, "eval-every": 2, "optim.lr": 1e-2,
        "checkpoint-every": 2,
    }  # fmt: skip
    assert main(["train", *(part for name, value in flags.items() for part in (f"--{name}", str(value)))]) == 0
    return folder


def test_an_export_has_what_converters_read(folder: Path, tmp_path: Path) -> None:
    """vLLM and llama.cpp's convert_hf_to_gguf.py: an architecture by name, tensors by the index, special tokens."""
    out = tmp_path / "exported"
    assert main(["export", str(folder / "run"), str(out), "--dtype", "bf16", "--max-shard-size", "32KiB"]) == 0
    config, index, tokens, writes = (
        json.loads((out / name).read_text())
        for name in ("config.json", INDEX, "tokenizer_config.json", "generation_config.json")
    )
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["model_type"], config["dtype"]) == ("llama", "bfloat16")
    assert AutoConfig.from_pretrained(out).dtype is torch.bfloat16
    mine, own = AutoTokenizer.from_pretrained(out), AutoTokenizer.from_pretrained(folder / "model")
    assert mine.chat_template == own.chat_template
    assert mine("What is 1 plus 2?")["input_ids"] == own("What is 1 plus 2?")["input_ids"]
    files = {path.name: safetensors.torch.load_file(path) for path in out.glob("model*.safetensors")}
    assert index["weight_map"] == {name: file for file, tensors in files.items() for name in tensors}
    assert len(files) > 1
    names = {name for tensors in files.values() for name in tensors}
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert names == model.state_dict().keys(), "as the model that was trained calls them"
    assert {one.dtype for tensors in files.values() for one in tensors.values()} == {torch.bfloat16}
    vocabulary = json.loads((out / "tokenizer.json").read_text())
    added = {token["content"]: token["id"] for token in vocabulary["added_tokens"]}
    assert vocabulary["model"]["type"] == "BPE"
    assert vocabulary["model"]["merges"]
    assert tokens["eos_token"] in added
    assert (out / "chat_template.jinja").read_text() == MARKED
    assert writes["eos_token_id"] == model.generation_config.eos_token_id


def generated(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    capsys.readouterr()
    assert main(["generate", *args, "--memory.host", "1GiB", "--tokens", "12"]) == 0
    return capsys.readouterr().out.strip()


def test_a_run_writes_what_transformers_would(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(folder / "run"), str(folder / "again"), "--checkpoint", "step-000002"]) == 0
    model = AutoModelForCausalLM.from_pretrained(folder / "again")
    tokenizer = AutoTokenizer.from_pretrained(folder / "again")
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 5?"}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    torch.manual_seed(0)
    expected = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=[0, 2], pad_token_id=0)
    said = tokenizer.decode(expected[0, ids.shape[1] :], skip_special_tokens=True).strip()
    args = (str(folder / "run"), "--prompt", "What is 5?", "--checkpoint", "step-000002")
    before = (folder / "run").stat().st_mtime_ns
    assert generated(capsys, *args) == said
    assert (folder / "run").stat().st_mtime_ns == before, "weights go from the checkpoint to pages, by no other file"
    assert generated(capsys, str(folder / "again"), *args[1:3]) == said
    assert generated(capsys, *args, "--draw") == generated(capsys, *args, "--draw") != said


def test_a_run_with_adapters_writes_too_and_its_adapter_has_the_tokenizer(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {
        "model": folder / "model", "data": folder / "chats.jsonl", "batch-size": 2, "seq-len": 128, "precision": "fp32",
        "memory.host": "1GiB", "out": tmp_path / "run", "steps": 1, "lora.rank": 2, "eval-share": 0.0,
    }  # fmt: skip
    assert main(["train", *(part for name, value in flags.items() for part in (f"--{name}", str(value)))]) == 0
    assert "--optim.lr 0.0002: usual for adapters" in capsys.readouterr().out
    generated(capsys, str(tmp_path / "run"), "--prompt", "What is 5?")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "adapter")]) == 0
    names = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert names >= {"adapter_model.safetensors", "tokenizer.json", "chat_template.jinja"}


def test_a_checkpoint_that_is_not_there_is_named_with_those_that_are(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(folder / "run"), "--prompt", "a", "--checkpoint", "step-000003"]) == 2
    assert "it has step-000002, step-000004" in capsys.readouterr().err
    assert main(["generate", str(folder / "model" / "none"), "--prompt", "a"]) == 2
    assert "neither a run nor a Hugging Face directory" in capsys.readouterr().err
