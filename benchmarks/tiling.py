"""Batch tiling against ordinary accumulation: bytes of weights moved per step, step time and loss, in one run.

All but a little state is on SSD, and compute has an arena of its own for a few layers, as a small GPU would. How much
faster a step gets depends on what binds ordinary accumulation: here compute has two cores, and the drive is fast. With
`--ssd-rate` every transfer takes as long as it would at that rate in each direction.

    python benchmarks/tiling.py --ssd DIR [--ssd-rate 500MB] [--layers 12] [--hidden 768] [--passes 16] [--seq-len 16] \
        [--out FILE]
"""

import json
import statistics
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import tyro

import pagoda
from pagoda.memory.sizes import parse_bytes
from script import begin, machine, write
from slow_ssd import slow_ssd
from training import llama

MIB = 1 << 20


def build(layers: int, hidden: int) -> Any:
    with pagoda.deferred_init():
        model = llama(1024, hidden, hidden * 8 // 3 // 64 * 64, layers)
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def batches(count: int, seq_len: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    while True:
        yield torch.randint(256, (count, seq_len), generator=generator)


def measure(
    layers: int, hidden: int, passes: int, seq_len: int, tiles: int | None, ssd: Path, ahead: int, steps: int
) -> Any:
    """Steps with one sequence in each pass, or with all of them in one pass that layers run in tiles."""
    torch.manual_seed(0)
    built = build(layers, hidden)
    of_layer = 2 * sum(param.numel() for param in built.model.layers[0].parameters())
    memory = pagoda.Memory(
        device=f"cpu:{ahead * (of_layer + MIB)}",
        host=128 * MIB,
        ssd=str(ssd),
        unit_limit=of_layer + MIB // 2,
    )
    wrapped, optimizer = pagoda.wrap(
        built,
        pagoda.AdamW(lr=1e-4),
        memory=memory,
        max_grad_norm=1.0,
        tiles=pagoda.Tiles(batch_tiles=tiles),
        precision="bf16",
    )
    plan = pagoda.plan_of(wrapped)
    seconds, fetched, losses = [], [], []
    data = batches(passes, seq_len)
    for _ in range(steps):
        ids = next(data)
        start = time.perf_counter()
        loss = 0.0
        for part in (ids,) if tiles else ids.split(1):
            of_part = wrapped(input_ids=part, labels=part).loss * len(part) / passes
            of_part.backward()
            loss += of_part.item()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
        fetched.append(optimizer.stats.bytes_moved["h2d"])
        losses.append(loss)
        print(
            f"{'tiled' if tiles else 'ordinary'}: {seconds[-1]:.2f} s, {fetched[-1] / MIB:.0f} MiB fetched", flush=True
        )
    optimizer.close()
    return {
        "tiles": tiles,
        "units": len(plan.units),
        "plan": plan.bytes,
        "step_s": statistics.median(seconds[1:]),
        "weight_bytes_moved": statistics.median(fetched[1:]),
        "stall_s": optimizer.stats.stall_s,
        "losses": losses,
    }


def main(
    ssd: Path,
    layers: int = 12,
    hidden: int = 768,
    passes: int = 16,
    seq_len: int = 16,
    ahead: int = 3,
    steps: int = 4,
    ssd_rate: str | None = None,
    out: Path | None = None,
) -> None:
    """Print both, and their ratios (targets: 12 times fewer bytes, 3 times faster). `ahead`: layers that the arena has
    room for. `ssd_rate`: bytes per second of a slower drive."""
    begin()
    with nullcontext() if ssd_rate is None else slow_ssd(parse_bytes(ssd_rate, "ssd_rate")):
        ordinary, tiled = (measure(layers, hidden, passes, seq_len, n, ssd, ahead, steps) for n in (None, passes))
    result = {
        "ssd_rate": ssd_rate,
        "layers": layers,
        "hidden": hidden,
        "passes": passes,
        "seq_len": seq_len,
        **machine(),
        "ordinary": ordinary,
        "tiled": tiled,
        "bytes_ratio": ordinary["weight_bytes_moved"] / tiled["weight_bytes_moved"],
        "time_ratio": ordinary["step_s"] / tiled["step_s"],
    }
    print(json.dumps(result, indent=1))
    write(out, result)


if __name__ == "__main__":
    tyro.cli(main)
