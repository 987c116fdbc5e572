"""A process that trains one system when it is its turn, and what the parent sees of it: time, memory, bytes written."""

import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from beyond_memory import resident_bytes
from pagoda.config.training import Precision
from pagoda.memory.sizes import format_bytes
from training import Trainer, Workload
from turns import ENVIRONMENT, HERE, ROOT, TurnFailed, TurnTaker, serve


@dataclass(frozen=True)
class Task:
    """What a process trains."""

    model: str
    tokens: dict[int, int]
    """Tokens of a micro-batch -> steps of a turn."""
    clip: float | None = 1.0
    layers: int | None = None
    micro_batches: int = 1
    """Of a step."""
    precision: Precision = "bf16"
    lora_rank: int | None = None


class Peer(TurnTaker):
    """The process of a system. The parent ends it if it takes too much memory or time."""

    def __init__(
        self, system: str, task: Task, cache_folder: Path, ssd: Path, limit: int | None = None, turn_s: float = 600.0
    ) -> None:
        """`limit`: bytes of RAM that the process may have. Raises InstallError."""
        from peer_suite.systems import SYSTEMS

        environment = SYSTEMS[system].environment
        python, variables = environment.process(cache_folder) if environment else (sys.executable, {})
        variables["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(HERE)))
        # With a limit, malloc gives freed memory back, as it does by default.
        variables |= {k: v for k, v in ENVIRONMENT.items() if limit is None or not k.startswith("MALLOC")}
        self.folder = Path(tempfile.mkdtemp(prefix="pagoda-peers-", dir=ssd))
        settings = json.dumps({"system": system, "task": asdict(task), "folder": str(self.folder)})
        command = [*limited(limit), python, "-P", "-m", "peer_suite.process", settings]
        self.limit, self.turn_s, self.reason = limit, turn_s, ""
        self.started = time.perf_counter()
        self._log = (self.folder / "log").open("w")
        super().__init__(system, command, variables, self._log)
        self._ends_at = self.started + turn_s
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._watch_process, daemon=True)
        self._watch.start()

    def turn(self, name: str) -> float:
        self._ends_at = time.perf_counter() + self.turn_s
        try:
            return super().turn(name)
        except TurnFailed as failure:
            raise TurnFailed(self.reason or failure) from None
        finally:
            self._ends_at = float("inf")

    def _watch_process(self) -> None:
        while not self._over.wait(0.02 if self.limit else 0.5):
            if self.limit and self.peak_bytes() > self.limit:
                self.reason = f"takes more than {format_bytes(self.limit)} of RAM"
            elif time.perf_counter() > self._ends_at:
                self.reason = f"takes more than {self.turn_s:.0f} s"
            if self.reason:
                return self.process.kill()

    def peak_bytes(self) -> int:
        """Most resident memory since the start, or since the last `forget_peak`."""
        return resident_bytes(str(self.process.pid), "VmHWM")

    def forget_peak(self) -> None:
        """Counts the peak of memory from here."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def written_bytes(self) -> int:
        """Bytes that the process has had written to storage."""
        lines = Path(f"/proc/{self.process.pid}/io").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes:"))

    def losses(self) -> list[float]:
        """Of every step so far."""
        return [float(line) for line in (self.folder / "losses").read_text().split()]

    def close(self) -> None:
        """Ends the process and deletes what it has written."""
        self._ends_at = time.perf_counter() + self.turn_s
        super().close()
        self._over.set()
        self._watch.join()
        self._log.close()
        shutil.rmtree(self.folder)


def limited(limit: int | None) -> list[str]:
    """What has to come before a command so that a cgroup limits its RAM; nothing where no cgroup can be had."""
    if limit is None or not cgroups_are_to_be_had():
        return []
    return ["systemd-run", "--user", "--scope", "--quiet", "-p", f"MemoryMax={limit}", "-p", "MemorySwapMax=0"]


@cache
def cgroups_are_to_be_had() -> bool:
    """Whether systemd gives this user a cgroup with a limit."""
    command = ["systemd-run", "--user", "--scope", "--quiet", "-p", "MemoryMax=1G", "true"]
    try:
        return subprocess.run(command, capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


class Turns:
    """In the process: the turns that it takes."""

    def __init__(self, system: str, task: dict[str, Any], folder: str) -> None:
        from peer_suite.systems import SYSTEMS

        self.build = SYSTEMS[system].build
        self.folder = Path(folder)
        tokens = {int(tokens): steps for tokens, steps in task.pop("tokens").items()}
        self.task = Task(tokens=tokens, **task)
        self.saved = self.folder / "checkpoint"
        self.trainer: Trainer | None = None

    def serve(self) -> None:
        """Takes turns, then gives everything back."""
        turns: dict[str, Any] = {"start": self.start, "save": self.save, "load": self.load}
        serve(turns | {str(tokens): partial(self.train, tokens, steps) for tokens, steps in self.task.tokens.items()})
        if self.trainer is not None:
            self.trainer.close()

    def start(self) -> None:
        """Makes the system and takes one step, of the fewest tokens."""
        task = self.task
        workload = Workload(
            task.model,
            task.micro_batches,
            max(task.tokens),
            clip=task.clip,
            layers=task.layers,
            micro_batches=task.micro_batches,
            precision=task.precision,
            lora_rank=task.lora_rank,
        )
        pages = self.folder / "pages"
        pages.mkdir()
        self.trainer = self.build(workload, pages)
        self.batches = {n: Workload(task.model, task.micro_batches, n).batches() for n in task.tokens}
        self.train(min(task.tokens), 1)

    def train(self, tokens: int, steps: int) -> None:
        """Some steps, and all that they have left to do."""
        assert self.trainer is not None
        losses = [self.trainer.step(ids) for ids in itertools.islice(self.batches[tokens], steps)]
        self.trainer.drain()
        with (self.folder / "losses").open("a") as file:
            file.writelines(f"{loss.item()}\n" for loss in losses)

    def save(self) -> None:
        """Writes a checkpoint, to the drive and not only to the page cache."""
        assert self.trainer is not None
        self.trainer.save(self.saved)
        for file in (path for path in self.saved.rglob("*") if path.is_file()):
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # `load` reads it from the drive

    def load(self) -> None:
        """Reads it back."""
        assert self.trainer is not None
        self.trainer.load(self.saved)


if __name__ == "__main__":
    Turns(**json.loads(sys.argv[1])).serve()
