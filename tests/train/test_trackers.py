"""Metrics go to the trackers that are asked for: those of transformers, here on stand-ins for their callbacks."""

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from transformers import TrainerCallback
from transformers.integrations import integration_utils

from pagoda.errors import ConfigError
from pagoda.train import TrainConfig, early
from pagoda.train.metrics import read_metrics
from pagoda.train.trainer import RunTrainer
from tests.tiny import tiny_run, trained


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    return tiny_run(tmp_path, max_steps=3, eval_share=0.2, max_eval_samples=4, eval_steps=2, plan="usual")


class Package(TrainerCallback):
    """As the callbacks of wandb and trackio."""

    made: ClassVar[list["Package"]] = []

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.seen: dict[str, dict[int, float]] = {}
        self.ended = 0
        self.made.append(self)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.begun.append(args.run_name)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        for name, value in logs.items():
            self.seen.setdefault(name, {})[state.global_step] = value

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.ended += 1


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Package]:
    """The callbacks that runs have made. Their packages are as if they were installed."""
    monkeypatch.setattr(Package, "made", [])
    monkeypatch.setattr(early, "check_installed", lambda *_: None)
    for name in ("wandb", "trackio"):
        monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, name, Package)
    return Package.made


def test_every_step_and_evaluation_are_logged(config: TrainConfig, made: list[Package]) -> None:
    before = torch.get_num_threads()
    trained(replace(config, report_to=("wandb", "trackio")))
    assert torch.get_num_threads() == before
    for package in made:
        assert (package.begun, package.ended) == (["run"], 1)
        for file, figure in (("metrics.jsonl", "loss"), ("evals.jsonl", "eval_loss")):
            assert package.seen[figure] == {
                line["step"]: line["loss"] for line in read_metrics(config.output_dir / file)
            }
        assert package.seen.keys() >= {"grad_norm", "stall_share_update", "peak_bytes_host", "eval_perplexity"}
    assert len(made) == 2


def test_a_wrong_key_ends_a_run_before_its_first_step(
    config: TrainConfig, made: list[Package], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("the key is not one of wandb")

    monkeypatch.setattr(Package, "on_train_begin", refuse)
    monkeypatch.setattr(RunTrainer, "training_step", lambda *_: pytest.fail("no step begins"))
    with pytest.raises(ConfigError, match="--report-to wandb cannot be started: ValueError: the key is not one of"):
        trained(replace(config, report_to=("wandb",)))
    assert not config.output_dir.exists()


def test_a_tracker_that_fails_later_is_left_out_and_named(
    config: TrainConfig, made: list[Package], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(Package):
        def on_log(self, *_: object, **__: object) -> None:
            raise OSError("the network is gone")

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "wandb", Failing)
    _, said = trained(replace(config, report_to=("wandb", "trackio")))
    assert said.count("--report-to wandb fails: OSError: the network is gone. The run continues without it") == 1
    assert [*made[1].seen["loss"]] == [1, 2, 3]


def test_tensorboard_is_told_which_steps_run_again_and_writes_nothing_for_a_run_that_fails(
    config: TrainConfig, made: list[Package], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[str, int]] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int) -> None:
            begun.append((folder, purge_step))
            Path(folder).mkdir(parents=True)

    module: Any = ModuleType("tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "tensorboard", Package)
    config = replace(config, report_to=("tensorboard",), save_steps=2, max_steps=2)
    with monkeypatch.context() as patched:
        patched.setattr(RunTrainer, "training_step", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            trained(config)
    assert not config.output_dir.exists()
    trained(config)
    (config.output_dir / "tensorboard").rmdir()
    trained(replace(config, max_steps=3, resume_from_checkpoint="last"))
    assert begun == [(str(config.output_dir / "tensorboard"), step) for step in (1, 1, 3)]


@pytest.mark.parametrize("missing", ["wandb", "trackio"])
def test_a_package_that_is_missing_is_named_before_anything_is_written(missing: str, config: TrainConfig) -> None:
    with pytest.raises(ConfigError, match=f"--report-to {missing} needs {missing}: pip install {missing}"):
        trained(replace(config, report_to=(missing,)))
    for unknown in (("tensorbord",), "wandb"):
        with pytest.raises(ConfigError, match=r"report_to is .*; it must be some of \('azure_ml', "):
            replace(config, report_to=unknown)
    assert not config.output_dir.exists()
