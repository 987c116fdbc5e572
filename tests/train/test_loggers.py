"""Figures go to the places that are asked for, whose packages are imported then and not before."""

import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pagoda.errors import ConfigError
from pagoda.train import TrainConfig
from pagoda.train.metrics import read_metrics
from tests.tiny import tiny_run, trained


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    return tiny_run(tmp_path, steps=3, eval_share=0.2, eval_every=2, plan="usual")


class Tracker(ModuleType):
    """As wandb and trackio."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)  # transformers looks whether it is there
        self.seen: list[Any] = []

    def init(self, **given: Any) -> None:
        self.seen.append(given)

    def log(self, figures: dict[str, float], step: int) -> None:
        self.seen.append((step, figures))

    def finish(self) -> None:
        self.seen.append("finished")


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_gets_every_step_and_evaluation(
    name: str, config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = Tracker(name)
    monkeypatch.setitem(sys.modules, name, tracker)
    trained(replace(config, log=f"jsonl, {name}"))
    first, *logged, last = tracker.seen
    assert first == {"project": "pagoda", "name": "run"}
    assert last == "finished"
    losses = {step: figures["train/loss"] for step, figures in logged if "train/loss" in figures}
    assert losses == {line["step"]: line["loss"] for line in read_metrics(config.out / "metrics.jsonl")}
    evals = {step: figures["eval/loss"] for step, figures in logged if "eval/loss" in figures}
    assert evals == {line["step"]: line["loss"] for line in read_metrics(config.out / "evals.jsonl")}


@pytest.mark.parametrize("name", ["wandb", "trackio", "tensorboard"])
def test_a_package_that_is_missing_is_named_before_anything_is_written(
    name: str, config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name if name != "tensorboard" else "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=f"--log {name} needs the package {name}: pip install {name}"):
        trained(replace(config, log=name))
    with pytest.raises(ConfigError, match="'tensorbord' is not known: give some of jsonl, tensorboard"):
        trained(replace(config, log="tensorbord"))
    assert not config.out.exists()
