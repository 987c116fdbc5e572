"""Mixtures of experts train on text, report their balance, resume and are exported."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pagoda.checkpoint.export import export
from pagoda.config.memory import Memory
from pagoda.forecast.config import PlanConfig
from pagoda.forecast.model_description import describe_model
from pagoda.models import build_model
from pagoda.prepare.construct import describe
from pagoda.prepare.experts import RoutedExperts
from pagoda.prepare.operator_tiles import Tiling
from pagoda.train import TrainConfig
from pagoda.train.data import Batches, Rows
from pagoda.train.metrics import read_metrics
from pagoda.train.run_dir import RunDir
from pagoda.train.tokens import open_tokens
from tests.tiny import batch_of, tiny_run, trained, write_mixture


def config_of(model: str, out: Path) -> TrainConfig:
    memory = Memory(host="1GiB")
    return tiny_run(out.parent, model=model, max_steps=3, max_length=32, memory=memory, output_dir=out, plan="usual")


def lines_of(config: TrainConfig) -> list[dict[str, float]]:
    """The metrics of a run that this makes."""
    trained(config)
    return read_metrics(config.output_dir / "metrics.jsonl")


@pytest.mark.parametrize(
    ("name", "even"), [("mixtral-15m", 2), pytest.param("qwen3-moe-15m", 4, marks=pytest.mark.slow)]
)
def test_a_mixture_trains_resumes_bit_for_bit_and_has_the_same_loss_in_transformers(
    name: str, even: int, tmp_path: Path
) -> None:
    """It is exported, and trained on from there."""
    whole = config_of(write_mixture(name, tmp_path / "model"), tmp_path / "whole")
    whole = replace(whole, lr_scheduler_type="constant")
    lines = lines_of(whole)
    for line in lines:
        assert 3 < line["loss"] < 9
        assert 0.95 * even < line["aux_loss"] < 8
    parts = replace(whole, max_steps=2, output_dir=tmp_path / "parts")
    trained(parts)
    export(RunDir(parts.output_dir).latest().state, tmp_path / "exported")
    resumed = lines_of(replace(parts, max_steps=3, resume_from_checkpoint="last"))
    assert [line["loss"] for line in resumed] == [line["loss"] for line in lines]
    loss = loss_in_transformers(tmp_path / "exported", whole, 2)
    assert loss == pytest.approx(lines[2]["loss"], rel=1e-6)
    exported = replace(whole, model=str(tmp_path / "exported"), tokenizer="bytes")
    again = lines_of(replace(exported, max_steps=1, output_dir=tmp_path / "again"))
    assert again[0]["loss"] < lines[0]["loss"]


def loss_in_transformers(exported: Path, config: TrainConfig, step: int) -> float:
    """Of the batch of a step (from 0) of a run, without Pagoda."""
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.bfloat16).train()
    batches = Batches(
        rows=Rows.of(open_tokens(config.data), config.max_length), batch_size=config.per_device_train_batch_size
    )
    with torch.no_grad():
        loss: torch.Tensor = model(**batch_of(batches, step), output_router_logits=True).loss
    return loss.item()


@pytest.mark.parametrize(
    ("model", "expert_parallel"), [("mixtral-15m", 1), ("mixtral-15m", 4), ("qwen3-moe-15m", 4), ("t5-moe-15m", 4)]
)
def test_what_is_planned_is_what_is_trained(model: str, expert_parallel: int) -> None:
    config = PlanConfig(
        model=model, per_device_train_batch_size=2, max_length=64, expert_parallel=expert_parallel, precision="bf16"
    )
    described = describe_model(config)
    with torch.device("meta"):
        built = build_model(model, seq_len=64)
    assert described.params == sum(param.numel() for param in built.parameters())
    first: Any = SimpleNamespace(ranks=expert_parallel, rank=0) if expert_parallel > 1 else None
    Tiling(built, exchange=first)
    assert described.root == describe(built)
    if expert_parallel > 1:
        whole = describe_model(replace(config, expert_parallel=1))
        assert sum(described.forward_flops.values()) == pytest.approx(sum(whole.forward_flops.values()))
        assert described.params == whole.params
        assert len(described.exchanged) == sum(isinstance(module, RoutedExperts) for module in built.modules())
        assert not whole.exchanged
