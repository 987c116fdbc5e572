"""Train models far beyond memory: everything on SSD, inside a process limited in resident memory.

The parent starts one process per model, which builds it under `pagoda.deferred_init()` and takes a few steps; the
parent kills it as soon as its resident memory passes the limit. The process's own peak (VmHWM, kept by the kernel) is
the result.

    python benchmarks/beyond_memory.py --ssd DIR [--models llama-1b llama-5b llama-8b] [--out FILE]

llama-8b has 8-bit moments, and its largest layers are cut into tiles; it takes 48 GB of the SSD. llama-1b is in fp32,
which every CPU multiplies fast.
"""

import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console
from rich.table import Table

from pagoda.memory.sizes import format_bytes, parse_bytes
from script import write

GIB = 1 << 30


@dataclass(frozen=True)
class Case:
    """The resident memory that the process of a model may have, what Pagoda may use of it, and how it trains."""

    limit: int
    host: str
    moments: Literal["fp32", "8bit"] = "fp32"
    tile_limit: str | None = None
    precision: Literal["bf16", "fp32"] = "bf16"


CASES = {
    "llama-1b": Case(3 * GIB, "1200MiB", precision="fp32"),
    "llama-5b": Case(6 * GIB, "2200MiB"),
    "llama-8b": Case(4 * GIB, "1GiB", "8bit", "64MiB"),
}


def train(model_name: str, ssd: str, steps: int, seq_len: int) -> None:
    """The limited process: prints one JSON line per step, then its own peak."""
    import pagoda
    from text import batch_of, batches_of_text, built

    case = CASES[model_name]
    start = time.perf_counter()
    model, optimizer = pagoda.wrap(
        built(model_name, seq_len),
        pagoda.AdamW(lr=3e-4, moments=case.moments),
        memory=pagoda.Memory(host=case.host, ssd=ssd),
        precision=case.precision,
        max_grad_norm=1.0,
        tiles=pagoda.Tiles(tile_limit=case.tile_limit),
    )
    plan = pagoda.plan_of(model)
    line: dict[str, object] = {"built_s": time.perf_counter() - start, "parameters": plan.parameters}
    print(json.dumps({**line, "plan_bytes": {t: dict(b) for t, b in plan.bytes.items()}}), flush=True)
    batches = batches_of_text(seq_len, 1)
    for step in range(steps):
        start = time.perf_counter()
        loss = model(**batch_of(batches, step)).loss
        loss.backward()
        optimizer.step()
        optimizer.synchronize()
        print(json.dumps({"step": step + 1, "loss": loss.item(), "step_s": time.perf_counter() - start}), flush=True)
    optimizer.close()
    print(json.dumps({"peak_rss": resident_bytes("self", "VmHWM"), "peak_bytes": optimizer.stats.peak_bytes}))


def resident_bytes(process: str, field: str) -> int:
    """VmRSS, VmHWM or another field of a process, in bytes; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)


def watch(model_name: str, case: Case, ssd: str, steps: int, seq_len: int, console: Console) -> dict[str, object]:
    """Run one case under its limit."""
    command = [sys.executable, __file__, "--child", model_name, "--ssd", ssd]
    command += ["--steps", str(steps), "--seq-len", str(seq_len)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    peak = 0

    def guard() -> None:
        nonlocal peak
        while process.poll() is None:
            peak = max(peak, resident_bytes(str(process.pid), "VmHWM"))
            if peak > case.limit:
                process.kill()
            time.sleep(0.02)

    guarding = threading.Thread(target=guard)
    guarding.start()
    result: dict[str, object] = {"model": model_name, "limit": case.limit, "host_budget": parse_bytes(case.host)}
    steps_done = []
    assert process.stdout is not None
    for line in process.stdout:
        console.print(line.strip(), highlight=False, soft_wrap=True)
        if line.startswith("{"):
            entry = json.loads(line)
            if "loss" in entry:
                steps_done.append(entry)
            else:
                result.update(entry)
    guarding.join()
    return {**result, "steps": steps_done, "peak_rss": result.get("peak_rss", peak), "exit": process.returncode}


def main(
    ssd: str,
    models: tuple[str, ...] = ("llama-1b", "llama-5b"),
    steps: int = 2,
    seq_len: int = 256,
    out: Path | None = None,
    child: str | None = None,
) -> None:
    """Train each model in its limited process and print what it took."""
    if child is not None:
        train(child, ssd, steps, seq_len)
        return
    console = Console()
    results = [watch(name, CASES[name], ssd, steps, seq_len, console) for name in models]
    table = Table("model", "parameters", "on SSD", "limit", "peak RSS", "build s", "step s", "losses", "fits")
    for r in results:
        parameters = int(r.get("parameters", 0))  # type: ignore[call-overload]
        done = r["steps"]
        assert isinstance(done, list)
        table.add_row(
            str(r["model"]),
            f"{parameters / 1e9:.2f} B",
            format_bytes(sum(r["plan_bytes"]["ssd"].values())) if "plan_bytes" in r else "",  # type: ignore[index]
            format_bytes(int(r["limit"])),  # type: ignore[call-overload]
            format_bytes(int(r["peak_rss"])),  # type: ignore[call-overload]
            f"{r.get('built_s', float('nan')):.0f}",
            " ".join(f"{s['step_s']:.0f}" for s in done),
            " ".join(f"{s['loss']:.2f}" for s in done),
            "yes" if r["exit"] == 0 and len(done) == steps else "NO",
        )
    console.print(table)
    write(out, results)


if __name__ == "__main__":
    tyro.cli(main)
