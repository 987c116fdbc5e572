"""Runs of `pagoda train` on a tiny model, for tests."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from pagoda.checkpoint.reader import BUFFERS, Checkpoint
from pagoda.config.memory import Memory
from pagoda.models.shapes import SHAPES
from pagoda.train import OptimConfig, TrainConfig
from pagoda.train.run_dir import RunDir

from .conftest import RankServer

TINY = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "tie_word_embeddings": True,
}
SMALLER = {
    "mixtral": {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4},
    "qwen3_moe": {"hidden_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 4},
    "switch_transformers": {"d_model": 64, "d_kv": 16, "d_ff": 224, "num_heads": 4, "expert_capacity": 3},
}
"""What is other than in built-in mixtures of experts, by family."""
STEPS = 6


def tiny_config(tmp_path: Path) -> TrainConfig:
    """A run of `STEPS` steps of a tiny model in RAM, with a checkpoint every second one."""
    (tmp_path / "model").mkdir()
    (tmp_path / "ssd").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "text").write_text("a text that is long enough for some sequences. " * 20)
    return TrainConfig(
        model=str(tmp_path / "model"),
        data=str(tmp_path / "text"),
        steps=STEPS,
        batch_size=2,
        seq_len=16,
        precision="fp32",
        memory=Memory(host="64MiB", unit_limit="16KiB", page_size="4KiB"),
        checkpoint_every=2,
        optim=OptimConfig(schedule="constant"),
        out=tmp_path / "run",
    )


def tiny_mixture(name: str, directory: Path, layers: int = 2) -> str:
    """A directory that has the configuration of a built-in mixture of experts, made smaller."""
    directory.mkdir(parents=True, exist_ok=True)
    shape = SHAPES[name]
    config = {"model_type": shape.family, **shape.settings, **SMALLER[shape.family]}
    counts = {"num_hidden_layers": layers, "num_layers": layers, "num_decoder_layers": layers}
    counts |= {"num_sparse_encoder_layers": layers // 2, "num_sparse_decoder_layers": layers // 2}
    config |= {name: count for name, count in counts.items() if name in config}
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def started(ranks: RankServer, count: int, out: Path, config: TrainConfig, **settings: Any) -> list[int | None]:
    """Run it on some ranks; how each ended, as `RankServer.ask`."""
    out.mkdir(parents=True, exist_ok=True)
    settings["arguments"] = {"config": json.loads(json.dumps(asdict(config), default=str))}
    status = ranks.ask("train_run", count, out, **settings)
    assert None not in status, "a rank hangs"
    return status


def states_of(config: TrainConfig) -> dict[tuple[str, str], torch.Tensor]:
    """Everything that the last checkpoint of a run holds."""
    last = RunDir(config.out).latest()
    assert last.step == config.steps
    with Checkpoint(last.path) as checkpoint:
        return {
            (state, name): checkpoint.tensor(state, name).whole().reshape(-1)
            for state in (*checkpoint.states, BUFFERS)
            for name in checkpoint.specs(state)
        }


def assert_same(first: TrainConfig, second: TrainConfig) -> None:
    """Both runs ended with the same bits."""
    mine, others = states_of(first), states_of(second)
    assert mine.keys() == others.keys()
    for key, values in mine.items():
        assert torch.equal(values, others[key]), key
