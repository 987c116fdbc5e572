"""`pagoda train` on a directory with weights and a tokenizer: texts and conversations, as transformers trains them, and
evaluations, which change nothing of the training."""

import io
import json
import math
import re
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from pagoda.config.memory import Memory
from pagoda.train import TrainConfig, run
from pagoda.train.data import Batches, Rows
from pagoda.train.metrics import read_metrics
from pagoda.train.run_dir import RunDir
from pagoda.train.tokenizer import open_tokenizer
from pagoda.train.tokens import open_tokens
from tests.text_files import TEXT, chats, write_lines, write_pretrained
from tests.tiny import batch_of, command, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with weights and a tokenizer, texts, and conversations."""
    folder = tmp_path_factory.mktemp("fine-tuning")
    write_pretrained(folder / "model")
    lengths = (700, 150, 1400, 30, 2500, 400)
    write_lines(folder / "texts.jsonl", [{"text": TEXT[at * 3000 : at * 3000 + n]} for at, n in enumerate(lengths * 3)])
    write_lines(folder / "other.jsonl", [{"text": TEXT[40_000 + at * 700 :][:700]} for at in range(5)])
    write_lines(folder / "chats.jsonl", [{"messages": chat} for chat in chats()])
    return folder


def config_of(folder: Path, data: str, out: Path, **changes: Any) -> TrainConfig:
    settings = {
        "max_steps": 4, "per_device_train_batch_size": 2, "max_length": 128, "precision": "fp32",
        "gradient_accumulation_steps": 2, "learning_rate": 3e-3, "lr_scheduler_type": "constant",
        "memory": Memory(host="1GiB"), "plan": "usual", "eval_share": 0.0,
    }  # fmt: skip
    return TrainConfig(model=str(folder / "model"), data=str(folder / data), output_dir=out, **{**settings, **changes})


def on_ssd(folder: Path) -> Memory:
    (folder / "ssd").mkdir()
    return Memory(host="600KiB", ssd=str(folder / "ssd"), page_size="4KiB", unit_limit="64KiB")


def trained(config: TrainConfig) -> tuple[list[float], list[dict[str, Any]], str]:
    """The loss of every step, the evaluations, and what was said."""
    shown = io.StringIO()
    run(config, Console(file=shown, width=200))
    evals = config.output_dir / "evals.jsonl"
    losses = [line["loss"] for line in read_metrics(config.output_dir / "metrics.jsonl")]
    return losses, read_metrics(evals) if evals.exists() else [], shown.getvalue()


def batches_of(config: TrainConfig, data: str) -> Batches:
    tokens = open_tokens(data, open_tokenizer(Path(config.model), None))
    return Batches(
        rows=Rows.of(tokens, config.max_length), batch_size=config.per_device_train_batch_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps, positions=True,
    )  # fmt: skip


def loss_in_transformers(model: Any, *batches: dict[str, torch.Tensor]) -> tuple[float, int]:
    """The mean loss of every document by itself, and the number of tokens that it counts."""
    total, counted = 0.0, 0
    for ids, labels, positions in (row for batch in batches for row in zip(*batch.values(), strict=True)):
        for start, stop in pairwise([*(positions == 0).nonzero().flatten().tolist(), len(ids)]):
            kept = labels[start:stop][None].clone()
            count = int((kept[:, 1:] != -100).sum())
            if count:
                with torch.no_grad():
                    total += model(input_ids=ids[start:stop][None], labels=kept).loss.item() * count
                counted += count
    return total / counted, counted


DATA = pytest.mark.parametrize("data", [pytest.param("texts.jsonl", marks=pytest.mark.slow), "chats.jsonl"])


@DATA
def test_the_first_losses_are_those_of_transformers_on_the_documents(data: str, folder: Path, tmp_path: Path) -> None:
    """Of every document by itself: packing changes nothing but the speed. Bits per byte are those of the text."""
    other = str(folder / data.replace("texts", "other"))
    config = config_of(folder, data, tmp_path / "run", max_steps=1, eval_data=other, max_eval_samples=256)
    (loss,), (first, _), shown = trained(config)
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    batches, evaluated = batches_of(config, config.data), batches_of(config, other)
    expected, _ = loss_in_transformers(model, batch_of(batches, 0, 0), batch_of(batches, 0, 1))
    assert loss == pytest.approx(expected, rel=1e-5)
    rows = evaluated.rows
    expected, counted = loss_in_transformers(model, evaluated.of_rows(np.arange(len(rows))))
    assert first["loss"] == pytest.approx(expected, rel=1e-5)
    assert (first["step"], first["tokens"], first["sequences"]) == (0, counted, len(rows))
    assert first["perplexity"] == pytest.approx(math.exp(first["loss"]))
    labels = evaluated.of_rows(np.arange(len(rows)))["labels"][:, 1:]
    text = AutoTokenizer.from_pretrained(folder / "model").decode(labels[labels >= 0], skip_special_tokens=True)
    assert first["bits_per_byte"] == pytest.approx(first["loss"] * counted / math.log(2) / len(text.encode()))
    assert "Evaluation before the first step: loss" in shown


@DATA
def test_a_resumed_run_has_the_bits_of_one_that_went_on(data: str, folder: Path, tmp_path: Path) -> None:
    whole = config_of(folder, data, tmp_path / "whole", eval_share=0.2, max_eval_samples=4, eval_steps=2)
    losses, evals, shown = trained(whole)
    assert losses[-1] < losses[0] - 0.1
    assert "attention ends where a document does" in shown
    assert "held out, every 2 steps" in shown
    parts = replace(whole, output_dir=tmp_path / "parts", max_steps=2)
    _, evaluated, _ = trained(parts)
    # A run that a signal ends leaves out the evaluation that is due then.
    write_lines(parts.output_dir / "evals.jsonl", evaluated[:-1])
    again, resumed, _ = trained(replace(parts, max_steps=4, resume_from_checkpoint="last"))
    assert again == losses
    assert [(line["step"], line["loss"]) for line in resumed] == [(line["step"], line["loss"]) for line in evals]
    shutil.copy(folder / data, tmp_path / data)
    on = replace(parts, max_steps=5, resume_from_checkpoint="last")
    trained(replace(on, cache=tmp_path / "cache", data=str(tmp_path / data)))


@DATA
def test_micro_batches_of_layers_know_where_documents_end(data: str, folder: Path, tmp_path: Path) -> None:
    plain = config_of(
        folder, data, tmp_path / "plain", max_steps=2, gradient_accumulation_steps=1, per_device_train_batch_size=4
    )
    tiled = replace(plain, output_dir=tmp_path / "tiled", batch_tiles=2)
    assert trained(tiled)[0] == pytest.approx(trained(plain)[0], rel=1e-5)


def test_evaluations_change_no_bit_of_the_training(folder: Path, tmp_path: Path) -> None:
    plain = config_of(folder, "texts.jsonl", tmp_path / "plain", memory=on_ssd(tmp_path))
    other = str(folder / "other.jsonl")
    watched = replace(plain, output_dir=tmp_path / "watched", eval_data=other, eval_steps=2)
    losses, evals, _ = trained(watched)
    assert trained(plain)[0] == losses
    assert [line["step"] for line in evals] == [0, 2, 4]
    assert evals[-1]["loss"] < evals[0]["loss"]


def test_the_best_checkpoint_is_kept_and_a_run_that_gets_no_better_stops(folder: Path, tmp_path: Path) -> None:
    """Learning rates that are far too large make it worse. State on SSD is kept in place by both checkpoints."""
    config = config_of(
        folder, "texts.jsonl", tmp_path / "run", memory=on_ssd(tmp_path), max_steps=20, max_length=64,
        eval_data=str(folder / "other.jsonl"), eval_steps=1, early_stopping_patience=3, save_total_limit=1,
        save_steps=1, learning_rate=2.0, lr_scheduler_type="constant", warmup_steps=40, gradient_accumulation_steps=1,
    )  # fmt: skip
    _, evals, shown = trained(config)
    best = min(evals[1:], key=lambda line: line["loss"])["step"]
    last = evals[-1]["step"]
    assert last < 20
    assert "Stopped early" in shown
    assert [checkpoint.step for checkpoint in RunDir(config.output_dir).all_checkpoints()] == sorted({best, last})
    on = replace(config, resume_from_checkpoint="last", early_stopping_patience=0)
    assert run(replace(on, max_steps=last + 1), Console(quiet=True)).first_step == last + 1
    assert best in [checkpoint.step for checkpoint in RunDir(config.output_dir).all_checkpoints()]
    # Losses on other sequences are not compared with those before.
    _, evals, shown = trained(replace(on, max_steps=last + 3, max_eval_samples=1))
    assert "not on the sequences of before: the best" in shown
    best = min(evals[-2:], key=lambda line: line["loss"])["step"]
    assert RunDir(config.output_dir).named("best").step == best
    kept = [checkpoint.step for checkpoint in RunDir(config.output_dir).all_checkpoints()]
    assert {best, last + 3} <= {*kept}
    assert len(kept) == 2  # the best may be the last one


WRONG = {
    "no chat template": ("--data {}/chats.jsonl --model {}/untold", "put a chat_template.jinja next to it"),
    "a vocabulary that does not match": (
        "--tokenizer {}/untold --model {}/small",
        "vocabulary of 64, and data '.*texts.jsonl' has tokens up to",
    ),
    "a vocabulary that does not match that of --eval-data": (
        "--model {}/bytes --data {}/plain.txt --eval-data {}/accents.txt",
        "vocabulary of 128, and data '.*accents.txt' has tokens up to 195",
    ),
    "sequences that are too long": ("--max-length 512", "use --max-length 256 or less"),
    "conversations that are too long": (
        "--max-length 8 --data {}/chats.jsonl",
        r"nothing to learn within --max-length 8 tokens \(the longest document has \d+\): use other data, or another",
    ),
    "everything held out": ("--eval-share 0.999", "leaves nothing of"),
    "an interrupted download": ("--model {}/part", "lacks 1 of its 2 files of weights"),
}


@pytest.fixture(scope="module")
def wrongs(folder: Path) -> Path:
    """The same folder, with models and data that do not go together."""
    write_pretrained(folder / "untold", chat_template=None)
    write_pretrained(folder / "small", vocab_size=64)
    write_pretrained(folder / "part")
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    (folder / "part" / "model.safetensors").rename(folder / "part" / files[0])
    index = {"weight_map": dict(zip("ab", files, strict=True))}
    (folder / "part" / "model.safetensors.index.json").write_text(json.dumps(index))
    write_model(folder / "bytes", vocab_size=128)
    (folder / "plain.txt").write_text("plain text " * 90)
    (folder / "accents.txt").write_text("caf\u00e9 " * 90)
    return folder


@pytest.mark.parametrize("case", WRONG)
def test_mistakes_are_one_message_with_the_remedy(
    case: str, wrongs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, message = WRONG[case]
    usual = "train --model {}/model --data {}/texts.jsonl --max-length 64 --per-device-train-batch-size 1 --max-steps 1"
    asked = f"{usual} --memory.host 1GiB {flags}".replace("{}", str(wrongs))
    assert command(f"{asked} --output-dir {tmp_path / 'run'}") == 2
    error = capsys.readouterr().err
    assert error.count("pagoda: ") == 1
    assert re.search(message, error)
    assert not (tmp_path / "run").exists()
