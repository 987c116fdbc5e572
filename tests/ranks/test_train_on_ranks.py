"""`pagoda train` on several ranks: the batch of one rank with as many sequences, one set of metrics, restarts."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from files import flip

from pagoda.checkpoint.reader import SavedCheckpoint
from pagoda.simulate.hardware import write_hardware
from pagoda.train import TrainConfig
from pagoda.train.data import Batches, Rows
from pagoda.train.metrics import read_metrics
from pagoda.train.run_dir import LOCK, RunDir, locked
from pagoda.train.tokens import open_tokens
from tests.forecast.machines import SMALL, figure
from tests.tiny import batch_of

from .ranks import RankServer
from .tiny_runs import STEPS, assert_same, started, tiny_config


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    return tiny_config(tmp_path)


def test_ranks_read_the_batch_that_one_rank_would(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("0123456789abcdef" * 50)
    rows = Rows.of(open_tokens(str(tmp_path / "text")), 4)
    shape = {"rows": rows, "gradient_accumulation_steps": 2, "seed": 3}
    whole = Batches(batch_size=6, **shape)
    by_rank = [Batches(batch_size=2, rank=rank, ranks=3, **shape) for rank in range(3)]
    assert all(one.tokens_per_step == whole.tokens_per_step for one in by_rank)
    for step in range(4):
        for index in range(2):
            ids = torch.cat([batch_of(one, step, index)["input_ids"] for one in by_rank])
            assert torch.equal(ids, batch_of(whole, step, index)["input_ids"])


def test_other_ranks_go_on_behind_the_samples_that_were_read(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("0123456789abcdef" * 50)
    rows = Rows.of(open_tokens(str(tmp_path / "text")), 4)
    before = Batches(rows=rows, batch_size=2, ranks=3)
    after = Batches(rows=rows, batch_size=2, first_step=5, first_sample=before.samples_before(5))
    alone = Batches(rows=rows, batch_size=2)
    assert torch.equal(batch_of(after, 5)["input_ids"], batch_of(alone, 15)["input_ids"])
    assert torch.equal(batch_of(after, 6)["input_ids"], batch_of(alone, 16)["input_ids"])


def test_two_ranks_are_one_that_accumulates(ranks: RankServer, whole: TrainConfig, tmp_path: Path) -> None:
    alone = replace(whole, output_dir=tmp_path / "alone", gradient_accumulation_steps=2)
    assert started(ranks, 1, tmp_path / "one", alone) == [0]
    assert_same(alone, whole)
    mine, rank_group = read_metrics(RunDir(alone.output_dir).metrics), read_metrics(RunDir(whole.output_dir).metrics)
    for step, (one, two) in enumerate(zip(mine, rank_group, strict=True)):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-6)
        assert two["bytes_moved"]["collective"] > 0
        assert two["step"] == step + 1


def test_ranks_that_divide_sequences_train_as_one_rank_does(
    ranks: RankServer, config: TrainConfig, tmp_path: Path
) -> None:
    """Only sums have another order. One rank goes on from their checkpoint."""
    config = replace(config, eval_share=0.2, max_eval_samples=6, eval_steps=2, output_dir=tmp_path / "one")
    divided = replace(config, sequence_parallel=2, max_steps=STEPS - 2, output_dir=tmp_path / "two")
    assert started(ranks, 1, tmp_path / "a", config) == [0]
    assert started(ranks, 2, tmp_path / "b", divided) == [0, 0]
    resumed = replace(divided, sequence_parallel=1, max_steps=STEPS, resume_from_checkpoint="last")
    assert started(ranks, 1, tmp_path / "c", resumed) == [0]
    for kind in ("metrics", "evals"):
        one, two = (read_metrics(getattr(RunDir(each.output_dir), kind)) for each in (config, resumed))
        assert [line["loss"] for line in two] == pytest.approx([line["loss"] for line in one], rel=1e-5)
    assert [line["tokens"] for line in two] == [line["tokens"] for line in one]


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("adafactor", marks=pytest.mark.slow)])
def test_tensor_parallel_ranks_train_as_one_rank_does(
    ranks: RankServer, config: TrainConfig, tmp_path: Path, optimizer: str
) -> None:
    """They get the same batches, and only sums have another order. One rank goes on from their checkpoint."""
    lr = {"adamw": 1e-3, "adafactor": 1e-2}[optimizer]
    config = replace(config, optim=optimizer, learning_rate=lr, output_dir=tmp_path / "one")
    config = replace(config, eval_share=0.2, max_eval_samples=6, eval_steps=2)
    divided = replace(config, tensor_parallel=2, max_steps=STEPS - 2, output_dir=tmp_path / "two")
    assert started(ranks, 1, tmp_path / "a", config) == [0]
    assert started(ranks, 2, tmp_path / "b", divided) == [0, 0]
    with SavedCheckpoint(RunDir(divided.output_dir).latest().state) as checkpoint:
        parts = checkpoint.parts("model.layers.0.mlp.up_proj.weight")
    assert len(parts) == (2 if optimizer == "adamw" else 1)
    goes_on = replace(config, output_dir=divided.output_dir, resume_from_checkpoint="last")
    assert started(ranks, 1, tmp_path / "c", goes_on) == [0]
    for name in ("metrics", "evals"):
        alone, together = (read_metrics(getattr(RunDir(run.output_dir), name)) for run in (config, divided))
        assert [line["loss"] for line in together] == pytest.approx([line["loss"] for line in alone], rel=1e-4)
        assert all(one.get("tokens") == two.get("tokens") for one, two in zip(alone, together, strict=True))


def test_a_model_that_cannot_be_divided_is_refused(ranks: RankServer, config: TrainConfig, tmp_path: Path) -> None:
    unknown = replace(config, model="gpt-2x64", tensor_parallel=2)
    assert started(ranks, 2, tmp_path / "a", unknown) == [1, 1]
    assert "nothing says how the layers of 'gpt-2x64' are divided" in (tmp_path / "a" / "error-0.txt").read_text()


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_ranks_take_the_plan_that_the_first_finds(
    ranks: RankServer, config: TrainConfig, tmp_path: Path, replicas: int
) -> None:
    memory = replace(config.memory, host="800KiB", ssd=f"{tmp_path / 'ssd'}:64MiB", unit_limit=None)
    usual = replace(config, memory=memory, replicas=replicas, output_dir=tmp_path / "usual")
    searching = replace(usual, plan="search", output_dir=tmp_path / "search")
    cache = tmp_path / "cache" / "pagoda"
    environment = {"XDG_CACHE_HOME": str(cache.parent)}
    write_hardware(SMALL, cache / "hardware.json")
    assert started(ranks, 2, tmp_path / "refused", searching, environment=environment) == [1, 1]
    for rank in range(2):
        assert "-m pagoda calibrate" in (tmp_path / "refused" / f"error-{rank}.txt").read_text()
    write_hardware(replace(SMALL, gpus_per_node=2, intra_node_bytes_per_s=figure(1e9)), cache / "hardware.json")
    assert started(ranks, 2, tmp_path / "a", usual) == [0, 0]
    assert started(ranks, 2, tmp_path / "b", searching, environment=environment) == [0, 0]
    assert_same(usual, searching)
    for searched, out in ((False, "a"), (True, "b")):
        first, second = (torch.load(tmp_path / out / f"rank-{rank}.pt") for rank in range(2))
        assert ("chosen by a search" in first["shown"]) == searched
        assert first["options"] == second["options"]


def test_ranks_refuse_a_damaged_checkpoint_together_and_go_back_to_another(
    ranks: RankServer, whole: TrainConfig, tmp_path: Path
) -> None:
    config = replace(whole, output_dir=tmp_path / "run")
    shutil.copytree(whole.output_dir, config.output_dir)
    last = RunDir(config.output_dir).checkpoint(STEPS)
    flip(last / "pagoda" / "exp_avg_sq.safetensors")
    assert started(ranks, 2, tmp_path / "c", replace(config, resume_from_checkpoint="last")) == [1, 1]
    for rank in range(2):
        assert f"{last.name} cannot be used" in (tmp_path / "c" / f"error-{rank}.txt").read_text()
    other = replace(config, resume_from_checkpoint=f"checkpoint-{STEPS - 2}")
    assert started(ranks, 2, tmp_path / "d", other) == [0, 0]
    first, second = (torch.load(tmp_path / "d" / f"rank-{rank}.pt") for rank in range(2))
    assert first["steps"] == second["steps"] == (STEPS - 1, STEPS)
    assert second["shown"] == ""
    assert_same(whole, config)
    assert last.with_name(f"{last.name}.later").is_dir()


def test_a_directory_in_use_is_refused_on_every_rank(ranks: RankServer, config: TrainConfig, tmp_path: Path) -> None:
    with locked(config.output_dir):
        assert started(ranks, 2, tmp_path / "a", config) == [1, 1]
        for rank in range(2):
            assert "is in use by another run" in (tmp_path / "a" / f"error-{rank}.txt").read_text()
        assert [path.name for path in config.output_dir.iterdir()] == [LOCK]


def test_one_rank_goes_on_with_the_steps_of_two_or_says_that_they_are_shorter(
    ranks: RankServer, whole: TrainConfig, tmp_path: Path
) -> None:
    for passes, said in (
        (1, "A step has 2 sequences now, and had 4"),
        (2, ""),
    ):
        folder = tmp_path / str(passes)
        config = replace(
            whole,
            output_dir=folder / "run",
            resume_from_checkpoint="last",
            max_steps=STEPS + 1,
            gradient_accumulation_steps=passes,
        )
        shutil.copytree(whole.output_dir, config.output_dir)
        assert started(ranks, 1, folder, config) == [0]
        shown = torch.load(folder / "rank-0.pt")["shown"]
        assert ("A step has" in shown) == bool(said)
        assert said in shown
