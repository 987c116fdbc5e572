"""The built-in mixtures of experts train on text, report their routing, and resume."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from pagoda.config.memory import Memory
from pagoda.construction.construct import describe
from pagoda.errors import ConfigError
from pagoda.forecast.config import PlanConfig
from pagoda.forecast.subject import find_subject
from pagoda.models import build_model
from pagoda.models.mixture_shapes import RoutingConfig
from pagoda.plan.units import ModuleSpec
from pagoda.train import TrainConfig, run
from pagoda.train.metrics import read_metrics


def config_of(model: str, out: Path) -> TrainConfig:
    memory = Memory(host="1GiB")
    return TrainConfig(model=model, steps=3, batch_size=2, seq_len=32, memory=memory, out=out, plan="usual")


def trained(config: TrainConfig) -> list[dict[str, float]]:
    run(config, Console(file=io.StringIO()))
    return read_metrics(config.out / "metrics.jsonl")


@pytest.mark.parametrize("model", ["gpt-moe-15m", "t5-moe-15m"])
def test_a_mixture_trains_on_text_and_reports_its_routing(model: str, tmp_path: Path) -> None:
    lines = trained(config_of(model, tmp_path / "run"))
    assert len(lines) == 3
    for line in lines:
        assert 3 < line["loss"] < 9
        assert 0.9 < line["aux_loss"] < 8
        assert 0 <= line["dropped"] < 1


def test_routing_is_set_and_decides_the_bits(tmp_path: Path) -> None:
    lines = [
        trained(replace(config_of("gpt-moe-15m", tmp_path / name), steps=1, routing=routing))[0]
        for name, routing in (("usual", RoutingConfig()), ("tight", RoutingConfig(top_k=1, capacity_factor=0.25)))
    ]
    assert lines[1]["dropped"] >= 0.7 > lines[0]["dropped"]
    assert lines[0]["loss"] != lines[1]["loss"]


def test_a_resumed_run_of_a_mixture_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole = config_of("gpt-moe-15m", tmp_path / "whole")
    parts = replace(whole, steps=2, checkpoint_every=2, out=tmp_path / "parts")
    parts = replace(parts, optim=replace(parts.optim, schedule="constant"))
    whole = replace(whole, optim=parts.optim)
    expected = [line["loss"] for line in trained(whole)]
    trained(parts)
    resumed = trained(replace(parts, steps=3, resume=True))
    assert [line["loss"] for line in resumed] == expected


def test_a_model_without_a_router_takes_no_routing_and_reports_none(tmp_path: Path) -> None:
    usual = config_of("gpt-1x64", tmp_path / "run")
    with pytest.raises(ConfigError, match="no built-in mixture"):
        trained(replace(usual, routing=RoutingConfig(top_k=1)))
    assert trained(usual)[0]["aux_loss"] is None


@pytest.mark.parametrize("model", ["gpt-moe-15m", "t5-moe-15m"])
def test_what_is_planned_is_what_is_trained(model: str) -> None:
    subject = find_subject(model, batch_size=PlanConfig.batch_size, seq_len=512)
    with torch.device("meta"):
        built = build_model(model, seq_len=512)

    def names(module: ModuleSpec) -> list[str]:
        return [module.name, *(name for child in module.children for name in names(child))]

    assert names(subject.root) == names(describe(built))
    assert subject.params == sum(param.numel() for param in built.parameters())
