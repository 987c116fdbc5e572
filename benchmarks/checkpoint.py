"""What a checkpoint in the background costs training: how long the call takes, and the steps while it is written.

Two runs of one model: all state on SSD, whose pages a checkpoint keeps, and all state in RAM, which is written out.
Every checkpoint replaces the one before. Steps count as "while it is written" if the checkpoint was pending when they
began; they are compared with the median of quiet steps. The stall of a checkpoint is its call and what the step after
it takes beyond the mean of the quiet steps before and after it, as steps get slower and faster over minutes.

State in RAM has to be written before the next update of it, which comes a step later. So no step can be shorter than
the drive takes for what is written and not copied: `drive_s` is that time for all of it, at the rate at which the drive
takes data from several threads with nothing beside, measured in the same run.

    python benchmarks/checkpoint.py --ssd DIR --checkpoints DIR [--model llama-1b] [--seq-len 512] [--count 20]
        [--ram-count 6] [--places ssd ram] [--out FILE]
"""

import json
import shutil
import statistics
import time
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
import torch
import tyro
from rich.console import Console

import pagoda
from pagoda.calibrate.meter import cpu_name
from pagoda.memory.arena import Arena
from pagoda.memory.ssd.file import PageFile
from pagoda.models import build_model
from pagoda.optimizer import PagedOptimizer
from pagoda.process import keep_freed_memory, restart_spinning_briefly
from pagoda.runtime.lanes import SSD_THREADS, Lane, wait_all

PAGE = 4 << 20
RAW_BYTES = 4 << 30
Place = Literal["ssd", "ram"]


def wrapped(model_name: str, seq_len: int, memory: pagoda.Memory) -> tuple[torch.nn.Module, PagedOptimizer]:
    torch.manual_seed(0)
    with pagoda.init():
        model = build_model(model_name, seq_len=seq_len, gradient_checkpointing=True)
    return pagoda.wrap(model.train(), pagoda.AdamW(lr=1e-4), memory=memory, clip_grad_norm=1.0)


def all_on_ssd(model_name: str, seq_len: int, ssd: str) -> pagoda.Memory:
    """The least RAM there can be."""
    try:
        wrapped(model_name, seq_len, pagoda.Memory(host="1MiB", ssd=ssd, ssd_checkpoints=1))[1].close()
    except pagoda.BudgetError as refused:
        if refused.needed_bytes is not None:
            return pagoda.Memory(host=refused.needed_bytes, ssd=ssd, ssd_checkpoints=1)
    raise ValueError("the model is too small for this benchmark")


def drive_rate(folder: Path) -> float:
    """Bytes a second that the drive takes in writes past the page cache, in new files."""
    buffers = Arena(SSD_THREADS * PAGE)
    # What a drive could compress would not be the rate of weights.
    np.frombuffer(buffers.view(0, buffers.nbytes), np.uint8)[:] = np.frombuffer(
        np.random.default_rng(0).bytes(buffers.nbytes), np.uint8
    )
    pages = RAW_BYTES // PAGE
    lane = Lane("raw", SSD_THREADS)
    with closing(PageFile(folder, pages, PAGE)) as file:

        def write(thread: int) -> None:
            for page in range(thread, pages, SSD_THREADS):
                file.pwrite(page, buffers.view(thread * PAGE, PAGE))

        began = time.perf_counter()
        wait_all([lane.submit(lambda thread=thread: write(thread)) for thread in range(SSD_THREADS)])  # type: ignore[misc]
        elapsed = time.perf_counter() - began
    lane.close()
    return RAW_BYTES / elapsed


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
    quiet = [step() for _ in range(4)]
    rate = drive_rate(folder)
    calls: list[float] = []
    stalls: list[float] = []
    during: list[float] = []
    pending: list[float] = []
    for number in range(count):
        quiet.append(step())
        began = time.perf_counter()
        replaced = [folder / f"{number - 1}"] if number else []
        optimizer.save_checkpoint(folder / f"{number}", wait=False, replaces=replaced)
        calls.append(time.perf_counter() - began)
        first = len(during)
        during.append(step())
        while optimizer.checkpoint_pending:
            during.append(step())
        pending.append(time.perf_counter() - began)
        quiet.append(step())
        stalls.append(calls[-1] + max(0.0, during[first] - statistics.mean(quiet[-2:])))
    written = sum(file.stat().st_size for file in (folder / f"{count - 1}").iterdir())
    ssd_bytes = pagoda.plan_of(model).peak_bytes.get("ssd", 0)
    optimizer.close()
    shutil.rmtree(folder)
    usual = statistics.median(quiet)
    stalls.sort()
    return {
        "ssd_bytes": ssd_bytes,
        "step_s": usual,
        "call_s": {"median": statistics.median(calls), "max": max(calls)},
        "stall_s": {"median": statistics.median(stalls), "p99": stalls[min(len(stalls) - 1, int(0.99 * len(stalls)))]},
        "step_while_written": statistics.median(during) / usual,
        "written_bytes": written,
        "pending_s_at_most": statistics.median(pending),
        "drive_bytes_per_s": rate,
        "drive_s": written / rate,
        "least_step_while_written": max(1.0, written / rate / usual),
        "all": {"quiet_s": quiet, "calls_s": calls, "during_s": during},
    }


def main(
    ssd: str,
    checkpoints: Path,
    model: str = "llama-1b",
    batch_size: int = 4,
    seq_len: int = 512,
    count: int = 20,
    ram_count: int = 6,
    places: tuple[Place, ...] = ("ssd", "ram"),
    out: Path | None = None,
) -> None:
    """Measure both (targets: p99 stall 0.1 s with state on SSD; steps 1.2 times as long while RAM is written)."""
    restart_spinning_briefly()
    keep_freed_memory()
    console = Console()
    results = {}
    for place in places:
        with TemporaryDirectory(dir=ssd) as pages:  # what commits keep goes with it
            memory = all_on_ssd(model, seq_len, pages) if place == "ssd" else pagoda.Memory(ssd_checkpoints=1)
            folder = checkpoints / f"benchmark-{place}"
            folder.mkdir(parents=True)
            checkpointed = count if place == "ssd" else ram_count
            results[place] = measure(model, batch_size, seq_len, memory, folder, checkpointed)
        console.print(place, {key: value for key, value in results[place].items() if key != "all"})
    if out is not None:
        machine = {"processor": cpu_name(), "cores": torch.get_num_threads(), "torch": torch.__version__}
        settings = {"batch_size": batch_size, "seq_len": seq_len}
        content = {"model": model, "settings": settings, "machine": machine, "results": results}
        out.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    tyro.cli(main)
