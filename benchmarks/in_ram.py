"""The table of README.md: steps with less RAM than training state takes, over those of plain PyTorch in RAM.

Every run is a process of its own. Runs of one model take turns, step by step, and ratios are medians over rounds. The
peak is the resident memory of the process, as the kernel keeps it (VmHWM).

    python benchmarks/in_ram.py --ssd DIR --out benchmarks/results/in_ram.json --docs README.md
"""

import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro

from beyond_memory import resident_bytes
from marks import write_between_marks
from pagoda.memory.sizes import format_bytes
from script import machine, write
from turns import ENVIRONMENT, ROOT, TurnTaker, ratio_of, serve

TOKENS = 512
PLAIN = "plain PyTorch"
_FLAG = "--train"


@dataclass(frozen=True)
class Case:
    """A run: how much RAM Pagoda may use for state; None: plain PyTorch, which needs all of it."""

    model: str
    ram: str | None
    rounds: int = 5


CASES = (
    (Case("llama-110m", None), Case("llama-110m", "4GiB"), Case("llama-110m", "400MiB")),
    (Case("llama-1b", "1200MiB", rounds=2),),
)
"""Runs that take turns; the first is what the others are compared with, if it is plain."""


def train(case: Case, ssd: str) -> None:
    """The process of a run."""
    import pagoda
    from training import Paged, Plain, Workload

    workload = Workload(case.model, 1, TOKENS, precision="fp32")
    trainer = Plain(workload) if case.ram is None else Paged(workload, pagoda.Memory(host=case.ram, ssd=ssd))
    batches = workload.batches()

    def step() -> None:
        trainer.step(next(batches))
        trainer.drain()

    serve({"step": step})
    trainer.close()


def measure(cases: tuple[Case, ...], ssd: Path) -> list[dict[str, Any]]:
    """The seconds of each step of runs that take turns, after one step that is not counted, and their peaks."""
    with tempfile.TemporaryDirectory(dir=ssd) as place:
        takers = []
        for number, case in enumerate(cases):
            pages = Path(place, str(number))
            pages.mkdir()
            command = [sys.executable, __file__, _FLAG, json.dumps(asdict(case)), str(pages)]
            takers.append(TurnTaker(case.model, command, ENVIRONMENT))
        seconds: list[list[float]] = [[] for _ in cases]
        for number in range(1 + cases[0].rounds):
            for taker, of in zip(takers, seconds, strict=True):
                elapsed = taker.turn("step")
                if number:
                    of.append(elapsed)
        peaks = [resident_bytes(str(taker.process.pid), "VmHWM") for taker in takers]
        for taker in takers:
            taker.close()
    rows = []
    for case, of, peak in zip(cases, seconds, peaks, strict=True):
        ratio = ratio_of(of, seconds[0]) if cases[0].ram is None and case.ram is not None else None
        rows.append({**asdict(case), "step_s": of, "peak_rss": peak, "ratio": ratio, "state": state_bytes(case.model)})
    return rows


def state_bytes(model: str) -> int:
    """Bytes of weights, gradients and AdamW's moments in fp32."""
    import pagoda
    from training import Workload

    with pagoda.deferred_init():
        return 16 * sum(parameter.numel() for parameter in Workload(model, 1, TOKENS).build().parameters())


def table(results: Any) -> str:
    """The rows for the page."""
    lines = [
        "| model, its state | RAM for state | whole process | a step | over plain PyTorch in RAM |",
        "|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        ram = PLAIN if row["ram"] is None else f"{row['ram'].removesuffix('iB')[:-1]} {row['ram'][-3:]}"
        ratio = f"{row['ratio']['median']:.2f}" if row["ratio"] else "1" if row["ram"] is None else "not run"
        lines.append(
            f"| `{row['model']}`, {format_bytes(row['state'])} | {ram} | {format_bytes(row['peak_rss'])} |"
            f" {statistics.median(row['step_s']):.1f} s | {ratio} |"
        )
    return "\n".join(lines)


def main(ssd: Path, out: Path | None = None, docs: Path | None = None) -> None:
    """Runs all cases and prints the table.

    Args:
        ssd: a directory on the SSD.
        out: file for the figures.
        docs: page to write the table into.
    """
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    rows = [row for cases in CASES for row in measure(cases, ssd)]
    results = {**machine(), "commit": commit.stdout.strip(), "tokens": TOKENS, "rows": rows}
    write(out, results)
    print(table(results))
    if docs is not None:
        write_between_marks(docs, Path(__file__).name, table(results))


if __name__ == "__main__":
    if sys.argv[1:2] == [_FLAG]:
        train(Case(**json.loads(sys.argv[2])), sys.argv[3])
    else:
        tyro.cli(main)
