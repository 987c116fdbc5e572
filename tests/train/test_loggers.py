"""Metrics go to the places that are asked for, whose packages are imported then and not before."""

import json
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
from pagoda.train.run_dir import RunDir
from pagoda.train.session import Session
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
        self.settings: Any = None
        self.seen: dict[str, dict[int, float]] = {}
        self.ended = 0
        self.SummaryWriter = self.write_to

    def init(self, config: Any, **given: Any) -> None:
        self.settings = config
        self.begun.append(given)

    def log(self, figures: dict[str, float], step: int) -> None:
        for name, value in figures.items():
            self.add_scalar(name, value, step)

    def finish(self) -> None:
        self.ended += 1

    def write_to(self, folder: str, purge_step: int) -> "Tracker":
        """As TensorBoard, which drops what other files in the folder have of these steps and later ones."""
        assert Path(folder).parent.is_dir(), "a run makes its directory after its first step"
        self.begun.append((folder, purge_step))
        return self

    def add_text(self, tag: str, text: str, step: int) -> None:
        assert (tag, step) == ("settings", self.begun[-1][1] - 1)
        self.settings = json.loads(text.removeprefix("```json\n").removesuffix("\n```"))

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.seen.setdefault(name, {})[step] = value

    def close(self) -> None:
        self.ended += 1


def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Tracker]:
    """All packages, as if they were installed."""
    trackers = {name: Tracker(name) for name in MODULES}
    for name, tracker in trackers.items():
        monkeypatch.setitem(sys.modules, name, tracker)
        monkeypatch.setitem(sys.modules, MODULES[name], tracker)
    return trackers


def test_every_step_and_evaluation_is_logged(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    trackers = installed(monkeypatch)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    trained(replace(config, log=", ".join(MODULES)))
    projects = {"wandb": "mine", "trackio": "pagoda"}
    for name, tracker in trackers.items():
        begun = {"project": projects[name], "name": "run"} if name in projects else (str(config.out / name), 1)
        assert (tracker.begun, tracker.ended) == ([begun], 1)
        assert tracker.settings == RunDir(config.out).started_config().settings()
        for file, figure in (("metrics.jsonl", "train/loss"), ("evals.jsonl", "eval/loss")):
            assert tracker.seen[figure] == {line["step"]: line["loss"] for line in read_metrics(config.out / file)}
        assert tracker.seen.keys() >= {"train/grad_norm", "stall_share/update", "peak_bytes/host", "eval/perplexity"}


def test_a_wrong_key_ends_a_run_before_its_first_step(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise ValueError("the key is not one of wandb")

    def step(*_: object) -> None:
        raise AssertionError("no step begins")

    trackers = installed(monkeypatch)
    monkeypatch.setattr(trackers["wandb"], "init", refuse)
    monkeypatch.setattr(Session, "step", step)
    with pytest.raises(ConfigError, match="--log wandb cannot be opened: ValueError: the key is not one of wandb"):
        trained(replace(config, log="wandb"))
    assert not config.out.exists()


def test_steps_that_run_again_replace_those_that_tensorboard_has(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = installed(monkeypatch)["tensorboard"]
    config = replace(config, log="tensorboard", checkpoint_every=2, steps=2)
    trained(config)
    trained(replace(config, steps=3, resume=True))
    assert [purged for _, purged in tracker.begun] == [1, 3]


@pytest.mark.parametrize("name", MODULES)
def test_a_package_that_is_missing_is_named_before_anything_is_written(
    name: str, config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=f"--log {name} needs the package {name}: pip install {name}"):
        trained(replace(config, log=name))
    with pytest.raises(ConfigError, match="'tensorbord' is not known: give some of tensorboard"):
        replace(config, log="tensorbord")
    assert not config.out.exists()
