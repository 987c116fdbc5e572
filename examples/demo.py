"""Trains a 110M-parameter Llama with RAM for less than a quarter of its training state; SSD holds the rest.

Run it with `make demo`. It writes runs/demo/ (a previous demo there is removed) and takes a minute or two on
two CPU cores. It trains in bf16, or in fp32 where the CPU multiplies bf16 matrices far slower. Either way the state
takes as many bytes.
"""

import resource
import shutil
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console

from pagoda.calibrate.matmul import FAR_SLOWER, cpu_slowdown
from pagoda.config.memory import Memory
from pagoda.memory.sizes import format_bytes
from pagoda.process import keep_freed_memory, restart_spinning_briefly
from pagoda.train import OptimConfig, TrainConfig, run
from pagoda.train.metrics import read_metrics

OUT = Path(__file__).resolve().parent.parent / "runs" / "demo"
HOST = "300MiB"
STATE_BYTES_PER_PARAMETER = 12
"""fp32 weight, or bf16 weight and the low half of its fp32 master; and two fp32 moments."""


def main() -> None:
    """Trains, then compares what was planned with what was measured."""
    restart_spinning_briefly()
    keep_freed_memory()
    shutil.rmtree(OUT, ignore_errors=True)
    ssd = OUT / "ssd"
    ssd.mkdir(parents=True)
    console = Console()
    slowdown = cpu_slowdown(torch.bfloat16)
    precision: Literal["bf16", "fp32"] = "fp32" if slowdown >= FAR_SLOWER else "bf16"
    console.print(
        f"Precision: {precision}; this CPU multiplies bf16 matrices in {slowdown:.1f} times the time of fp32 ones",
        soft_wrap=True,
        highlight=False,
    )
    config = TrainConfig(
        model="llama-110m",
        steps=16,
        batch_size=2,
        seq_len=128,
        precision=precision,
        memory=Memory(host=HOST, ssd=str(ssd)),
        optim=OptimConfig(lr=1e-3, warmup_steps=4),
        save_at_end=False,  # 1.3 GB that nobody needs
        out=OUT,
    )
    rss_before = _peak_rss_bytes()
    result = run(config, console)
    assert result is not None, "it starts anew, so it has not finished"
    steps = read_metrics(OUT / "metrics.jsonl")

    plan = result.plan
    state_bytes = plan.parameters * STATE_BYTES_PER_PARAMETER
    budget = plan.budgets.host
    planned = plan.peak_bytes["host"]
    measured = max(line["peak_bytes"]["host"] for line in steps)
    step_s = sum(line["step_s"] for line in steps) / len(steps)
    stalls = {lane: sum(line["stall_s"][lane] for line in steps) / len(steps) for lane in steps[0]["stall_s"]}
    lines = [
        "",
        f"loss            {result.first_loss:.3f} -> {result.final_loss:.3f} in {len(steps)} steps",
        f"training state  {format_bytes(state_bytes)}, {state_bytes / budget:.1f} times the RAM it was given"
        f" ({format_bytes(budget)})",
        f"RAM for state   {format_bytes(measured)} at most; the plan said {format_bytes(planned)}",
        f"whole process   {format_bytes(_peak_rss_bytes())} at most: {format_bytes(rss_before)} before it"
        " (Python and torch), the state, activations, the text and libraries",
        f"speed           {result.tokens_per_s:,.0f} tokens/s, {step_s:.2f} s a step",
        f"stalls          {sum(stalls.values()):.2f} s a step, "
        + ", ".join(f"{lane} {seconds:.2f}" for lane, seconds in stalls.items() if seconds >= 0.005),
    ]
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)


def _peak_rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
