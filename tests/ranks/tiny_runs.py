"""Runs of `pagoda train` on a tiny model, for tests."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zoo import assert_equal

from pagoda.checkpoint.reader import BUFFERS, SavedCheckpoint
from pagoda.config.memory import Memory
from pagoda.train import TrainConfig
from pagoda.train.run_dir import RunDir
from tests.tiny import tiny_run, write_model

from .ranks import RankServer

STEPS = 6


def tiny_config(tmp_path: Path) -> TrainConfig:
    """A run of `STEPS` steps of a tiny model in RAM, with a checkpoint every second one."""
    (tmp_path / "ssd").mkdir()
    return tiny_run(
        tmp_path,
        model=write_model(tmp_path / "model", hidden_size=32, intermediate_size=64, num_hidden_layers=3),
        max_steps=STEPS,
        precision="fp32",
        memory=Memory(host="64MiB", unit_limit="16KiB", page_size="4KiB"),
        save_steps=2,
        lr_scheduler_type="constant",
    )


def started(ranks: RankServer, count: int, out: Path, config: TrainConfig, **settings: Any) -> list[int | None]:
    """Run it on some ranks; how each ended, as `RankServer.ask`."""
    settings["arguments"] = {"config": json.loads(json.dumps(asdict(config), default=str))}
    status = ranks.ask("train_run", count, out, **settings)
    assert None not in status, "a rank hangs"
    return status


def states_of(config: TrainConfig) -> dict[str, Any]:
    """Everything that the last checkpoint of a run holds."""
    last = RunDir(config.output_dir).latest()
    assert last.step == config.max_steps
    with SavedCheckpoint(last.state) as checkpoint:
        return {
            f"{state} of {name}": checkpoint.tensors[state][name].whole().reshape(-1)
            for state in (*checkpoint.states, BUFFERS)
            for name in checkpoint.specs(state)
        }


def assert_same(first: TrainConfig, second: TrainConfig) -> None:
    """Both runs ended with the same bits."""
    assert_equal(states_of(first), states_of(second))
