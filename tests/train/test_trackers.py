"""Metrics go to the trackers that are asked for: those of accelerate, here on stand-ins for their packages."""

import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import accelerate
import pytest
import torch
from accelerate import PartialState
from pagoda.train.session import Session

from pagoda.errors import ConfigError
from pagoda.train import TrainConfig
from pagoda.train.config import flat
from pagoda.train.metrics import read_metrics
from pagoda.train.run_dir import RunDir
from tests.tiny import tiny_run, trained

MODULES = {"wandb": "wandb", "trackio": "trackio", "tensorboard": "torch.utils.tensorboard"}


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    return tiny_run(tmp_path, steps=3, eval_share=0.2, eval_rows=4, eval_every=2, plan="usual")


class Package(ModuleType):
    """As wandb and trackio, and as torch's module for TensorBoard."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)  # accelerate and transformers look whether it is there
        self.begun: list[Any] = []
        self.settings: dict[str, Any] = {}
        self.seen: dict[str, dict[int, float]] = {}
        self.ended = 0
        self.config, self.SummaryWriter = self, self.write_to

    def init(self, **given: Any) -> "Package":
        self.begun.append(given)
        return self

    def update(self, values: dict[str, Any], allow_val_change: bool) -> None:
        self.settings |= values

    def log(self, figures: dict[str, float], step: int) -> None:
        for name, value in figures.items():
            self.add_scalar(name, value, step)

    def finish(self) -> None:
        self.ended += 1

    def write_to(self, folder: str, purge_step: int) -> "Package":
        """As TensorBoard, which drops what other files in the folder have of these steps and later ones."""
        assert Path(folder).parent.is_dir(), "a run makes its directory after its first step"
        self.begun.append((folder, purge_step))
        return self

    def add_hparams(self, values: dict[str, Any], metric_dict: dict[str, Any]) -> None:
        self.settings |= values

    def add_scalar(self, name: str, value: float, global_step: int) -> None:
        self.seen.setdefault(name, {})[global_step] = value

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.ended += 1


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> dict[str, Package]:
    """Some packages, as if they were installed."""
    found = {name: Package(name) for name in MODULES}
    for name, package in found.items():
        monkeypatch.setitem(sys.modules, name, package)
        monkeypatch.setitem(sys.modules, MODULES[name], package)
    return found


def test_settings_and_every_step_and_evaluation_are_logged(
    config: TrainConfig, packages: dict[str, Package], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    trained(replace(config, report_to=(*MODULES,)))
    projects = {"wandb": "mine", "trackio": "pagoda"}
    settings = dict(flat(RunDir(config.out).started_config().settings()))
    for name, package in packages.items():
        begun = {"project": projects[name], "name": "run"} if name in projects else (str(config.out / name), 1)
        assert (package.begun, package.ended) == ([begun], 1)
        assert {key: str(value) for key, value in package.settings.items()} == {
            key: str(value) for key, value in settings.items()
        }
        for file, figure in (("metrics.jsonl", "train/loss"), ("evals.jsonl", "eval/loss")):
            assert package.seen[figure] == {line["step"]: line["loss"] for line in read_metrics(config.out / file)}
        assert package.seen.keys() >= {"train/grad_norm", "stall_share/update", "peak_bytes/host", "eval/perplexity"}


def test_a_wrong_key_ends_a_run_before_its_first_step_and_other_trackers_are_closed(
    config: TrainConfig, packages: dict[str, Package], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise ValueError("the key is not one of wandb")

    monkeypatch.setattr(packages["wandb"], "init", refuse)
    monkeypatch.setattr(Session, "step", lambda *_: pytest.fail("no step begins"))
    with pytest.raises(ConfigError, match="--report-to wandb cannot be started: ValueError: the key is not one of"):
        trained(replace(config, report_to=("trackio", "wandb")))
    assert packages["trackio"].ended == 1
    assert not config.out.exists()


def test_a_tracker_leaves_the_number_of_threads_as_it_was(
    config: TrainConfig, packages: dict[str, Package], monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerate chooses one on the CPU with several ranks, if no variable does."""
    before = torch.get_num_threads()
    monkeypatch.setattr(accelerate, "PartialState", lambda: (PartialState(), torch.set_num_threads(before + 1)))
    trained(replace(config, report_to=("wandb",)))
    assert packages["wandb"].ended == 1
    assert torch.get_num_threads() == before


def test_a_tracker_that_fails_later_is_left_out_and_named(
    config: TrainConfig, packages: dict[str, Package], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("the network is gone")

    monkeypatch.setattr(packages["wandb"], "log", fail)
    _, said = trained(replace(config, report_to=("wandb", "trackio")))
    assert said.count("--report-to wandb fails: OSError: the network is gone. The run continues without it") == 1
    assert [*packages["trackio"].seen["train/loss"]] == [1, 2, 3]


def test_steps_that_run_again_replace_those_that_tensorboard_has(
    config: TrainConfig, packages: dict[str, Package]
) -> None:
    config = replace(config, report_to=("tensorboard",), checkpoint_every=2, steps=2)
    trained(config)
    trained(replace(config, steps=3, resume=True))
    assert [purged for _, purged in packages["tensorboard"].begun] == [1, 3]


@pytest.mark.parametrize("missing", [*MODULES, "accelerate"])
def test_a_package_that_is_missing_is_named_before_anything_is_written(
    missing: str, config: TrainConfig, packages: dict[str, Package], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    name = "wandb" if missing == "accelerate" else missing
    with pytest.raises(ConfigError, match=f"--report-to {name} needs accelerate and {name}: pip install 'pagoda-train"):
        trained(replace(config, report_to=(name,)))
    for unknown in (("tensorbord",), "wandb"):
        with pytest.raises(ConfigError, match=r"report_to is .*; it must be some of \('aim', "):
            replace(config, report_to=unknown)
    assert not config.out.exists()
