"""Checkouts of this repository take turns, so that a noisy machine hurts all alike.

Each checkout has a process of its own. It runs the benchmark's file with the checkout's `pagoda` and the checkout's
`training.py`; so that file may import, at its top, only what every checkout has. The parent names a turn; the process
takes it and answers with its seconds.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
WARM_UP = 3
"""Rounds that are not counted: a run plans anew after its first steps."""
_FLAG = "--take-turns"
_ENVIRONMENT = {
    "GOMP_SPINCOUNT": "10000",
    "KMP_BLOCKTIME": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str((1 << 31) - 1),
}
"""What `pagoda train` does for its process: threads that wait sleep soon, and malloc keeps what is freed."""


class Checkout:
    """The process of one checkout."""

    def __init__(self, root: Path, script: str, settings: Mapping[str, object]) -> None:
        self.root = root.resolve()
        if not (self.root / "pagoda" / "__init__.py").exists():
            raise SystemExit(f"{root} is no checkout of Pagoda: it has no pagoda/__init__.py")
        paths = (self.root, self.root / "benchmarks", HERE)
        environment = {**os.environ, **_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(map(str, paths))}
        # -P leaves out the script's own directory, which would come first.
        command = [sys.executable, "-P", script, _FLAG, str(self.root), json.dumps(settings)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def turn(self, name: str) -> float:
        """Seconds of the turn."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()
        if not (answer := self._process.stdout.readline()):
            raise SystemExit(f"The process of {self.root} ended with exit code {self._process.wait()}.")
        return float(answer)

    def close(self) -> None:
        """Lets the process end, and waits for that."""
        self._process.communicate()


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
    """Takes turns until the parent wants no more, in seconds of `clock`. What they print goes to stderr."""
    answers = sys.stdout
    with redirect_stdout(sys.stderr):
        for line in sys.stdin:
            start = clock()
            turns[line.strip()]()
            print(clock() - start, file=answers, flush=True)


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
