"""Ranks are killed by SIGKILL at random instants; whatever was killed when, a run ends with the bits of one left alone,
and nobody waits for ever.

The quick test forks ranks that have imported everything. The slow ones are `torchrun --max-restarts`, which starts each
attempt anew: `pytest -m slow tests/parallel/test_chaos.py -s` prints who was killed when.
"""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from pagoda.train import TrainConfig
from pagoda.train.metrics import read_metrics
from pagoda.train.run_dir import RunDir

from .conftest import ROOT, RankServer
from .tiny_runs import assert_same, started, tiny_config

LONG = 40
KILLS_OF_A_RUN = 5
RUNS = 5
"""Of each kind; so 50 kills in all."""
HANG_S = 240


def config_of(kind: str, tmp_path: Path, steps: int) -> TrainConfig:
    """State in RAM, or all of it on SSD; a checkpoint after every step or two."""
    config = tiny_config(tmp_path)
    if kind == "ssd":
        memory = replace(config.memory, host="700KiB", ssd=f"{tmp_path / 'ssd'}:64MiB")
        config = replace(config, memory=memory)
    return replace(config, steps=steps, checkpoint_every=1 if steps < LONG else 2)


def steps_done(config: TrainConfig) -> list[int]:
    """Steps in the metrics of a run, in order."""
    return [line["step"] for line in read_metrics(RunDir(config.out).metrics)]


@pytest.mark.parametrize("kind", [pytest.param("ram", marks=pytest.mark.slow), "ssd"])
def test_a_run_whose_ranks_are_killed_ends_with_the_bits_of_one_that_was_not(
    kind: str, ranks: RankServer, tmp_path: Path
) -> None:
    generator = random.Random(kind)
    config = config_of(kind, tmp_path, steps=8)
    whole = replace(config, out=tmp_path / "whole")
    started_s = time.monotonic()
    assert started(ranks, 2, tmp_path / "a", whole) == [0, 0]
    usual_s = time.monotonic() - started_s
    killed = 0
    for attempt in range(20):
        kill = {} if killed == 2 else {str(generator.randrange(2)): generator.uniform(0.2, 0.9) * usual_s}
        environment = {"TORCHELASTIC_RESTART_COUNT": str(attempt)}
        status = started(ranks, 2, tmp_path / "out", config, kill_after=kill, environment=environment)
        if status == [0, 0]:
            break
        assert -signal.SIGKILL in status
        killed += 1
    assert killed
    assert_same(whole, config)
    assert steps_done(config) == list(range(1, config.steps + 1))


class Killer(threading.Thread):
    """Kills random workers of a torchrun: some while they start, most a little after a random one of their steps."""

    def __init__(self, torchrun: int, config: TrainConfig, generator: random.Random, kills: int) -> None:
        super().__init__(daemon=True)
        self._torchrun = torchrun
        self._config = config
        self._generator = generator
        self._kills = kills
        self.killed: list[str] = []
        """Of each kill, who and when."""

    def run(self) -> None:
        """Until enough were killed, or torchrun has ended."""
        seen: set[int] = set()
        while len(self.killed) < self._kills and Path(f"/proc/{self._torchrun}").exists():
            workers = [worker for worker in self._workers() if worker not in seen]
            if len(workers) < 2:
                time.sleep(0.02)
                continue
            seen.update(workers)
            before = self._step()
            if self._generator.random() < 0.3:
                time.sleep(self._generator.uniform(0.0, 5.0))
            else:
                self._wait_for(before + self._generator.randrange(1, 6), workers)
                time.sleep(self._generator.uniform(0.0, 0.1))
            rank = self._generator.randrange(2)
            try:
                os.kill(workers[rank], signal.SIGKILL)
            except ProcessLookupError:
                continue
            self.killed.append(f"process {rank} after step {self._step()}")

    def _workers(self) -> list[int]:
        try:
            tasks = Path(f"/proc/{self._torchrun}/task").iterdir()
            return [int(child) for task in tasks for child in (task / "children").read_text().split()]
        except OSError:
            return []

    def _step(self) -> int:
        metrics = RunDir(self._config.out).metrics
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def _wait_for(self, step: int, workers: list[int]) -> None:
        while self._step() < step and set(workers) <= set(self._workers()):
            time.sleep(0.005)


@contextmanager
def torchrun(config: TrainConfig) -> Iterator["subprocess.Popen[bytes]"]:
    """`torchrun --max-restarts` of `pagoda train` on two processes; killed with its workers if it still runs."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=99"]
    command += ["-m", "pagoda", "train", "--model", config.model, "--data", config.data, "--steps", str(config.steps)]
    command += ["--batch-size", str(config.batch_size), "--seq-len", str(config.seq_len), "--precision", "fp32"]
    command += ["--checkpoint-every", str(config.checkpoint_every), "--optim.schedule", "constant"]
    memory = {"host": config.memory.host, "unit-limit": config.memory.unit_limit, "ssd": config.memory.ssd}
    memory["page-size"] = config.memory.page_size
    command += [part for name, value in memory.items() if value for part in (f"--memory.{name}", value)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment |= {"PAGODA_RANK_TIMEOUT": "60", "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(
        [*command, "--out", str(config.out)], env=environment, cwd=ROOT, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(RUNS))
@pytest.mark.parametrize("kind", ["ram", "ssd"])
def test_torchrun_restarts_a_run_whose_ranks_are_killed_until_it_ends_with_the_same_bits(
    kind: str, number: int, ranks: RankServer, tmp_path: Path
) -> None:
    config = config_of(kind, tmp_path, steps=LONG)
    whole = replace(config, out=tmp_path / "whole")
    assert started(ranks, 2, tmp_path / "a", whole) == [0, 0]
    with torchrun(config) as process:
        killer = Killer(process.pid, config, random.Random(f"{kind} {number}"), KILLS_OF_A_RUN)
        killer.start()
        assert process.wait(HANG_S) == 0, killer.killed
        killer.join()
    print(f"\n{kind} {number}: {len(killer.killed)} kills: {'; '.join(killer.killed)}")
    assert len(killer.killed) == KILLS_OF_A_RUN
    assert_same(whole, config)
    assert steps_done(config) == list(range(1, config.steps + 1))
