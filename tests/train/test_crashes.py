"""Killed at random instants, a run goes on from its last committed checkpoint and ends with the same bits.

Each case trains a tiny model in processes of its own, which are killed by SIGKILL at instants drawn over the length of
a run, and started again until the last step is done; tests/crash has more places for state, and losses of power too.
Asynchronous updates promise less: what is resumed is, bit for bit, what the last checkpoint holds. `pytest -m slow
tests/train/test_crashes.py -s` kills more often and prints how often, and what was found each time.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import xxhash

from pagoda.checkpoint.reader import BUFFERS, Checkpoint
from pagoda.config.memory import Memory
from pagoda.errors import CheckpointError
from pagoda.memory.arena import tensor_bytes
from pagoda.train import TrainConfig
from pagoda.train.metrics import read_metrics
from pagoda.train.run_dir import RunDir
from tests.tiny import write_model

STEPS = 10
KILLED = -9


@dataclass(frozen=True)
class Mode:
    """Where state lives and how it is updated; `slow_s` makes every checkpoint last."""

    host: str = "64MiB"
    drives: int = 0
    lag: int | None = None
    """Most steps that asynchronous updates may lag, if updates are that."""
    slow_s: float = 0.0

    def config(self, folder: Path) -> TrainConfig:
        ssd = ",".join(str(folder / f"ssd{drive}") for drive in range(self.drives)) or None
        return TrainConfig(
            model=str(folder / "model"),
            data=str(folder / "text"),
            steps=STEPS,
            batch_size=2,
            seq_len=16,
            memory=Memory(host=self.host, ssd=ssd, unit_limit="128KiB", page_size="4KiB"),
            clip_grad_norm=1.0,
            update="sync" if self.lag is None else "async",
            max_staleness=self.lag or 0,
            checkpoint_every=1,
            out=folder / "run",
        )


MODES = {
    "ram, during checkpoints": Mode(slow_s=0.001),
    "moments on ssd": Mode(host="1200KiB", drives=1),
    "all on three drives": Mode(host="900KiB", drives=3),
}
ASYNC = {
    "async, ram": Mode(lag=2, slow_s=0.0005),
    "async, moments on ssd": Mode(host="3MiB", drives=1, lag=2),
    "async, moments on two drives": Mode(host="3MiB", drives=2, lag=1),
}


class Server:
    """The process that forks and kills."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("crash_server.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def train(
        self, config: TrainConfig, kill_after: float | None = None, slow_s: float = 0.0, echo: Path | None = None
    ) -> int:
        """How the run ended: 0, or KILLED. What it restores, if anything, it saves to `echo`."""
        request = {"train": asdict(config), "echo": echo, "kill_after": kill_after, "slow_s": slow_s}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request, default=str) + "\n")
        self._process.stdin.flush()
        status: int = json.loads(self._process.stdout.readline())["status"]
        return status

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A model, a text, and room for a run and its SSD: in RAM, which outlives a process as a disk does."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield filled(tmp_path)
        return
    with tempfile.TemporaryDirectory(dir=memory) as path:
        yield filled(Path(path))


def filled(tmp_path: Path) -> Path:
    write_model(tmp_path / "model")
    for drive in range(3):
        (tmp_path / f"ssd{drive}").mkdir()
    (tmp_path / "text").write_text("a text that is long enough for some sequences. " * 40)
    return tmp_path


def state_of(checkpoint: Path) -> dict[str, Any]:
    """All that a checkpoint says of the state, read from it."""
    with Checkpoint(checkpoint) as opened:
        hashes = {}
        for state in (*opened.states, BUFFERS):
            for name in opened.specs(state):
                values = opened.tensor(state, name).whole().reshape(-1)
                hashes[f"{state} of {name}"] = xxhash.xxh3_64_hexdigest(tensor_bytes(values))
        return {"hashes": hashes, **{key: opened.manifest[key] for key in ("steps", "param_groups", "rng")}}


def bits_of(config: TrainConfig) -> dict[str, Any]:
    """All that the last checkpoint and the metrics of a run say, but for times."""
    lines = read_metrics(config.out / "metrics.jsonl")
    metrics = [(m["step"], m["loss"], m["grad_norm"], m["lr"]) for m in lines]
    return {**state_of(RunDir(config.out).latest().path), "metrics": metrics}


@dataclass
class Endurance:
    """What one mode went through."""

    kills: int = 0
    runs: int = 0
    found: Counter[str] = field(default_factory=Counter)
    """What lay there after kills."""


def found_in(config: TrainConfig, seen: Endurance) -> Path | None:
    """The checkpoint that a run goes on from; None, with nothing left of the run, where it starts again."""
    if not config.out.exists():
        return None
    try:
        last = RunDir(config.out).latest()
    except CheckpointError:  # killed before the first
        seen.found["no checkpoint"] += 1
        shutil.rmtree(config.out)
        return None
    seen.found[f"step {last.step}"] += 1
    if list(RunDir(config.out).checkpoints.glob(".*")):
        seen.found["a partial checkpoint"] += 1
    return last.path


def endure(server: Server, folder: Path, mode: Mode, kills: int, draw: random.Random) -> Endurance:
    """Kill runs of a mode `kills` times; every run that comes to its end must have the bits of the first one."""
    config = mode.config(folder)
    began = time.monotonic()
    assert server.train(config, slow_s=mode.slow_s) == 0
    length = time.monotonic() - began
    expected = bits_of(config)
    assert [line[0] for line in expected["metrics"]] == list(range(1, STEPS + 1))
    seen = Endurance()
    shutil.rmtree(config.out)
    while seen.kills < kills or config.out.exists():
        found_in(config, seen)
        after = draw.uniform(0, 1.1 * length) if seen.kills < kills else None
        status = server.train(config, after, mode.slow_s)
        assert status in (0, KILLED)
        seen.kills += status == KILLED
        if RunDir(config.out).checkpoint(STEPS).exists():
            assert bits_of(config) == expected
            seen.runs += 1
            shutil.rmtree(config.out)
    return seen


def endure_lagging(server: Server, folder: Path, mode: Mode, kills: int, draw: random.Random) -> Endurance:
    """Kill runs of a mode `kills` times; what each resumes with must be what the last checkpoint holds."""
    config, echo = mode.config(folder), folder / "echo"
    assert server.train(config, slow_s=mode.slow_s) == 0  # which makes the tokens, as no later run does
    shutil.rmtree(config.out)
    began = time.monotonic()
    assert server.train(config, slow_s=mode.slow_s) == 0
    length = time.monotonic() - began
    seen = Endurance()
    shutil.rmtree(config.out)
    while seen.kills < kills or config.out.exists():
        last = found_in(config, seen)
        saved = state_of(last) if last else None
        after = draw.uniform(0, 1.1 * length) if seen.kills < kills else None
        status = server.train(config, after, mode.slow_s, echo)
        assert status in (0, KILLED)
        seen.kills += status == KILLED
        if echo.exists():
            assert state_of(echo) == saved
            seen.found["a resumed state"] += 1
            shutil.rmtree(echo)
        if RunDir(config.out).checkpoint(STEPS).exists():
            lines = read_metrics(config.out / "metrics.jsonl")
            assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
            assert all(unit["max"] <= (mode.lag or 0) for line in lines for unit in line["staleness"].values())
            seen.runs += 1
            shutil.rmtree(config.out)
    return seen


@pytest.mark.parametrize("name", MODES)
def test_a_run_that_is_killed_ends_with_the_bits_of_one_that_is_not(name: str, server: Server, folder: Path) -> None:
    assert endure(server, folder, MODES[name], 3, random.Random(name)).kills == 3


def test_runs_go_on_beside_the_pages_of_runs_that_were_deleted(server: Server, folder: Path) -> None:
    """Their pages stay until `pagoda gc`, and take slots that checkpoints could use, but none that updates need."""
    config = MODES["all on three drives"].config(folder)
    for _ in range(3):
        assert server.train(config) == 0
        shutil.rmtree(config.out)


def test_a_lagging_run_that_is_killed_resumes_with_what_its_last_checkpoint_holds(server: Server, folder: Path) -> None:
    mode = ASYNC["async, moments on two drives"]
    assert endure_lagging(server, folder, mode, 3, random.Random(1)).found["a resumed state"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", [*MODES, *ASYNC])
def test_nothing_is_lost_over_twenty_kills_in_every_mode(name: str, server: Server, folder: Path) -> None:
    mode, run = (MODES[name], endure) if name in MODES else (ASYNC[name], endure_lagging)
    seen = run(server, folder, mode, 20, random.Random(name))
    print(f"{name}: {seen.kills} kills, {seen.runs} runs came to their end; found {dict(seen.found)}")
    assert seen.kills == 20
