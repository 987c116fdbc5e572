"""Two nodes with two ranks each: network namespaces of this machine, with host names and process ids of their own,
joined by a link of 200 Mbit/s that can be cut. torchrun runs on each, as on two machines.

It needs root, `ip` and `tc`. On two cores, all of it takes some six minutes.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from forked import end_with_parent

from pagoda.train import TrainConfig
from pagoda.train.metrics import read_metrics
from pagoda.train.run_dir import RunDir

from .ranks import ROOT, RankServer
from .tiny_runs import assert_same, started, tiny_config

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc", "unshare"))),
        reason="needs root, ip, tc and unshare to make two nodes",
    ),
]
STEPS = 30
END_S = 240
"""Seconds in which a run must end."""
RATE = "rate 200mbit burst 64kb latency 50ms"


def _do(command: str) -> None:
    subprocess.run(command.split(), check=True)


class Nodes:
    """Two nodes, each a network namespace, and the link between them."""

    def __init__(self) -> None:
        self._names = [f"pagoda-{os.getpid()}-{node}" for node in range(2)]
        self._ends = [f"pg{os.getpid() % 10**8}{node}" for node in range(2)]
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Nodes":
        for name in self._names:
            _do(f"ip netns add {name}")
        first, second = self._ends
        _do(f"ip link add {first} type veth peer name {second}")
        for node, (name, end) in enumerate(zip(self._names, self._ends, strict=True)):
            _do(f"ip link set {end} netns {name}")
            _do(f"ip -n {name} addr add 10.77.0.{node + 1}/24 dev {end}")
            _do(f"ip -n {name} link set lo up")
            _do(f"ip -n {name} link set {end} up")
            _do(f"ip netns exec {name} tc qdisc add dev {end} root tbf {RATE}")
        return self

    def __exit__(self, *_error: object) -> None:
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for name in self._names:
            _do(f"ip netns del {name}")

    def cut(self, seconds: float) -> None:
        """The link carries nothing for some time."""
        self._link("down")
        time.sleep(seconds)
        self._link("up")

    def _link(self, state: str) -> None:
        _do(f"ip -n {self._names[0]} link set {self._ends[0]} {state}")

    def train(self, flags: list[str], tmp_path: Path, restarts: int = 0, timeout_s: int = 60) -> list[Path]:
        """Start `torchrun ... pagoda train` with these flags on both nodes. Returns the files to which they print."""
        prints = [tmp_path / f"node-{node}.txt" for node in range(2)]
        hosts = tmp_path / "hosts"
        hosts.write_text("127.0.0.1 localhost\n10.77.0.1 node-0\n10.77.0.2 node-1\n")
        for node, (name, end) in enumerate(zip(self._names, self._ends, strict=True)):
            command = f"ip netns exec {name} unshare --uts --pid --fork --mount-proc --kill-child sh -c".split()
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
            torchrun += [f"--node-rank={node}", f"--local-addr=10.77.0.{node + 1}", f"--max-restarts={restarts}"]
            torchrun += ["--rdzv-backend=c10d", "--rdzv-endpoint=10.77.0.1:29400", "--rdzv-id=pagoda"]
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": end, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            environment |= {"PAGODA_RANK_TIMEOUT": str(timeout_s), "CUDA_VISIBLE_DEVICES": ""}
            script = f'hostname node-{node} && mount --bind {hosts} /etc/hosts && exec "$@"'
            with prints[node].open("wb") as file:
                process = subprocess.Popen(
                    [*command, script, "sh", *torchrun, "-m", "pagoda", "train", *flags],
                    env=environment,
                    cwd=ROOT,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=end_with_parent,
                )
            self._processes.append(process)
        return prints

    def wait_for_step(self, config: TrainConfig, step: int) -> None:
        """Return when a run has taken a step."""
        metrics, deadline = RunDir(config.output_dir).metrics, time.monotonic() + END_S
        while not metrics.exists() or len(metrics.read_text().splitlines()) < step:
            assert time.monotonic() < deadline, f"step {step} did not come"
            assert all(process.poll() is None for process in self._processes), "torchrun has ended"
            time.sleep(0.02)

    def ends(self) -> list[int]:
        """The exit status of torchrun on both nodes."""
        deadline = time.monotonic() + END_S
        return [process.wait(max(0.0, deadline - time.monotonic())) for process in self._processes]

    def kill_a_rank(self, node: int) -> None:
        """Kill a rank of a node."""
        rank = f"{sys.executable} -u -m pagoda train"
        found = subprocess.run(["pgrep", "-f", rank], capture_output=True, text=True, check=True).stdout.split()
        name = self._names[node]
        here = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=True).stdout.split()
        os.kill(int(next(pid for pid in found if pid in here)), signal.SIGKILL)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with Nodes() as made:
        yield made


@pytest.fixture
def whole(ranks: RankServer, tmp_path: Path) -> TrainConfig:
    """A run of four ranks on one node, whose bits do not depend on the number of ranks."""
    config = replace(tiny_config(tmp_path), max_steps=STEPS, ordered_sums=True, output_dir=tmp_path / "whole")
    assert started(ranks, 4, tmp_path / "a", config) == [0] * 4
    return config


@pytest.fixture
def config(whole: TrainConfig, tmp_path: Path) -> TrainConfig:
    """The same run, to be trained by others."""
    return replace(whole, output_dir=tmp_path / "two")


def _flags(whole: TrainConfig, config: TrainConfig) -> list[str]:
    return ["--config", str(whole.output_dir / "run.yaml"), "--output-dir", str(config.output_dir)]


def _assert_ended_as(whole: TrainConfig, config: TrainConfig) -> None:
    """With the same bits, and every step once in the metrics."""
    assert_same(whole, config)
    assert [line["step"] for line in read_metrics(RunDir(config.output_dir).metrics)] == list(range(1, STEPS + 1))


def test_two_nodes_give_the_bits_of_one_though_their_link_is_cut_for_seconds(
    whole: TrainConfig, config: TrainConfig, nodes: Nodes, tmp_path: Path
) -> None:
    prints = nodes.train(_flags(whole, config), tmp_path)
    nodes.wait_for_step(config, 5)
    nodes.cut(5)
    assert nodes.ends() == [0, 0], [file.read_text()[-3000:] for file in prints]
    _assert_ended_as(whole, config)


def test_torchrun_starts_both_nodes_anew_when_a_rank_of_one_is_killed(
    whole: TrainConfig, config: TrainConfig, nodes: Nodes, tmp_path: Path
) -> None:
    prints = nodes.train(_flags(whole, config), tmp_path, restarts=3)
    nodes.wait_for_step(config, 5)
    nodes.kill_a_rank(1)
    assert nodes.ends() == [0, 0], [file.read_text()[-3000:] for file in prints]
    _assert_ended_as(whole, config)


def test_after_a_cut_that_lasts_each_node_says_who_is_gone_and_two_ranks_go_on(
    whole: TrainConfig, config: TrainConfig, nodes: Nodes, ranks: RankServer, tmp_path: Path
) -> None:
    prints = nodes.train(_flags(whole, config), tmp_path, timeout_s=5)
    nodes.wait_for_step(config, 5)
    nodes.cut(30)
    assert all(nodes.ends())
    first, second = (file.read_text() for file in prints)
    assert re.search(r"pagoda: Rank 2 \(process \d+ on node-1\), 3 \(process \d+ on node-1\) is gone", first)
    assert "Nor does torch's store on 10.77.0.1 answer." in second
    assert RunDir(config.output_dir).latest().step < STEPS
    goes_on = replace(config, gradient_accumulation_steps=2, resume_from_checkpoint="last")
    assert started(ranks, 2, tmp_path / "b", goes_on) == [0, 0]
    _assert_ended_as(whole, config)
