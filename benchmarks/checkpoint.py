"""What a checkpoint in the background costs training: how long the call takes, and the steps while it is written.

Two runs of one model: all state on SSD, whose pages a checkpoint keeps, and all state in RAM, which is written out.
Every checkpoint replaces the one before. Steps count as "while it is written" if the checkpoint was pending when they
began; they are compared with the median of quiet steps. The stall of a checkpoint is its call and what the step after
it takes beyond the mean of the quiet steps before and after it, as steps get slower and faster over minutes.

State in RAM has to be written before the next update of it, which comes a step later. So no step can be shorter than
the drive takes for what is written and not copied: `drive_s` is that time for all of it, at the rate at which the drive
takes data from two threads with nothing beside, measured in the same run.

    python benchmarks/checkpoint.py --ssd DIR --checkpoints DIR [--model llama-1b] [--seq-len 512] [--count 20]
        [--ram-count 6] [--places ssd ram] [--out FILE]
"""

import shutil
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import tyro
from rich.console import Console

import pagoda
from peer_suite.systems import least
from script import begin, machine, write
from step_time import raw_streams
from training import Paged, Workload

RAW_BYTES = 4 << 30
Place = Literal["ssd", "ram"]


def measure(workload: Workload, memory: pagoda.Memory, folder: Path, count: int) -> dict[str, object]:
    """Train with a checkpoint after every few steps; seconds of calls, stalls and steps."""
    paged, batches = Paged(workload, memory, speculate=False), workload.batches()
    optimizer = paged.optimizer

    def step() -> float:
        ids = next(batches)
        began = time.perf_counter()
        paged.step(ids)
        return time.perf_counter() - began

    for _ in range(3):
        step()
    quiet = [step() for _ in range(4)]
    with raw_streams(str(folder), 0, RAW_BYTES) as stream:
        _, rate = stream()
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
    ssd_bytes = pagoda.plan_of(paged.model).peak_bytes.get("ssd", 0)
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
    begin()
    console, workload = Console(), Workload(model, batch_size, seq_len)
    results = {}
    for place in places:
        with TemporaryDirectory(dir=ssd) as pages:  # what commits keep goes with it
            memory = pagoda.Memory(ssd_checkpoints=1)
            if place == "ssd":
                memory = pagoda.Memory(host=least(workload, Path(pages)), ssd=pages, ssd_checkpoints=1)
            folder = checkpoints / f"benchmark-{place}"
            folder.mkdir(parents=True)
            checkpointed = count if place == "ssd" else ram_count
            results[place] = measure(workload, memory, folder, checkpointed)
        console.print(place, {key: value for key, value in results[place].items() if key != "all"})
    settings = {"batch_size": batch_size, "seq_len": seq_len}
    write(out, {**machine(), "model": model, "settings": settings, "results": results})


if __name__ == "__main__":
    tyro.cli(main)
