"""`pagoda train --pipeline-parallel`: stages train as one rank does that accumulates the same micro-batches."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from zoo import assert_equal

from pagoda.checkpoint.export import export
from pagoda.cli.main import main
from pagoda.config.memory import Memory
from pagoda.errors import ConfigError
from pagoda.train import TrainConfig, run
from pagoda.train.metrics import read_metrics
from pagoda.train.run_dir import RunDir
from tests.text_files import chats, write_lines, write_pretrained
from tests.tiny import write_mixture, write_text

from .ranks import RankServer
from .tiny_runs import assert_same, started

STEPS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with weights and a tokenizer, and conversations."""
    folder = tmp_path_factory.mktemp("stages")
    write_pretrained(folder / "model", num_hidden_layers=3)
    write_lines(folder / "chats.jsonl", [{"messages": chat} for chat in chats()])
    return folder


def config_of(folder: Path, out: Path, **changes: Any) -> TrainConfig:
    """A run of two stages whose norm is clipped, with an evaluation and a checkpoint every second step."""
    usual = {
        "model": str(folder / "model"), "data": str(folder / "chats.jsonl"), "output_dir": out, "max_steps": STEPS,
        "per_device_train_batch_size": 2, "max_length": 128, "gradient_accumulation_steps": 3,
        "pipeline_parallel": 2, "precision": "fp32", "max_grad_norm": 0.05, "eval_share": 0.3, "max_eval_samples": 6,
        "eval_steps": 2, "save_steps": 2, "keep_best": False,
        "learning_rate": 3e-3, "lr_scheduler_type": "constant", "memory": Memory(host="64MiB", unit_limit="16KiB"),
    }  # fmt: skip
    return TrainConfig(**{**usual, **changes})


@pytest.fixture(scope="module")
def alone(ranks: RankServer, folder: Path) -> TrainConfig:
    """One rank that takes all steps: to be copied, not changed."""
    config = config_of(folder, folder / "alone", pipeline_parallel=1)
    assert started(ranks, 1, folder / "one", config) == [0]
    return config


def losses(config: TrainConfig) -> list[Any]:
    run_dir = RunDir(config.output_dir)
    return [[line["loss"] for line in read_metrics(path)] for path in (run_dir.metrics, run_dir.evals)]


def test_two_stages_have_the_bits_of_one_rank(
    ranks: RankServer, alone: TrainConfig, folder: Path, tmp_path: Path
) -> None:
    """Of conversations that stay apart, with clipping, and in evaluations. What they leave is as any run's: one rank
    continues it, and it can be exported."""
    config = config_of(folder, tmp_path / "run", max_steps=STEPS - 2)
    assert started(ranks, 2, tmp_path / "two", config) == [0, 0]
    shown, silent = (torch.load(tmp_path / "two" / f"rank-{rank}.pt")["shown"] for rank in range(2))
    assert "Pipeline: 2 stages, with 2, 1 layers" in shown
    assert "attention ends where a document does" in shown
    assert not silent
    assert all(line["grad_norm"] > 2 * 0.05 for line in read_metrics(RunDir(config.output_dir).metrics))
    goes_on = replace(config, pipeline_parallel=1, max_steps=STEPS, resume_from_checkpoint="last")
    assert started(ranks, 1, tmp_path / "one", goes_on) == [0]
    assert_same(goes_on, alone)
    assert losses(goes_on) == losses(alone)
    for source in (config, alone):
        export(RunDir(source.output_dir).latest().state, tmp_path / f"of-{source.output_dir.name}")
    exported, expected = (
        load_file(tmp_path / f"of-{one.output_dir.name}" / "model.safetensors") for one in (config, alone)
    )
    assert_equal(exported, expected)


def test_stages_continue_what_one_rank_began(
    ranks: RankServer, alone: TrainConfig, folder: Path, tmp_path: Path
) -> None:
    config = config_of(folder, tmp_path / "run", resume_from_checkpoint="checkpoint-2")
    shutil.copytree(alone.output_dir, config.output_dir)
    assert started(ranks, 2, tmp_path / "two", config) == [0, 0]
    assert_same(config, alone)
    assert losses(config) == losses(alone)
    assert (
        main(
            ["generate", str(config.output_dir), "--prompt", "hello", "--max-new-tokens", "2", "--memory.host", "64MiB"]
        )
        == 0
    )


def assert_bits_of_whole_models(count: int, config: TrainConfig, ranks: RankServer, tmp_path: Path) -> None:
    """Two stages of `count` ranks each have the bits of `count` ranks without stages."""
    whole = replace(config, pipeline_parallel=1, output_dir=tmp_path / "whole")
    assert started(ranks, 2 * count, tmp_path / "two", config) == [0] * (2 * count)
    assert started(ranks, count, tmp_path / "one", whole) == [0] * count
    assert_same(config, whole)
    assert losses(config) == losses(whole)


UNTIED = {"tie_word_embeddings": False}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    # name: ranks of a stage, settings
    "two ranks of each stage": (2, {}),
    "layers are divided, too": (2, {"tensor_parallel": 2}),
    "ordered sums": (2, {"ordered_sums": True}),
    "fp16, and a loss in chunks": (1, {"precision": "fp16", "chunked_loss": True}),
    "updates during backward": (1, {"max_grad_norm": 0.0, "activations": "recompute"}),
    "muon, on ssd": (1, {"optim": "muon"}),
    "bf16, updates a step late": (1, {"precision": "bf16", "update": "async"}),
    "batches and layers in tiles": (1, {"batch_tiles": 2, "tile_limit": "8KiB", "activations": "auto"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_stages_have_the_bits_of_whole_models_whatever_else_is_asked(
    name: str, ranks: RankServer, folder: Path, tmp_path: Path
) -> None:
    count, settings = CASES[name]
    config = config_of(folder, tmp_path / "run", **settings)
    if "ssd" in name:
        config = replace(config, memory=replace(config.memory, host="1MiB", page_size="4KiB", ssd=str(tmp_path)))
    assert_bits_of_whole_models(count, config, ranks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "settings"), [(1, {}), (2, {"expert_parallel": 2, "zero_stage": 2})])
def test_a_mixture_of_experts_trains_in_stages(
    count: int, settings: dict[str, Any], ranks: RankServer, folder: Path, tmp_path: Path
) -> None:
    name = write_mixture("mixtral-15m", tmp_path / "model", layers=3)
    path = Path(name) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **UNTIED, "output_router_logits": False}))
    config = config_of(folder, tmp_path / "run", model=name, data=write_text(tmp_path / "text"), **settings)
    assert_bits_of_whole_models(count, config, ranks, tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"plan": "search"}, "--plan search is for whole models"),
        ({"lora_r": 2}, "--lora-r adapts whole models"),
    ],
)
def test_settings_that_stages_cannot_keep_are_refused(
    settings: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(config_of(folder, tmp_path / "run", **settings))


def test_a_step_with_fewer_micro_batches_than_stages_is_refused(
    ranks: RankServer, folder: Path, tmp_path: Path
) -> None:
    assert started(ranks, 2, tmp_path, config_of(folder, tmp_path / "run", gradient_accumulation_steps=1)) == [1, 1]
    for rank in range(2):
        assert "give --gradient-accumulation-steps 2" in (tmp_path / f"error-{rank}.txt").read_text()
