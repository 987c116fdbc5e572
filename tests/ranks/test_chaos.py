"""Ranks are killed by SIGKILL at random instants; whatever was killed when, a run ends with the bits of one left alone,
and nobody waits for ever.

Ranks are those of torchrun's agent, which starts all of them anew when one dies: forked from a process that has
imported everything, or as the command line does. `pytest -m slow tests/ranks/test_chaos.py -s` prints who was
killed when.
"""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from forked import end_with_parent

from pagoda.ranks.transport import lives
from pagoda.train import TrainConfig
from pagoda.train.metrics import read_metrics
from pagoda.train.run_dir import RunDir

from .ranks import ROOT, RankServer
from .tiny_runs import assert_same, started, tiny_config

pytestmark = pytest.mark.slow
STEPS = 40
KILLS_OF_A_RUN = 5
RUNS = 5
"""Of each kind; so 50 kills in all."""
RESTARTS = 99
HANG_S = 240


def config_of(kind: str, tmp_path: Path) -> TrainConfig:
    """State in RAM, or all of it on SSD; a checkpoint after every second step."""
    config = replace(tiny_config(tmp_path), max_steps=STEPS)
    if kind == "ram":
        return config
    return replace(config, memory=replace(config.memory, host="700KiB", ssd=f"{tmp_path / 'ssd'}:64MiB"))


class Killer(threading.Thread):
    """Kills random ranks of an agent: some while they start, most a little after a random one of their steps."""

    def __init__(
        self, agent: Callable[[], int], config: TrainConfig, generator: random.Random, kills: int, start_s: float
    ) -> None:
        """`agent` waits for the agent's process; ranks may take `start_s` seconds to start."""
        super().__init__(daemon=True)
        self._find = agent
        self._start_s = start_s
        self._config = config
        self._generator = generator
        self._kills = kills
        self.killed: list[str] = []
        """Of each kill, who and when."""

    def run(self) -> None:
        """Until enough were killed, or the agent has ended."""
        agent = self._find()
        seen: set[int] = set()
        while len(self.killed) < self._kills and Path(f"/proc/{agent}").exists():
            workers = [worker for worker in _children(agent) if worker not in seen]
            if len(workers) < 2:
                time.sleep(0.02)
                continue
            seen.update(workers)
            before = self._step()
            if self._generator.random() < 0.3:
                time.sleep(self._generator.uniform(0.0, self._start_s))
            else:
                self._wait_for(
                    before + self._generator.randrange(1, self._config.max_steps // (self._kills + 1)), workers, agent
                )
                time.sleep(self._generator.uniform(0.0, 0.1))
            rank = self._generator.randrange(2)
            if not lives(workers[rank]):
                continue
            os.kill(workers[rank], signal.SIGKILL)
            self.killed.append(f"process {rank} after step {self._step()}")

    def _step(self) -> int:
        metrics = RunDir(self._config.output_dir).metrics
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def _wait_for(self, step: int, workers: list[int], agent: int) -> None:
        while self._step() < step and set(workers) <= set(_children(agent)):
            time.sleep(0.005)


def _children(process: int) -> list[int]:
    try:
        tasks = Path(f"/proc/{process}/task").iterdir()
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []


def left_alone(config: TrainConfig, ranks: RankServer, tmp_path: Path) -> TrainConfig:
    """A run like it that has ended."""
    whole = replace(config, output_dir=tmp_path / "whole")
    assert started(ranks, 2, tmp_path / "a", whole) == [0, 0]
    return whole


def assert_ended_as(whole: TrainConfig, config: TrainConfig) -> None:
    """With the same bits, and every step once in the metrics."""
    assert_same(whole, config)
    assert [line["step"] for line in read_metrics(RunDir(config.output_dir).metrics)] == list(
        range(1, config.max_steps + 1)
    )


@pytest.mark.parametrize("number", range(RUNS))
@pytest.mark.parametrize("kind", ["ram", "ssd"])
def test_a_run_whose_ranks_are_killed_ends_with_the_bits_of_one_that_was_not(
    kind: str, number: int, ranks: RankServer, tmp_path: Path
) -> None:
    config = config_of(kind, tmp_path)
    whole = left_alone(config, ranks, tmp_path)
    pid = tmp_path / "out" / "agent"

    def agent() -> int:
        while not pid.exists() or not pid.read_text():
            time.sleep(0.002)
        return int(pid.read_text())

    killer = Killer(agent, config, random.Random(f"{kind} {number}"), KILLS_OF_A_RUN, start_s=1.0)
    killer.start()
    environment = {"PAGODA_RANK_TIMEOUT": "60"}
    settings = {"restarts": RESTARTS, "environment": environment, "timeout_s": HANG_S}
    assert started(ranks, 2, tmp_path / "out", config, **settings) == [0], killer.killed
    killer.join()
    print(f"\n{kind} {number}: {len(killer.killed)} kills: {'; '.join(killer.killed)}")
    assert len(killer.killed) == KILLS_OF_A_RUN
    assert_ended_as(whole, config)


@contextmanager
def torchrun(settings: Path, out: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """`torchrun --max-restarts` of `pagoda train` on two processes; killed with its workers if it still runs."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [
        f"--max-restarts={RESTARTS}",
        "-m",
        "pagoda",
        "train",
        "--config",
        str(settings),
        "--output-dir",
        str(out),
    ]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment |= {"PAGODA_RANK_TIMEOUT": "60", "CUDA_VISIBLE_DEVICES": ""}
    settings = {"start_new_session": True, "preexec_fn": end_with_parent}
    with subprocess.Popen(command, env=environment, cwd=ROOT, **settings) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("kind", ["ram", "ssd"])
def test_torchrun_restarts_a_run_whose_ranks_are_killed_until_it_ends_with_the_same_bits(
    kind: str, ranks: RankServer, tmp_path: Path
) -> None:
    config = config_of(kind, tmp_path)
    whole = left_alone(config, ranks, tmp_path)
    with torchrun(whole.output_dir / "run.yaml", config.output_dir) as process:
        killer = Killer(lambda: process.pid, config, random.Random(f"torchrun {kind}"), kills=3, start_s=5.0)
        killer.start()
        assert process.wait(HANG_S) == 0, killer.killed
        killer.join()
    print(f"\n{kind}: {len(killer.killed)} kills: {'; '.join(killer.killed)}")
    assert len(killer.killed) == 3
    assert_ended_as(whole, config)
