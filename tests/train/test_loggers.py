"""Metrics go to the places that are asked for, whose packages are imported then and not before."""

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

MODULES = {"wandb": "wandb", "trackio": "trackio", "tensorboard": "torch.utils.tensorboard"}


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    return tiny_run(tmp_path, steps=3, eval_share=0.2, eval_rows=4, eval_every=2, plan="usual")


class Tracker(ModuleType):
    """As wandb and trackio, and as torch's module for TensorBoard."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)  # transformers looks whether it is there
        self.begun: list[Any] = []
        self.seen: dict[str, dict[int, float]] = {}
        self.ended = 0
        self.SummaryWriter = self.write_to

    def init(self, **given: Any) -> None:
        self.begun.append(given)

    def log(self, figures: dict[str, float], step: int) -> None:
        for name, value in figures.items():
            self.add_scalar(name, value, step)

    def finish(self) -> None:
        self.ended += 1

    def write_to(self, folder: str) -> "Tracker":
        assert Path(folder).parent.is_dir(), "a run makes its directory after its first step"
        self.begun.append(folder)
        return self

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.seen.setdefault(name, {})[step] = value

    def close(self) -> None:
        self.ended += 1


def test_every_step_and_evaluation_is_logged(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    trackers = {name: Tracker(name) for name in MODULES}
    for name, tracker in trackers.items():
        monkeypatch.setitem(sys.modules, MODULES[name], tracker)
    trained(replace(config, log=", ".join(MODULES)))
    for name, tracker in trackers.items():
        begun = str(config.out / "tensorboard") if name == "tensorboard" else {"project": "pagoda", "name": "run"}
        assert (tracker.begun, tracker.ended) == ([begun], 1)
        for file, figure in (("metrics.jsonl", "train/loss"), ("evals.jsonl", "eval/loss")):
            assert tracker.seen[figure] == {line["step"]: line["loss"] for line in read_metrics(config.out / file)}
        assert tracker.seen.keys() >= {"train/grad_norm", "stall_share/update", "peak_bytes/host", "eval/perplexity"}


@pytest.mark.parametrize("name", MODULES)
def test_a_package_that_is_missing_is_named_before_anything_is_written(
    name: str, config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, MODULES[name], None)
    with pytest.raises(ConfigError, match=f"--log {name} needs the package {name}: pip install {name}"):
        trained(replace(config, log=name))
    with pytest.raises(ConfigError, match="'tensorbord' is not known: give some of tensorboard"):
        trained(replace(config, log="tensorbord"))
    assert not config.out.exists()
