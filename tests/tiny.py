"""Runs of models that train in milliseconds, which are directories with a `config.json`, on a text."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM

from pagoda.cli.main import main
from pagoda.config.memory import Memory
from pagoda.models.shapes import SHAPES
from pagoda.train import TrainConfig, TrainResult, run
from pagoda.train.data import Batches

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
SMALLER = {
    "mixtral": {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4},
    "qwen3_moe": {"hidden_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 4},
    "switch_transformers": {"d_model": 64, "d_kv": 16, "d_ff": 224, "num_heads": 4, "expert_capacity": 3},
}
"""What is other than in built-in mixtures of experts, by family."""


def write_text(path: Path) -> str:
    """Write a text that has a few dozen sequences; returns what `--data` takes."""
    path.write_text("a text that is long enough for some sequences. " * 40)
    return str(path)


def write_model(directory: Path, **changes: object) -> str:
    """Write `LLAMA`, with these changes, into a directory, made if need be; returns what `--model` takes."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return str(directory)


def write_weights(directory: Path, **changes: object) -> Path:
    """Write `LLAMA`, with these changes and random weights; returns the directory."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(write_model(directory, **changes))).save_pretrained(
        directory
    )
    return directory


def tiny_run(folder: Path, **settings: Any) -> TrainConfig:
    """A run of four steps in RAM, of a model and a text in the same folder; `settings` are others."""
    usual = {"data": write_text(folder / "text"), "output_dir": folder / "run", "memory": Memory(host="64MiB")}
    usual |= {"max_steps": 4, "per_device_train_batch_size": 2, "max_length": 16}
    usual |= {"eval_share": 0.0, "precision": "bf16"}
    if "model" not in settings:
        usual["model"] = write_model(folder / "model", hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    return TrainConfig(**{**usual, **settings})


def command(words: str) -> int:
    """The exit code of `pagoda`, called as a user types it."""
    return main(words.split())


def trained(config: TrainConfig) -> tuple[TrainResult | None, str]:
    """What a run did, and what it said."""
    shown = io.StringIO()
    result = run(config, Console(file=shown, width=200))
    return result, shown.getvalue()


def at_the_first_batch(action: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Does something in the first step of the next run."""
    from pagoda.train.trainer import RunTrainer

    begin = RunTrainer.get_batch_samples

    def acting(*args: Any) -> Any:
        monkeypatch.setattr(RunTrainer, "get_batch_samples", begin)
        found = begin(*args)
        action()
        return found

    monkeypatch.setattr(RunTrainer, "get_batch_samples", acting)


def before_step(number: int, action: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Does something when a step begins, counted from 1, and no checkpoint is being written."""
    from pagoda.train.trainer import RunTrainer

    begin = RunTrainer.get_batch_samples

    def acting(trainer: RunTrainer, *args: Any) -> Any:
        found = begin(trainer, *args)
        if trainer.state.global_step == number - 1:
            trainer.passes.optimizer.wait_for_checkpoint()
            action()
        return found

    monkeypatch.setattr(RunTrainer, "get_batch_samples", acting)


def with_metrics(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Gives all steps other metrics."""
    from pagoda.train.callbacks import RunCallback

    measured = RunCallback.measured
    monkeypatch.setattr(RunCallback, "measured", lambda *args: {**measured(*args), **changes})


def batch_of(batches: Batches, step: int, index: int = 0) -> dict[str, torch.Tensor]:
    """What forward pass `index` of a step (both from 0) reads."""
    return batches.of_rows(batches.row_indices(step, index))


def write_mixture(name: str, directory: Path, layers: int = 2) -> str:
    """Write the configuration of a built-in mixture of experts, made smaller; returns what `--model` takes."""
    directory.mkdir(parents=True, exist_ok=True)
    shape = SHAPES[name]
    config = {"model_type": shape.family, **shape.settings, **SMALLER[shape.family]}
    counts = {"num_hidden_layers": layers, "num_layers": layers, "num_decoder_layers": layers}
    counts |= {"num_sparse_encoder_layers": layers // 2, "num_sparse_decoder_layers": layers // 2}
    config |= {name: count for name, count in counts.items() if name in config}
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)
