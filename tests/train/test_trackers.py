"""Metrics go to the trackers that are asked for: those of transformers, here on stand-ins for their callbacks."""

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import TrainerCallback
from transformers.integrations import integration_utils

from pagoda.errors import ConfigError
from pagoda.train import TrainConfig, assembly
from pagoda.train.metrics import read_metrics
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
    monkeypatch.setattr(assembly, "check_installed", lambda *_: None)
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


@pytest.mark.parametrize("missing", ["wandb", "trackio"])
def test_a_package_that_is_missing_is_named_before_anything_is_written(missing: str, config: TrainConfig) -> None:
    with pytest.raises(ConfigError, match=f"--report-to {missing} needs {missing}: pip install {missing}"):
        trained(replace(config, report_to=(missing,)))
    with pytest.raises(ConfigError, match=r"--report-to tensorbord .*Did you mean 'tensorboard'\? It has azure_ml, "):
        trained(replace(config, report_to=("tensorbord",)))
    assert not config.output_dir.exists()
