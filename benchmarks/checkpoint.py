"""What a checkpoint in the background costs training: how long the call takes, and the steps while it is written.

Two runs of one model: all state on SSD, whose pages a checkpoint keeps, and all state in RAM, which is written out.
Every checkpoint replaces the one before. Steps count as "while it is written" if the checkpoint was pending when they
began. The stall of a checkpoint is its call and what the step after it takes beyond the median of quiet steps.

    python benchmarks/checkpoint.py --ssd DIR --checkpoints DIR [--model llama-1b] [--count 20] [--out FILE]
"""

import json
import platform
import shutil
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import tyro
from rich.console import Console

import pagoda
from pagoda.models import build_model
from pagoda.process import keep_freed_memory, restart_spinning_briefly
from pagoda.runtime.optimizer import PagedOptimizer


def wrapped(model_name: str, seq_len: int, memory: pagoda.Memory) -> tuple[torch.nn.Module, PagedOptimizer]:
    torch.manual_seed(0)
    with pagoda.init():
        model = build_model(model_name, seq_len=seq_len, gradient_checkpointing=True)
    return pagoda.wrap(model.train(), pagoda.AdamW(lr=1e-4), memory=memory, clip_grad_norm=1.0, keep_checkpoints=1)


def all_on_ssd(model_name: str, seq_len: int, ssd: str) -> pagoda.Memory:
    """The least RAM there can be."""
    try:
        wrapped(model_name, seq_len, pagoda.Memory(host="1MiB", ssd=ssd))[1].close()
    except pagoda.BudgetError as refused:
        if refused.needed_bytes is not None:
            return pagoda.Memory(host=refused.needed_bytes, ssd=ssd)
    raise ValueError("the model is too small for this benchmark")


def measure(
    model_name: str, batch_size: int, seq_len: int, memory: pagoda.Memory, folder: Path, count: int
) -> dict[str, object]:
    """Train with a checkpoint after every few steps; seconds of calls, stalls and steps."""
    model, optimizer = wrapped(model_name, seq_len, memory)
    generator = torch.Generator().manual_seed(0)

    def step() -> float:
        ids = torch.randint(256, (batch_size, seq_len), generator=generator)
        began = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began

    for _ in range(3):
        step()
    quiet = [step() for _ in range(5)]
    calls: list[float] = []
    first: list[float] = []
    during: list[float] = []
    for number in range(count):
        began = time.perf_counter()
        replaced = [folder / f"{number - 1}"] if number else []
        optimizer.save_checkpoint(folder / f"{number}", wait=False, replaces=replaced)
        calls.append(time.perf_counter() - began)
        first.append(step())
        during.append(first[-1])
        while optimizer.checkpoint_pending:
            during.append(step())
        quiet.append(step())
    ssd_bytes = pagoda.plan_of(model).peak_bytes.get("ssd", 0)
    optimizer.close()
    shutil.rmtree(folder)
    usual = statistics.median(quiet)
    stalls = sorted(call + max(0.0, after - usual) for call, after in zip(calls, first, strict=True))
    return {
        "ssd_bytes": ssd_bytes,
        "step_s": usual,
        "call_s": {"median": statistics.median(calls), "max": max(calls)},
        "stall_s": {"median": statistics.median(stalls), "p99": stalls[min(len(stalls) - 1, int(0.99 * len(stalls)))]},
        "step_while_written": statistics.median(during) / usual,
        "all": {"quiet_s": quiet, "calls_s": calls, "during_s": during},
    }


def main(
    ssd: str,
    checkpoints: Path,
    model: str = "llama-1b",
    batch_size: int = 4,
    seq_len: int = 512,
    count: int = 20,
    out: Path | None = None,
) -> None:
    """Measure both (targets: p99 stall 0.1 s with state on SSD; steps 1.2 times as long while RAM is written)."""
    restart_spinning_briefly()
    keep_freed_memory()
    console = Console()
    results = {}
    with TemporaryDirectory(dir=ssd) as pages:  # what commits keep goes with it
        memories = {"ssd": all_on_ssd(model, seq_len, pages), "ram": pagoda.Memory()}
        for name, memory in memories.items():
            folder = checkpoints / f"benchmark-{name}"
            folder.mkdir(parents=True)
            results[name] = measure(model, batch_size, seq_len, memory, folder, count)
            console.print(name, {key: value for key, value in results[name].items() if key != "all"})
    if out is not None:
        machine = {"processor": platform.processor(), "cores": torch.get_num_threads(), "torch": torch.__version__}
        out.write_text(json.dumps({"model": model, "machine": machine, "results": results}, indent=1))


if __name__ == "__main__":
    tyro.cli(main)
