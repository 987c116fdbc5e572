"""`pagoda train` on several ranks: the batch of one rank with as many sequences, one set of metrics, restarts."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pagoda.checkpoint.reader import BUFFERS, Checkpoint
from pagoda.train import MemoryConfig, OptimConfig, TrainConfig
from pagoda.train.data import Batches, ByteText
from pagoda.train.metrics import read_metrics
from pagoda.train.run_dir import RunDir

from .conftest import ROOT, RankServer

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
STEPS = 6


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
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
        memory=MemoryConfig(host="64MiB", unit_limit="16KiB", page_size="4KiB"),
        checkpoint_every=2,
        optim=OptimConfig(schedule="constant"),
        out=tmp_path / "run",
    )


def started(ranks: RankServer, count: int, out: Path, config: TrainConfig, **settings: Any) -> list[int | None]:
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
            (state, name): checkpoint.read(state, name, 0, spec.nbytes // spec.dtype.itemsize)
            for state in (*checkpoint.states, BUFFERS)
            for name, spec in checkpoint.specs(state).items()
        }


def assert_same(first: TrainConfig, second: TrainConfig) -> None:
    mine, others = states_of(first), states_of(second)
    assert mine.keys() == others.keys()
    for key, values in mine.items():
        assert torch.equal(values, others[key]), key


def test_ranks_read_the_batch_that_one_rank_would(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("0123456789abcdef" * 50)
    text = ByteText.open(str(tmp_path / "text"))
    shape = {"text": text, "seq_len": 4, "accumulation_steps": 2, "seed": 3}
    whole = Batches(batch_size=6, **shape)
    by_rank = [Batches(batch_size=2, rank=rank, ranks=3, **shape) for rank in range(3)]
    assert all(one.tokens_per_step == whole.tokens_per_step for one in by_rank)
    for step in range(4):
        for index in range(2):
            ids = torch.cat([one.batch(step, index)[0] for one in by_rank])
            assert torch.equal(ids, whole.batch(step, index)[0])


def test_other_ranks_go_on_behind_the_samples_that_were_read(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("0123456789abcdef" * 50)
    text = ByteText.open(str(tmp_path / "text"))
    before = Batches(text=text, batch_size=2, seq_len=4, ranks=3)
    after = Batches(text=text, batch_size=2, seq_len=4, first_step=5, first_sample=before.samples_before(5))
    alone = Batches(text=text, batch_size=2, seq_len=4)
    assert torch.equal(after.batch(5)[0], alone.batch(15)[0])
    assert torch.equal(after.batch(6)[0], alone.batch(16)[0])


def test_two_ranks_are_one_that_accumulates(ranks: RankServer, config: TrainConfig, tmp_path: Path) -> None:
    alone = replace(config, out=tmp_path / "alone", accumulation_steps=2)
    assert started(ranks, 1, tmp_path / "one", alone) == [0]
    assert started(ranks, 2, tmp_path / "two", config) == [0, 0]
    assert_same(alone, config)
    mine, together = read_metrics(RunDir(alone.out).metrics), read_metrics(RunDir(config.out).metrics)
    own = [read_metrics(RunDir(config.out).metrics_of(rank)) for rank in range(2)]
    for step, (one, two, first, second) in enumerate(zip(mine, together, *own, strict=True)):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-6)
        assert two["loss"] == pytest.approx((first["loss"] + second["loss"]) / 2, rel=1e-12)
        assert first["loss"] != second["loss"]
        assert two["bytes_moved"]["collective"] > 0
        assert two["step"] == step + 1


def test_a_run_that_was_killed_and_restarted_ends_with_the_same_bits(
    ranks: RankServer, config: TrainConfig, tmp_path: Path
) -> None:
    whole = replace(config, out=tmp_path / "whole")
    assert started(ranks, 2, tmp_path / "a", whole) == [0, 0]
    assert started(ranks, 2, tmp_path / "b", replace(config, steps=4)) == [0, 0]
    again = {"environment": {"TORCHELASTIC_RESTART_COUNT": "1"}}
    assert started(ranks, 2, tmp_path / "c", config, **again) == [0, 0]
    assert_same(whole, config)
    lines = read_metrics(RunDir(config.out).metrics)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ram", "ssd"])
def test_runs_whose_ranks_are_killed_at_random_end_with_the_bits_of_one_that_was_not(
    kind: str, ranks: RankServer, config: TrainConfig, tmp_path: Path
) -> None:
    generator = random.Random(kind)
    if kind == "ssd":
        memory = replace(config.memory, host="700KiB", ssd=f"{tmp_path / 'ssd'}:64MiB")
        config = replace(config, memory=memory)
    config = replace(config, steps=12, checkpoint_every=1)
    whole = replace(config, out=tmp_path / "whole")
    assert started(ranks, 2, tmp_path / "a", whole) == [0, 0]
    killed = runs = 0
    while killed < 25:
        runs += 1
        config = replace(config, out=tmp_path / f"run-{runs}")
        for attempt in range(100):
            victim, after = generator.randrange(2), generator.uniform(0.1, 3.0)
            status = started(
                ranks,
                2,
                tmp_path / "out",
                config,
                kill_after={str(victim): after},
                environment={"TORCHELASTIC_RESTART_COUNT": str(attempt)},
            )
            if status == [0, 0]:
                break
            assert -signal.SIGKILL in status
            killed += 1
        assert_same(whole, config)


@pytest.mark.slow
def test_torchrun_restarts_a_run_whose_rank_was_killed(config: TrainConfig, tmp_path: Path, ranks: RankServer) -> None:
    whole = replace(config, out=tmp_path / "whole", steps=40, checkpoint_every=5)
    config = replace(config, steps=40, checkpoint_every=5)
    assert started(ranks, 2, tmp_path / "a", whole) == [0, 0]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    command += ["-m", "pagoda", "train", "--model", config.model, "--data", config.data, "--steps", "40"]
    command += ["--batch-size", "2", "--seq-len", "16", "--precision", "fp32", "--checkpoint-every", "5"]
    command += ["--memory.host", "64MiB", "--memory.unit-limit", "16KiB", "--memory.page-size", "4KiB"]
    command += ["--optim.schedule", "constant"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([*command, "--out", str(config.out)], env=environment, cwd=ROOT) as torchrun:
        deadline = time.monotonic() + 120
        while not RunDir(config.out).all_checkpoints() and time.monotonic() < deadline:
            time.sleep(0.05)
        workers = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
        os.kill(int(workers[-1]), signal.SIGKILL)
        assert torchrun.wait(120) == 0
    assert_same(whole, config)
    assert [line["step"] for line in read_metrics(RunDir(config.out).metrics)] == list(range(1, 41))
