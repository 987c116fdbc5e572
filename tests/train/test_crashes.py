"""Killed at random instants, a run goes on from its last committed checkpoint and ends with the same bits.

Each case trains a tiny model in processes of its own, which are killed by SIGKILL at instants drawn over the length of
a run, and started again until the last step is done. `pytest -m slow tests/train/test_crashes.py -s` kills more often
and prints how often, and what was found each time.
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
from pagoda.checkpoint.tensors import tensor_bytes
from pagoda.errors import CheckpointError
from pagoda.train import MemoryConfig, TrainConfig
from pagoda.train.metrics import read_metrics
from pagoda.train.run_dir import RunDir

TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "tie_word_embeddings": True,
}
STEPS = 10
KILLED = -9


@dataclass(frozen=True)
class Mode:
    """Where state lives and how it is updated; `slow_s` makes every checkpoint last."""

    host: str = "64MiB"
    ssd: bool = False
    device: str | None = None
    clip: float | None = 1.0
    slow_s: float = 0.0

    def config(self, folder: Path) -> TrainConfig:
        ssd = str(folder / "ssd") if self.ssd else None
        return TrainConfig(
            model=str(folder / "model"),
            data=str(folder / "text"),
            steps=STEPS,
            batch_size=2,
            seq_len=16,
            memory=MemoryConfig(host=self.host, ssd=ssd, device=self.device, unit_limit="128KiB", page_size="4KiB"),
            clip_grad_norm=self.clip,
            checkpoint_every=1,
            out=folder / "run",
        )


MODES = {
    "ram": Mode(),
    "ram, during checkpoints": Mode(slow_s=0.001),
    "ram, updates under backward": Mode(clip=None, slow_s=0.0005),
    "moments on ssd": Mode(host="1200KiB", ssd=True),
    "moments on ssd, updates under backward, during checkpoints": Mode(
        host="1200KiB", ssd=True, clip=None, slow_s=0.0005
    ),
    "all on ssd": Mode(host="900KiB", ssd=True),
    "separate arena": Mode(host="1200KiB", ssd=True, device="cpu:512KiB", slow_s=0.0005),
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

    def train(self, config: TrainConfig, kill_after: float | None = None, slow_s: float = 0.0) -> int:
        """How the run ended: 0, or KILLED."""
        settings = json.loads(json.dumps(asdict(config), default=str))
        request = {"config": settings, "kill_after": kill_after, "slow_s": slow_s}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
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
    (tmp_path / "model").mkdir()
    (tmp_path / "ssd").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "text").write_text("a text that is long enough for some sequences. " * 40)
    return tmp_path


def bits_of(config: TrainConfig) -> dict[str, Any]:
    """All that the last checkpoint and the metrics of a run say, but for times."""
    last = RunDir(config.out).latest()
    with Checkpoint(last.path) as checkpoint:
        hashes = {}
        for state in (*checkpoint.states, BUFFERS):
            for name, spec in checkpoint.specs(state).items():
                values = checkpoint.read(state, name, 0, spec.nbytes // spec.dtype.itemsize)
                hashes[f"{state} of {name}"] = xxhash.xxh3_64_hexdigest(tensor_bytes(values))
        said = {key: checkpoint.manifest[key] for key in ("steps", "param_groups", "rng", "extra")}
    lines = read_metrics(config.out / "metrics.jsonl")
    return {"hashes": hashes, **said, "metrics": [(m["step"], m["loss"], m["grad_norm"], m["lr"]) for m in lines]}


@dataclass
class Endurance:
    """What one mode went through."""

    kills: int = 0
    runs: int = 0
    found: Counter[str] = field(default_factory=Counter)
    """What lay there after kills."""


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
        if config.out.exists():
            try:
                step = RunDir(config.out).latest().step
                seen.found[f"step {step}"] += 1
                if list(RunDir(config.out).checkpoints.glob(".*")):
                    seen.found["a partial checkpoint"] += 1
            except CheckpointError:  # killed before the first: a run starts again
                seen.found["no checkpoint"] += 1
                shutil.rmtree(config.out)
        after = draw.uniform(0, 1.1 * length) if seen.kills < kills else None
        status = server.train(config, after, mode.slow_s)
        assert status in (0, KILLED)
        seen.kills += status == KILLED
        if RunDir(config.out).checkpoint(STEPS).exists():
            assert bits_of(config) == expected
            seen.runs += 1
            shutil.rmtree(config.out)
    return seen


@pytest.mark.parametrize("name", ["ram, during checkpoints", "moments on ssd", "all on ssd"])
def test_a_run_that_is_killed_ends_with_the_bits_of_one_that_is_not(name: str, server: Server, folder: Path) -> None:
    assert endure(server, folder, MODES[name], 3, random.Random(name)).kills == 3


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_nothing_is_lost_over_a_hundred_kills(server: Server, folder: Path) -> None:
    total = 0
    for name, mode in MODES.items():
        seen = endure(server, folder, mode, 20, random.Random(name))
        print(f"{name}: {seen.kills} kills, {seen.runs} runs came to their end; found {dict(seen.found)}")
        total += seen.kills
    assert total >= 100
