"""Processes take turns, so that a noisy machine hurts all alike: checkouts of this repository, or systems.

The parent names a turn; the process takes it and answers with its seconds. The process of a checkout runs the
benchmark's file with the checkout's `pagoda` and the checkout's `training.py`; so that file may import, at its top,
only what every checkout has.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
WARM_UP = 3
"""Rounds that are not counted: a run plans anew after its first steps."""
_FLAG = "--take-turns"
ENVIRONMENT = {
    "GOMP_SPINCOUNT": "10000",
    "KMP_BLOCKTIME": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str((1 << 31) - 1),
}
"""What `pagoda train` does for its process: threads that wait sleep soon, and malloc keeps what is freed."""


class TurnFailed(SystemExit):
    """A process could not take its turn; says why. Without a handler it ends the benchmark."""


class TurnTaker:
    """A process that takes turns."""

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log: IO[str] | None = None
    ) -> None:
        """`environment` adds to that of this process; `log` takes what the process writes to stderr."""
        self.name = name
        environment = {**os.environ, **environment}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        )

    def turn(self, name: str) -> float:
        """Seconds of the turn. Raises TurnFailed."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(f"{name}\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline().strip()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise TurnFailed(f"The process of {self.name} ended with exit code {self.process.wait()}.")
        try:
            return float(answer)
        except ValueError:
            raise TurnFailed(answer) from None

    def close(self) -> None:
        """Lets the process end, and waits for that."""
        with suppress(BrokenPipeError):
            self.process.communicate()


class Checkout(TurnTaker):
    """The process of one checkout."""

    def __init__(self, root: Path, script: str, settings: Mapping[str, object]) -> None:
        root = root.resolve()
        if not (root / "pagoda" / "__init__.py").exists():
            raise SystemExit(f"{root} is no checkout of Pagoda: it has no pagoda/__init__.py")
        paths = (root, root / "benchmarks", HERE)
        # -P leaves out the script's own directory, which would come first.
        command = [sys.executable, "-P", script, _FLAG, str(root), json.dumps(settings)]
        super().__init__(str(root), command, {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(map(str, paths))})


def settings_of_process() -> dict[str, Any] | None:
    """The settings of a process that takes turns, or None in the parent. Raises SystemExit for another `pagoda`."""
    if sys.argv[1:2] != [_FLAG]:
        return None
    import pagoda

    root, settings = sys.argv[2:]
    if not Path(pagoda.__file__).is_relative_to(root):
        raise SystemExit(f"{pagoda.__file__} is imported in place of the pagoda in {root}")
    return dict(json.loads(settings))


def serve(turns: Mapping[str, Callable[[], object]], clock: Callable[[], float] = time.perf_counter) -> None:
    """Takes turns until the parent wants no more, in seconds of `clock`. What they print goes to stderr.

    A turn that fails is answered with its error, on one line, and ends the process.
    """
    with claimed_stdout() as answers:
        for line in sys.stdin:
            start = clock()
            try:
                turns[line.strip()]()
            except Exception as error:
                print(" ".join(f"{type(error).__name__}: {error}".split()), file=answers, flush=True)
                raise
            print(clock() - start, file=answers, flush=True)


@contextmanager
def claimed_stdout() -> Iterator[IO[str]]:
    """Standard output as a file; what else this process and its children print there goes to stderr."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        try:
            yield answers
        finally:
            sys.stdout.flush()
            os.dup2(answers.fileno(), 1)


def take_turns(checkouts: Sequence[Checkout], names: Sequence[str], rounds: int) -> list[dict[str, list[float]]]:
    """For each checkout, the seconds of each turn in every round; closes them. Each round another one begins."""
    seconds: list[dict[str, list[float]]] = [{name: [] for name in names} for _ in checkouts]
    try:
        for number in range(WARM_UP + rounds):
            print(f"round {number + 1} of {WARM_UP + rounds}", file=sys.stderr)
            for name in names:
                for index in range(len(checkouts)):
                    chosen = (number + index) % len(checkouts)
                    elapsed = checkouts[chosen].turn(name)
                    if number >= WARM_UP:
                        seconds[chosen][name].append(elapsed)
    finally:
        for checkout in checkouts:
            checkout.close()
    return seconds


def ratio_of(new: Sequence[float], old: Sequence[float]) -> dict[str, float]:
    """Median and quartiles over rounds of new / old."""
    ratios = [a / b for a, b in zip(new, old, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high}


def shown(ratio: Mapping[str, float]) -> str:
    """A ratio as text: its median, and its quartiles in brackets."""
    return f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})"
