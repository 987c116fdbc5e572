"""Step time against plain PyTorch in memory, in one run: ratios, not seconds, are the result.

Rounds interleave every variant, so that a noisy machine hurts all alike; ratios are taken per round and the
median is reported. With state on SSD the limit is max(plain step, bytes / bandwidth), where bandwidth is what raw
O_DIRECT reads and writes reach together in the same run.

    python benchmarks/step_time.py --ssd DIR [--model llama-215m] [--rounds 5] [--speculate] [--clip 1.0] [--out FILE]

With --speculate, every step clips, and the run with state on SSD updates during backward as if nothing would be
clipped, with the RAM for copies of weights that this takes. A --clip that no norm reaches shows it at its best, a small
one at its worst.

    python benchmarks/step_time.py --ssd DIR --against CHECKOUT [--model llama-15m] [--rounds 15] [--out FILE]

With --against, it compares this checkout with another one, such as a git worktree of an earlier commit: each trains in
a process of its own, and they take turns, step by step. The result is the median over rounds of new / old. It computes
in bf16, or in fp32 where the CPU is far slower in bf16.
"""

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table

import pagoda
from training import LR, Paged, Plain, Workload
from turns import ROOT, Checkout, ratio_of, serve, settings_of_process, shown, take_turns

# With --against, this file runs with the pagoda of another commit, too. So what is not public is imported where it is
# used, and never there.
PAGE = 4 << 20
TOKENS = (128, 512)


def name_of(workload: Workload) -> str:
    return f"{workload.tokens} tokens, clipping {'off' if workload.clip is None else 'on'}"


def state_on_ssd(directory: str, workload: Workload, speculate: bool, itemsize: int = 2) -> pagoda.Memory:
    """Weights and gradients in RAM, every moment on SSD: a budget of exactly what that takes."""
    with pagoda.deferred_init():
        numel = sum(p.numel() for p in workload.build().parameters())
    # Weights and gradients, `itemsize` bytes each, and room for pages and the ring; too little for any unit's moments.
    return pagoda.Memory(host=int(numel * itemsize * (3 if speculate else 2) * 1.02) + (72 << 20), ssd=directory)


def raw_bandwidth(directory: str, gib: float = 1.5) -> tuple[float, float]:
    """(read, write) bytes per second of O_DIRECT on 4 MiB pages, both at once, two threads each."""
    count = int(gib * (1 << 30))
    with raw_streams(directory, count, count) as stream:
        return stream()


@contextmanager
def raw_streams(directory: str, to_read: int, to_write: int) -> Iterator[Callable[[], tuple[float, float]]]:
    """What reads and writes so many bytes, both at once, two threads each: O_DIRECT on 4 MiB pages.

    It returns the bytes a second of each direction.
    """
    from pagoda.memory.arena import Arena
    from pagoda.memory.ssd.page_file import PageFile

    pages = {"read": to_read // PAGE, "write": to_write // PAGE}
    rates: dict[str, float] = {}
    with closing(PageFile(directory, sum(pages.values()) or 1, PAGE)) as file:
        arena = Arena(4 * PAGE)
        arena.view(0, arena.nbytes)[:] = os.urandom(arena.nbytes)  # a drive may compress zeros
        for page in range(pages["read"]):
            file.pwrite(page, arena.view(0, PAGE))

        def work(verb: str, move: Callable[[int, memoryview], None], first: int) -> None:
            def half(n: int) -> None:
                view = arena.view((2 * (verb == "write") + n) * PAGE, PAGE)
                for page in range(first + n, first + pages[verb], 2):
                    move(page, view)

            start = time.perf_counter()
            run_together(partial(half, 0), partial(half, 1))
            rates[verb] = pages[verb] * PAGE / (time.perf_counter() - start)

        def stream() -> tuple[float, float]:
            run_together(partial(work, "read", file.pread, 0), partial(work, "write", file.pwrite, pages["read"]))
            return rates["read"], rates["write"]

        yield stream


def run_together(*works: Callable[[], object]) -> None:
    """Each in a thread of its own."""
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


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
                    updates.append({"kept": stats.updates_kept, "undone": stats.updates_called_off})
                trainer.optimizer.synchronize()
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
        "updates_during_backward": updates,
        "ratio_ram": statistics.median(ratios_ram),
        "ratio_ssd": statistics.median(ratios_ssd),
    }


def serve_steps(
    model: str,
    tokens: int,
    clip: float | None,
    precision: Literal["bf16", "fp32"],
    host: str | int,
    ssd: str | None,
    speculate: bool | None,
) -> None:
    """A process that trains when it is its turn: one step, until all of it has ended."""
    workload = Workload(model, 1, tokens, clip=clip)
    torch.manual_seed(0)
    with pagoda.deferred_init():
        net = workload.build()
    # A checkout from before `Updates` can take turns too, unless it is to speculate.
    update: dict[str, Any] = {} if speculate is None else {"update": pagoda.Updates(speculate=speculate)}
    net, optimizer = pagoda.wrap(
        net.train(),
        pagoda.AdamW(lr=LR),
        memory=pagoda.Memory(host=host, ssd=ssd),
        precision=precision,
        max_grad_norm=clip,
        gradient_accumulation_steps=1,
        activations="recompute",
        **update,
    )
    batches = workload.batches()

    def step() -> None:
        ids = next(batches)
        net(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.synchronize()

    serve({"step": step})
    optimizer.close()


def seconds_in_turns(
    settings: dict[str, object], against: Path, ssd: str | None, rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds of every step of this checkout, and of the other one, each with a directory of its own on the SSD."""
    with ExitStack() as held:
        checkouts = []
        for root in (ROOT, against):
            directory = None if ssd is None else held.enter_context(tempfile.TemporaryDirectory(dir=ssd))
            checkouts.append(Checkout(root, __file__, {**settings, "ssd": directory}))
        new, old = take_turns(checkouts, ["step"], rounds)
    return new["step"], old["step"]


def compare(ssd: str, against: Path, model: str, rounds: int, speculate: bool, clip: float) -> dict[str, object]:
    """Steps of this checkout against those of another one, for each number of tokens and each home of the state."""
    from pagoda.calibrate.matmul import FAR_SLOWER, cpu_slowdown

    precision, itemsize = ("fp32", 4) if cpu_slowdown(torch.bfloat16) >= FAR_SLOWER else ("bf16", 2)
    console, table = Console(), Table("tokens", "state", "old s", "new s", "new / old (quartiles)")
    cases = []
    for tokens in TOKENS:
        tight = state_on_ssd(ssd, Workload(model, 1, tokens), speculate, itemsize).host
        for state, host in (("RAM", "16GiB"), ("SSD", tight)):
            settings = {"model": model, "tokens": tokens, "clip": clip, "precision": precision, "host": host}
            new_s, old_s = seconds_in_turns(
                {**settings, "speculate": speculate or None}, against, ssd if state == "SSD" else None, rounds
            )
            ratio = ratio_of(new_s, old_s)
            cases.append({"tokens": tokens, "state": state, "new_s": new_s, "old_s": old_s, "ratio": ratio})
            medians = (f"{statistics.median(seconds):.3f}" for seconds in (old_s, new_s))
            table.add_row(str(tokens), state, *medians, shown(ratio))
    console.print(f"{model} in {precision}, {rounds} rounds", table, sep="\n")
    return {"precision": precision, "rounds": rounds, "cases": cases}


def compare_with_plain(ssd: str, model: str, rounds: int, speculate: bool, clip: float) -> list[dict[str, object]]:
    """Steps of Pagoda against those of plain PyTorch in memory, for both workloads."""
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
    return results


def main(
    ssd: str,
    against: Path | None = None,
    model: str = "llama-215m",
    rounds: int = 5,
    speculate: bool = False,
    clip: float = 1.0,
    out: Path | None = None,
) -> None:
    """Run both workloads and print the ratios (targets: RAM 1.05, SSD 1.10); or compare with another checkout."""
    from script import begin, machine, write

    begin()
    if against is not None:
        results: object = compare(ssd, against, model, rounds, speculate, clip)
    else:
        results = compare_with_plain(ssd, model, rounds, speculate, clip)
    write(out, {**machine(), "model": model, "results": results})


if __name__ == "__main__":
    if (settings := settings_of_process()) is not None:
        serve_steps(**settings)
    else:
        tyro.cli(main)
