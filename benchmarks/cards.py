"""What one GPU can train, as `pagoda plan` plans it: nothing is run.

    python benchmarks/cards.py --out benchmarks/results/cards.json --docs docs/tutorials/plan-for-a-machine.md

`--part docs` only writes the table, from the figures that --out has. The computers are named machines, with a drive of
2 TB; where one has less RAM, pages get 80% of it, as `pagoda plan` does by itself.
"""

import contextlib
import io
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from marks import write_between_marks
from pagoda.cli.main import main as pagoda
from script import write

TOKENS = "--per-device-train-batch-size 16 --max-length 2048 --batch-tiles auto --activations auto"
"""Flags of every plan: the tokens of a step, in as many micro-batches as fit."""
_CARDS = {"rtx4090": "24 GiB, RTX 4090", "rtx6000-ada": "48 GiB, RTX 6000 Ada", "h100-pcie": "80 GiB, H100 PCIe"}
_TIERS = ("device", "host", "ssd")


@dataclass(frozen=True)
class Case:
    """A model on a computer."""

    hardware: str
    ram_gib: int
    model: str
    moments: Literal["fp32", "8bit"] = "fp32"

    @property
    def flags(self) -> str:
        """Of `pagoda plan`."""
        ram = f" --memory.host {self.ram_gib * 0.8:.1f}GiB" if self.ram_gib < 128 else ""
        moments = f" --moments {self.moments}" if self.moments != "fp32" else ""
        return f"--model {self.model} --hardware {self.hardware}{ram}{moments} {TOKENS}"


CASES = (
    Case("rtx4090", 64, "llama3.2-1b"),
    Case("rtx4090", 64, "qwen3-8b", "8bit"),
    Case("rtx4090", 128, "qwen3-8b"),
    Case("rtx4090", 128, "qwen3-32b", "8bit"),
    Case("rtx6000-ada", 64, "qwen3-8b"),
    Case("rtx6000-ada", 128, "qwen3-14b", "8bit"),
    Case("h100-pcie", 128, "qwen3-32b", "8bit"),
    Case("h100-pcie", 128, "llama3.1-70b", "8bit"),
)


def planned(case: Case) -> dict[str, Any]:
    """What `pagoda plan --json` says, in part. Raises SystemExit if the model does not fit."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = pagoda(["plan", *case.flags.split(), "--json"])
    plan = json.loads(printed.getvalue())
    if code:
        raise SystemExit(f"pagoda plan {case.flags}: {plan['refusal']}")
    keys = ("params", "tokens_per_step", "step_s", "tokens_per_s", "ssd_bytes_written_per_step")
    tiers = {f"{tier}_bytes": sum(plan["bytes"].get(tier, {}).values()) for tier in _TIERS}
    return {**asdict(case), "command": f"pagoda plan {case.flags}", **{key: plan[key] for key in keys}, **tiers}


def table(figures: list[Mapping[str, Any]]) -> str:
    """The plans as Markdown."""
    lines = [
        "| card | RAM | model | moments | a step | tokens/s | on the card | in RAM | on the drive | written a step |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for of in figures:
        cells = (
            _CARDS[of["hardware"]],
            f"{of['ram_gib']} GiB",
            f"`{of['model']}`",
            of["moments"].replace("8bit", "8 bits"),
            f"{of['step_s']:.1f} s",
            f"{of['tokens_per_s']:,.0f}",
            *(_gib(of[f"{tier}_bytes"]) for tier in _TIERS),
            _gib(of["ssd_bytes_written_per_step"]),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _gib(count: int) -> str:
    gib = round(count / 2**30)
    return f"{gib} GiB" if gib else "under 1 GiB" if count else "-"


def main(out: Path, docs: Path | None = None, part: Literal["all", "docs"] = "all") -> None:
    """Plan, and write figures and table.

    Args:
        out: where the figures are.
        docs: the page with the table.
        part: docs: plan nothing.
    """
    if part == "all":
        write(out, [planned(case) for case in CASES])
    text = table(json.loads(out.read_text()))
    print(text)
    if docs is not None:
        write_between_marks(docs, "cards.py", text)


if __name__ == "__main__":
    tyro.cli(main)
