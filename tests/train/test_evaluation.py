"""Evaluations: what they measure, what follows from them, and that they change nothing of the training."""

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from pagoda.config.memory import Memory
from pagoda.errors import ConfigError
from pagoda.train import OptimConfig, TrainConfig, run
from pagoda.train.data import Rows
from pagoda.train.metrics import read_metrics
from pagoda.train.run_dir import RunDir
from pagoda.train.tokenizer import open_tokenizer
from pagoda.train.tokens import open_tokens
from tests.text_files import TEXT, chats, write_lines, write_pretrained


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluation")
    write_pretrained(folder / "model", vocab_size=512)
    write_lines(folder / "texts.jsonl", [{"text": TEXT[at * 2000 : at * 2000 + 1500]} for at in range(12)])
    write_lines(folder / "other.jsonl", [{"text": TEXT[40_000 + at * 700 :][:700]} for at in range(5)])
    write_lines(folder / "chats.jsonl", [{"messages": chat} for chat in chats()])
    return folder


def config_of(folder: Path, out: Path, **changes: Any) -> TrainConfig:
    settings = {
        "data": str(folder / "texts.jsonl"), "steps": 6, "batch_size": 2, "seq_len": 64, "precision": "fp32",
        "optim": OptimConfig(lr=3e-3, schedule="constant"), "memory": Memory(host="1GiB"), "plan": "usual",
    }  # fmt: skip
    return TrainConfig(model=str(folder / "model"), out=out, **{**settings, **changes})


def trained(config: TrainConfig) -> tuple[list[float], list[dict[str, Any]], str]:
    """The loss of every step, the evaluations, and what was said."""
    shown = io.StringIO()
    run(config, Console(file=shown, width=200))
    evals = config.out / "evals.jsonl"
    losses = [line["loss"] for line in read_metrics(config.out / "metrics.jsonl")]
    return losses, read_metrics(evals) if evals.exists() else [], shown.getvalue()


def test_the_loss_before_the_first_step_is_that_of_transformers(folder: Path, tmp_path: Path) -> None:
    """Of all tokens of the data to evaluate on; bits per byte are of their text."""
    config = config_of(folder, tmp_path / "run", eval_data=str(folder / "other.jsonl"), steps=1)
    _, (first, _), shown = trained(config)
    tokens = open_tokens(config.eval_data, open_tokenizer(folder / "model", None))
    rows = Rows.of(tokens, 64)
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    total = counted = 0.0
    for row in range(len(rows)):
        ids, labels = map(torch.from_numpy, rows.ids_and_labels([row]))
        positions = torch.from_numpy(rows.positions([row]))
        count = int((labels[:, 1:] != -100).sum())
        with torch.no_grad():
            total += model(input_ids=ids, labels=labels, position_ids=positions, use_cache=False).loss.item() * count
        counted += count
    assert first["step"] == 0
    assert first["loss"] == pytest.approx(total / counted, rel=1e-5)
    assert (first["tokens"], first["sequences"]) == (counted, len(rows))
    assert first["perplexity"] == pytest.approx(math.exp(first["loss"]))
    per_byte = tokens.about.target_bytes / tokens.about.targets
    assert first["bits_per_byte"] == pytest.approx(first["loss"] / math.log(2) / per_byte)
    assert "Evaluation before the first step: loss" in shown


@pytest.mark.parametrize("ssd", [False, True])
def test_evaluations_and_samples_change_no_bit_of_the_training(ssd: bool, folder: Path, tmp_path: Path) -> None:
    memory = Memory(host="64MiB")
    if ssd:
        (tmp_path / "ssd").mkdir()
        memory = Memory(host="600KiB", ssd=str(tmp_path / "ssd"), page_size="4KiB", unit_limit="64KiB")
    plain = config_of(folder, tmp_path / "plain", memory=memory)
    watched = replace(
        plain, out=tmp_path / "watched", eval_data=str(folder / "other.jsonl"), eval_every=2, sample_every=2
    )
    losses, evals, shown = trained(watched)
    assert trained(plain)[0] == losses
    assert [line["step"] for line in evals] == [0, 2, 4, 6]
    assert evals[-1]["loss"] < evals[0]["loss"]
    assert shown.count("greedy: The|") == shown.count("drawn: The|") == 3


def test_a_resumed_run_evaluates_as_one_that_went_on(folder: Path, tmp_path: Path) -> None:
    whole = config_of(folder, tmp_path / "whole", eval_share=0.2, eval_every=2)
    losses, evals, shown = trained(whole)
    assert "held out, every 2 steps" in shown
    parts = replace(whole, out=tmp_path / "parts", steps=4)
    trained(parts)
    again, resumed, _ = trained(replace(parts, steps=6, resume=True))
    assert again == losses
    assert [(line["step"], line["loss"]) for line in resumed] == [(line["step"], line["loss"]) for line in evals]


def test_the_best_checkpoint_is_kept_and_a_run_that_gets_no_better_stops(folder: Path, tmp_path: Path) -> None:
    """Learning rates that are far too large make it worse."""
    config = config_of(
        folder, tmp_path / "run", steps=20, eval_data=str(folder / "other.jsonl"), eval_every=1, patience=3,
        optim=OptimConfig(lr=2.0, schedule="constant", warmup_steps=40), keep_checkpoints=1, checkpoint_every=1,
    )  # fmt: skip
    _, evals, shown = trained(config)
    best = min(evals[1:], key=lambda line: line["loss"])["step"]
    last = evals[-1]["step"]
    assert last < 20
    assert "Stopped early" in shown
    kept = [checkpoint.step for checkpoint in RunDir(config.out).all_checkpoints()]
    assert kept == sorted({best, last})


def test_what_is_held_out_is_never_trained_on(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not both"):
        config_of(folder, tmp_path / "run", eval_share=0.1, eval_data="stdlib")
    with pytest.raises(ConfigError, match="--patience compares evaluations"):
        config_of(folder, tmp_path / "run", patience=1)
    config = config_of(folder, tmp_path / "run", eval_share=0.9, data=str(folder / "chats.jsonl"), seq_len=256)
    with pytest.raises(ConfigError, match="leaves nothing of"):
        run(replace(config, eval_share=0.99), Console(quiet=True))
    _, _, shown = trained(config)
    assert json.loads((config.out / "evals.jsonl").read_text().splitlines()[0])["sequences"] == int(
        shown.split("Evaluation: ")[1].split(" of ")[0]
    )
