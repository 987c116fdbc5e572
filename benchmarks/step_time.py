"""Step time against plain PyTorch in memory, in one run: ratios, not seconds, are the result.

Rounds interleave every variant, so that a noisy machine hurts all alike; ratios are taken per round and the
median is reported. With state on SSD the limit is max(plain step, bytes / bandwidth), where bandwidth is what raw
O_DIRECT reads and writes reach together in the same run.

    python benchmarks/step_time.py --ssd DIR [--model llama-215m] [--rounds 5] [--speculate] [--clip 1.0] [--out FILE]

With --speculate, every step clips, and the run with state on SSD updates under backward as if nothing would be clipped,
with the RAM for copies of weights that this takes. A --clip that no norm reaches shows it at its best, a small one at
its worst.
"""

import json
import platform
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.table import Table

import pagoda
from pagoda.memory.arena import Arena
from pagoda.memory.ssd import PageFile
from pagoda.process import keep_freed_memory, restart_spinning_briefly
from training import Paged, Plain, Workload

PAGE = 4 << 20


def name_of(workload: Workload) -> str:
    return f"{workload.tokens} tokens, clipping {'off' if workload.clip is None else 'on'}"


def state_on_ssd(directory: str, workload: Workload, speculate: bool) -> pagoda.Memory:
    """Weights and gradients in RAM, every moment on SSD: a budget of exactly what that takes."""
    with pagoda.init():
        numel = sum(p.numel() for p in workload.build().parameters())
    # Weights and gradients, 2 bytes each, and room for pages and the ring; too little for any unit's moments.
    return pagoda.Memory(host=int(numel * (6 if speculate else 4) * 1.02) + (72 << 20), ssd=directory)


def raw_bandwidth(directory: str, gib: float = 1.5) -> tuple[float, float]:
    """(read, write) bytes per second of O_DIRECT on 4 MiB pages, both at once, two threads each."""
    pages = int(gib * (1 << 30)) // PAGE
    rates: dict[str, float] = {}
    with PageFile(directory, 2 * pages, PAGE) as file:
        arena = Arena(4 * PAGE)
        for page in range(pages):
            file.pwrite(page, arena.view(0, PAGE))

        def work(verb: str, move: Callable[[int, memoryview], None], first: int) -> None:
            def half(n: int) -> None:
                view = arena.view((2 * (verb == "write") + n) * PAGE, PAGE)
                for page in range(first + n, first + pages, 2):
                    move(page, view)

            start = time.perf_counter()
            threads = [threading.Thread(target=half, args=(n,)) for n in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            rates[verb] = pages * PAGE / (time.perf_counter() - start)

        both = [
            threading.Thread(target=work, args=("read", file.pread, 0)),
            threading.Thread(target=work, args=("write", file.pwrite, pages)),
        ]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
    return rates["read"], rates["write"]


def measure(workload: Workload, directory: str, rounds: int, speculate: bool, console: Console) -> dict[str, object]:
    """Interleaved rounds of one workload."""
    trainers = {
        "plain": Plain(workload),
        "ram": Paged(workload, pagoda.Memory(host="16GiB")),
        "ssd": Paged(workload, state_on_ssd(directory, workload, speculate), speculate),
    }
    plan = pagoda.plan_of(trainers["ssd"].model)
    console.print({tier: dict(lines) for tier, lines in plan.bytes.items()})
    batches = workload.batches()
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    bandwidths = []
    moved = {"ssd_read": 0, "ssd_write": 0}
    stalls: list[dict[str, float]] = []
    updates: list[dict[str, int]] = []
    for number in range(rounds + 1):
        bandwidths.append(raw_bandwidth(directory))
        for name, trainer in trainers.items():
            # Two steps back to back: the first one's updates run under the second, as in a long run.
            for last in (False, True):
                ids = next(batches)
                start = time.perf_counter()
                trainer.step(ids)
                elapsed = time.perf_counter() - start
                if number and last:
                    seconds[name].append(elapsed)
            if isinstance(trainer, Paged):
                if name == "ssd" and number:
                    moved = {lane: trainer.optimizer.stats.bytes_moved[lane] for lane in moved}
                    stats = trainer.optimizer.stats
                    stalls.append(stats.stall_s)
                    updates.append({"kept": stats.updates_kept, "undone": stats.updates_undone})
                trainer.optimizer.drain()
        console.print(f"round {number}:", {n: round(s[-1], 2) for n, s in seconds.items() if s})
    for trainer in trainers.values():
        trainer.close()
    read, write = (statistics.median(b[i] for b in bandwidths) for i in range(2))
    ssd_s = max(moved["ssd_read"] / read, moved["ssd_write"] / write)
    ratios_ram = [r / p for r, p in zip(seconds["ram"], seconds["plain"], strict=True)]
    ratios_ssd = [s / max(p, ssd_s) for s, p in zip(seconds["ssd"], seconds["plain"], strict=True)]
    return {
        "workload": name_of(workload),
        "seconds": {name: statistics.median(s) for name, s in seconds.items()},
        "all_seconds": seconds,
        "raw_ssd_bytes_per_s": {"read": read, "write": write},
        "ssd_bytes": moved,
        "ssd_limit_s": ssd_s,
        "stall_s": stalls,
        "updates_under_backward": updates,
        "ratio_ram": statistics.median(ratios_ram),
        "ratio_ssd": statistics.median(ratios_ssd),
    }


def main(
    ssd: str,
    model: str = "llama-215m",
    rounds: int = 5,
    speculate: bool = False,
    clip: float = 1.0,
    out: Path | None = None,
) -> None:
    """Run both workloads and print the ratios (targets: RAM 1.05, SSD 1.10)."""
    restart_spinning_briefly()
    keep_freed_memory()
    console = Console()
    workloads = (Workload(model, 4, 512, clip=clip), Workload(model, 1, 512, clip=clip if speculate else None))
    results = [measure(workload, ssd, rounds, speculate, console) for workload in workloads]
    table = Table("workload", "plain s", "RAM s", "ratio", "SSD s", "SSD limit s", "ratio to limit")
    for r in results:
        s = r["seconds"]
        table.add_row(
            str(r["workload"]),
            f"{s['plain']:.2f}",  # type: ignore[index]
            f"{s['ram']:.2f}",  # type: ignore[index]
            f"{r['ratio_ram']:.3f}",
            f"{s['ssd']:.2f}",  # type: ignore[index]
            f"{r['ssd_limit_s']:.2f}",
            f"{r['ratio_ssd']:.3f}",
        )
    console.print(table)
    if out is not None:
        machine = {"processor": platform.processor(), "cores": torch.get_num_threads(), "torch": torch.__version__}
        out.write_text(json.dumps({"model": model, "machine": machine, "results": results}, indent=1))


if __name__ == "__main__":
    tyro.cli(main)
