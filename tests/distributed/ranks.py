"""One server of ranks for all tests, in all folders: it imports everything once and forks each group of processes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


class RankServer:
    """Starts groups of ranks and gives back what each of them returned."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def ask(self, scenario: str, ranks: int, out: Path, **settings: Any) -> list[int | None]:
        """Run a scenario; how each rank ended: exit status, minus the signal, or None if it hung."""
        out.mkdir(parents=True, exist_ok=True)
        request = {"scenario": scenario, "ranks": ranks, "out": str(out), "timeout_s": 50, "arguments": {}, **settings}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: dict[str, list[int | None]] = json.loads(self._process.stdout.readline())
        return answer["status"]

    def run(self, scenario: str, ranks: int, out: Path, **arguments: Any) -> list[Any]:
        """What each rank returned; fails with the first error of any."""
        status = self.ask(scenario, ranks, out, arguments=arguments)
        errors = [path.read_text() for path in (*sorted(out.glob("error-*.txt")), *sorted(out.glob("hang-*.txt")))]
        assert status == [0] * ranks, "\n".join([str(status), *errors])
        return [torch.load(out / f"rank-{rank}.pt") for rank in range(ranks)]


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankServer]:
    """The server, for as long as tests run. Its hashes are other ones than here."""
    seed = 1 + int(os.environ.get("PYTHONHASHSEED", "0").replace("random", "0"))
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONHASHSEED"] = str(seed)
    command = [sys.executable, "-m", "distributed.rank_server"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield RankServer(process)
        process.send_signal(signal.SIGKILL)
