"""What updates in two parts gain, by simulation: gradients are clipped, and moments are on SSD.

    python benchmarks/two_part_updates.py [--model llama-8b] [--tokens 16384 32768] [--out FILE]

RAM holds weights and gradients and little else, and no update is speculative, as if every step were clipped. The CPU is
the one that `predict.py` has measured; the other machines are named ones, and reach the rates that their datasheets
say. Each step is simulated with several shares of the updates in two parts; the table has the best one.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import tyro

import pagoda
from pagoda.config.decode import decoded
from pagoda.construction.construct import describe
from pagoda.forecast.compute import Compute
from pagoda.forecast.flops import forward_flops, weightless
from pagoda.models import build_model
from pagoda.plan.layout import GRAD, RING_SLOTS, WEIGHT
from pagoda.plan.options import Options
from pagoda.plan.placement import Budgets
from pagoda.plan.planner import make_plan
from pagoda.plan.units import ModuleSpec
from pagoda.simulate.hardware import Hardware
from pagoda.simulate.machines import find_machine
from pagoda.simulate.simulation import simulate
from script import write

MEASURED = Path(__file__).parent / "results" / "predict.json"
SHARES = (0.0, 0.05, 0.1, 0.25, 0.5, 1.0)
SEQ_LEN = 512
LARGE = 1 << 50
FREE_DEVICE_SHARE = 0.6
"""Of a GPU's memory, for pages."""


@dataclass(frozen=True)
class Row:
    """One step."""

    machine: str
    model: str
    tokens: int
    compute_s: float
    step_s: float
    """Without updates in two parts."""
    share: float
    """Of the updates in two parts, in the shortest step."""
    best_s: float


def measured_cpu() -> Hardware:
    """The machine of the last run of `predict.py` with moments on SSD and 512 tokens."""
    runs = [run for run in json.loads(MEASURED.read_text()) if run["placement"] == "SSD state" and run["tokens"] == 512]
    return decoded(Hardware, runs[-1]["hardware"], of=str(MEASURED))


def budgets(root: ModuleSpec, hardware: Hardware, options: Options) -> Budgets:
    """RAM for weights, gradients and buffers."""
    device = None if hardware.device is None else int(hardware.device.memory_bytes.value * FREE_DEVICE_SHARE)
    layout = make_plan(root, pagoda.AdamW().states("bf16"), Budgets(LARGE, device), options).layout
    slot = sum(layout.block_pages(state.name) for state in (*layout.moments, layout.weight))
    pages = layout.total_pages(WEIGHT) + layout.total_pages(GRAD) + 2 * RING_SLOTS * slot
    return Budgets(pages * layout.page_bytes + (64 << 20), device, LARGE)


def rows(hardware: Hardware, model: str, tokens: tuple[int, ...]) -> Iterator[Row]:
    """A row for each number of tokens."""
    with pagoda.init():
        root = describe(build_model(model, seq_len=SEQ_LEN, gradient_checkpointing=True))
    options = Options(accumulation_steps=1, clipping=True, speculate=False)
    limits, states = budgets(root, hardware, options), pagoda.AdamW().states("bf16")
    plans = {
        share: make_plan(root, states, limits, replace(options, split=pagoda.Split(two_part_share=share)))
        for share in SHARES
    }
    for count in tokens:
        length = min(count, SEQ_LEN)
        with weightless():
            flops = forward_flops(build_model(model, seq_len=length), count // length, length)
        compute = Compute.from_flops(flops, hardware.matmul("bf16").reached_flop_per_s.value)
        steps = {s: simulate(plan, hardware, compute.of_step(root, plan)).step_s for s, plan in plans.items()}
        best = min(steps, key=lambda share: steps[share])
        yield Row(hardware.name, model, count, compute.step_s, steps[0.0], best, steps[best])


def main(
    machines: tuple[str, ...] = ("h200-x1", "rtx4090"),
    model: str = "llama-8b",
    tokens: tuple[int, ...] = (16_384, 32_768, 131_072),
    cpu_model: str = "llama-215m",
    cpu_tokens: tuple[int, ...] = (128, 512, 2048),
    out: Path | None = None,
) -> None:
    """Print a table; `tokens` are those of a step."""
    result = [*rows(measured_cpu(), cpu_model, cpu_tokens)]
    for name in machines:
        result += rows(find_machine(name), model, tokens)
    print("| machine | model | tokens | compute | a step | with two parts | share in two parts | shorter by |")
    print("|---|---|---|---|---|---|---|---|")
    for row in result:
        seconds = " | ".join(f"{value:.2f} s" for value in (row.compute_s, row.step_s, row.best_s))
        gain = 1 - row.best_s / row.step_s
        print(f"| {row.machine} | `{row.model}` | {row.tokens:,} | {seconds} | {row.share:.0%} | {gain:.0%} |")
    write(out, [asdict(row) for row in result])


if __name__ == "__main__":
    tyro.cli(main)
