"""`pagoda train` on a directory with weights and a tokenizer: texts and conversations, as transformers trains them."""

import io
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from pagoda.cli.main import main
from pagoda.config.memory import Memory
from pagoda.train import OptimConfig, TrainConfig, run
from pagoda.train.data import Batches, Rows
from pagoda.train.metrics import read_metrics
from pagoda.train.tokenizer import open_tokenizer
from pagoda.train.tokens import open_tokens
from tests.text_files import TEXT, chats, write_lines, write_pretrained
from tests.tiny import write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with weights and a tokenizer, texts, and conversations."""
    folder = tmp_path_factory.mktemp("fine-tuning")
    write_pretrained(folder / "model")
    lengths = (700, 150, 1400, 30, 2500, 400)
    write_lines(folder / "texts.jsonl", [{"text": TEXT[at * 3000 : at * 3000 + n]} for at, n in enumerate(lengths * 3)])
    write_lines(folder / "chats.jsonl", [{"messages": chat} for chat in chats()])
    return folder


def config_of(folder: Path, data: str, out: Path, **changes: Any) -> TrainConfig:
    settings = {
        "steps": 6, "batch_size": 2, "seq_len": 128, "precision": "fp32", "accumulation_steps": 2,
        "optim": OptimConfig(lr=3e-3, schedule="constant"), "memory": Memory(host="1GiB"), "plan": "usual",
    }  # fmt: skip
    return TrainConfig(model=str(folder / "model"), data=str(folder / data), out=out, **{**settings, **changes})


def trained(config: TrainConfig) -> tuple[list[float], str]:
    """The loss of every step, and what was said."""
    shown = io.StringIO()
    run(config, Console(file=shown, width=200))
    return [line["loss"] for line in read_metrics(config.out / "metrics.jsonl")], shown.getvalue()


def batches_of(config: TrainConfig) -> Batches:
    tokens = open_tokens(config.data, open_tokenizer(Path(config.model), None))
    return Batches(
        rows=Rows.of(tokens, config.seq_len), batch_size=config.batch_size,
        accumulation_steps=config.accumulation_steps, positions=True,
    )  # fmt: skip


DATA = pytest.mark.parametrize("data", ["texts.jsonl", "chats.jsonl"])


@DATA
def test_the_first_loss_is_that_of_transformers_on_the_same_documents(data: str, folder: Path, tmp_path: Path) -> None:
    """Of every document by itself: packing changes nothing but the speed."""
    config = config_of(folder, data, tmp_path / "run", steps=1)
    (loss,), _ = trained(config)
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    batches = batches_of(config)
    total = counted = 0.0
    for index in range(2):
        batch = batches.batch(0, index)
        for ids, labels, positions in zip(*batch.values(), strict=True):
            beginnings = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
            for start, stop in pairwise(beginnings):
                kept = labels[start:stop][None].clone()
                if (kept[:, 1:] != -100).any():
                    count = int((kept[:, 1:] != -100).sum())
                    with torch.no_grad():
                        total += model(input_ids=ids[start:stop][None], labels=kept).loss.item() * count
                    counted += count
    assert loss == pytest.approx(total / counted, rel=1e-5)


@DATA
def test_a_resumed_run_has_the_bits_of_one_that_went_on(data: str, folder: Path, tmp_path: Path) -> None:
    whole = config_of(folder, data, tmp_path / "whole")
    losses, shown = trained(whole)
    assert losses[-1] < losses[0] - 0.1
    assert "attention ends where a document does" in shown
    parts = replace(whole, out=tmp_path / "parts", steps=3)
    trained(parts)
    assert trained(replace(parts, steps=6, resume=True))[0] == losses
    cached = replace(parts, steps=7, resume=True, cache=tmp_path / "cache", data=str(tmp_path / data))
    (tmp_path / data).write_bytes((folder / data).read_bytes())
    trained(cached)


@DATA
def test_micro_batches_of_layers_know_where_documents_end(data: str, folder: Path, tmp_path: Path) -> None:
    plain = config_of(folder, data, tmp_path / "plain", steps=2, accumulation_steps=1, batch_size=4)
    tiled = replace(plain, out=tmp_path / "tiled", batch_tiles=2)
    assert trained(tiled)[0] == pytest.approx(trained(plain)[0], rel=1e-5)


def test_the_loss_counts_what_assistants_say(folder: Path, tmp_path: Path) -> None:
    config = config_of(folder, "chats.jsonl", tmp_path / "run")
    batch = batches_of(config).batch(0)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    said = tokenizer.decode(batch["labels"][batch["labels"] != -100])
    assert said.startswith("It is ")
    assert "What" not in said
    assert said.endswith("count.<|im_end|>\n")


WRONG = {
    "no chat template": (["--data", "{}/chats.jsonl", "--model", "{}/untold"], "put a chat_template.jinja beside"),
    "a vocabulary that does not match": (
        ["--tokenizer", "{}/untold", "--model", "{}/small", "--data", "{}/texts.jsonl"],
        "vocabulary of 64, and data '.*texts.jsonl' has tokens up to",
    ),
    "a vocabulary that does not match that of --eval-data": (
        ["--model", "{}/bytes", "--data", "{}/plain.txt", "--eval-data", "{}/accents.txt"],
        "vocabulary of 128, and data '.*accents.txt' has tokens up to 195",
    ),
    "sequences that are too long": (["--seq-len", "512"], "use --seq-len 256 or less"),
    "conversations that are too long": (["--seq-len", "8", "--data", "{}/chats.jsonl"], "use a larger --seq-len"),
    "an interrupted download": (["--model", "{}/part"], "lacks 1 of its 2 files of weights.*run hf download again"),
    "a gated model": (["--model", "{}/gated"], "downloaded without weights: run hf download again.*accept its terms"),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes_are_one_message_with_the_remedy(
    case: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_pretrained(tmp_path / "untold", chat_template=None)
    write_pretrained(tmp_path / "small", vocab_size=64)
    write_pretrained(tmp_path / "part")
    (tmp_path / "part" / "model.safetensors").rename(tmp_path / "part" / "model-00001-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "part" / "model.safetensors.index.json").write_text(str({"weight_map": names}).replace("'", '"'))
    (tmp_path / "gated" / ".cache" / "huggingface").mkdir(parents=True)
    (tmp_path / "gated" / "config.json").write_bytes((folder / "model" / "config.json").read_bytes())
    write_model(tmp_path / "bytes", vocab_size=128)
    (tmp_path / "plain.txt").write_text("plain text " * 90)
    (tmp_path / "accents.txt").write_text("caf\u00e9 " * 90)
    for name in ("texts.jsonl", "chats.jsonl"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    flags, message = WRONG[case]
    usual = ["--model", str(folder / "model"), "--data", "{}/texts.jsonl", "--seq-len", "64", "--batch-size", "1"]
    given = dict(zip([*usual[::2], *flags[::2]], [*usual[1::2], *flags[1::2]], strict=True))
    given |= {"--steps": "1", "--out": "{}/run", "--memory.host": "1GiB"}
    args = [part.replace("{}", str(tmp_path)) for pair in given.items() for part in pair]
    assert main(["train", *args]) == 2
    error = capsys.readouterr().err
    assert error.count("pagoda: ") == 1
    assert re.search(message, error)
    assert not (tmp_path / "run").exists()
