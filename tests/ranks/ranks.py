"""One server of ranks for all tests and for all processes that run them: it imports everything once, and forks the
processes of each group."""

import fcntl
import json
import os
import shutil
import socket
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

    def __init__(self, connection: socket.socket) -> None:
        self._stream = connection.makefile("rw")

    def ask(self, scenario: str, ranks: int, out: Path, **settings: Any) -> list[int | None]:
        """Run a scenario; how each rank ended: exit status, minus the signal, or None if it hung."""
        out.mkdir(parents=True, exist_ok=True)
        usual = {"timeout_s": 50, "arguments": {}, "environment": {}}
        request = {"scenario": scenario, "ranks": ranks, "out": str(out), **usual, **settings}
        self._stream.write(json.dumps(request) + "\n")
        self._stream.flush()
        return json.loads(self._stream.readline())

    def run(self, scenario: str, ranks: int, out: Path, **arguments: Any) -> list[Any]:
        """What each rank returned; fails with the first error of any."""
        status = self.ask(scenario, ranks, out, arguments=arguments)
        errors = [path.read_text() for path in (*sorted(out.glob("error-*.txt")), *sorted(out.glob("hang-*.txt")))]
        assert status == [0] * ranks, "\n".join([str(status), *errors])
        return [torch.load(out / f"rank-{rank}.pt") for rank in range(ranks)]


def seed_no_accelerators() -> None:
    """Else every seed formats stack traces for devices that are not there, which takes longer than a step."""
    for module in (torch.cuda.random, torch.xpu.random, torch.mtia):
        module._lazy_call = lambda *_, **__: None


def compiler() -> str | None:
    """What compiles crash/recorder.c, if that can be used here."""
    return shutil.which(os.environ.get("CC", "cc")) if sys.platform.startswith("linux") else None


def start(address: Path) -> None:
    """Start a server, to which one can connect at once; it ends by itself. Its hashes are other ones than here."""
    seed = 1 + int(os.environ.get("PYTHONHASHSEED", "0").replace("random", "0"))
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "PYTHONHASHSEED": str(seed)}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    if compiler() is not None:  # processes can record what they write
        library = f"{address}-recorder.so"
        source = str(ROOT / "tests" / "crash" / "recorder.c")
        subprocess.run([compiler(), "-O1", "-fPIC", "-shared", source, "-o", library, "-ldl"], check=True)
        environment["LD_PRELOAD"] = library
    address.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen()
        number = listener.fileno()
        command = [sys.executable, "-m", "ranks.rank_server", str(number)]
        # What ranks print is not mixed with what the tests' process says to the one that runs it.
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=[number], env=environment, cwd=ROOT)


@pytest.fixture(scope="session")
def ranks(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankServer]:
    """The server: the first process that needs it starts it, and it ends when all who are connected have ended."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if hasattr(pytestconfig, "workerinput") else folder  # each worker has a folder in it
    address = folder / "ranks"
    with socket.socket(socket.AF_UNIX) as connection:
        with (folder / "ranks.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                connection.connect(str(address))
            except OSError:
                start(address)
                connection.connect(str(address))
        yield RankServer(connection)
