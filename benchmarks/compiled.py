"""What torch.compile (inductor) gives on the CPU: a step of plain PyTorch and of Pagoda, as it is, with each layer
compiled, and with the whole model compiled before `wrap`. Compiling after `wrap` is refused.

Processes take turns, one for each way. Of each: its step against plain PyTorch's that is not compiled, the seconds that
the first steps took, graphs, graph breaks, and graphs that later steps compiled again.

    python benchmarks/compiled.py [--rounds 6] [--layers 4] [--hidden 512] [--batch 2] [--seq-len 256] [--out FILE]

With `--other-lengths` it also counts the graphs that batches of other lengths have compiled.
"""

import json
import statistics
from pathlib import Path
from typing import Any

import torch
import tyro
from torch._dynamo.utils import counters

import pagoda
from script import machine, write
from training import llama
from turns import ROOT, Checkout, serve, settings_of_process, take_turns

WAYS = [f"{who}, {what}" for who in ("plain", "Pagoda") for what in ("eager", "layers", "model")]
_FIRST_STEPS = 3
_VOCABULARY = 8192


def graphs() -> dict[str, int]:
    """Graphs and graph breaks of this process so far."""
    return {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}


def serve_steps(way: str, layers: int, hidden: int, batch: int, seq_len: int, other_lengths: bool) -> None:
    """A process that takes a step when it is its turn, and says at the end what it has compiled."""
    who, _, what = way.partition(", ")
    torch.manual_seed(0)
    model: Any = llama(_VOCABULARY, hidden, hidden * 8 // 3, layers)
    for module in {"eager": [], "layers": model.model.layers, "model": [model]}[what]:
        module.compile()
    if who == "Pagoda":
        memory = pagoda.Memory(host="8GiB")
        model, optimizer = pagoda.wrap(model, pagoda.AdamW(lr=1e-4), memory=memory, precision="fp32")
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(length: int = seq_len) -> None:
        ids = torch.randint(_VOCABULARY, (batch, length))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    found = {}

    def start() -> None:
        for _ in range(_FIRST_STEPS):
            step()
        found.update(graphs())

    serve({"start": start, "step": step})
    found["again"] = graphs()["graphs"] - found["graphs"]
    if other_lengths:
        before = graphs()["graphs"]
        for length in (seq_len // 2, seq_len // 2 + 8, seq_len):
            step(length)
        found["other lengths"] = graphs()["graphs"] - before
    print(json.dumps(found))


def main(
    rounds: int = 6,
    layers: int = 4,
    hidden: int = 512,
    batch: int = 2,
    seq_len: int = 256,
    other_lengths: bool = False,
    out: Path | None = None,
) -> None:
    """Print a row for each way."""
    sizes = {"layers": layers, "hidden": hidden, "batch": batch, "seq_len": seq_len, "other_lengths": other_lengths}
    processes = [Checkout(ROOT, __file__, {"way": way, **sizes}) for way in WAYS]
    first_s = [process.turn("start") for process in processes]
    seconds = [turns["step"] for turns in take_turns(processes, ["step"], rounds)]
    result: dict[str, Any] = {**machine(), "tokens": batch * seq_len, "layers": layers, "hidden": hidden}
    for way, process, first, of_way in zip(WAYS, processes, first_s, seconds, strict=True):
        ratios = [mine / plain for mine, plain in zip(of_way, seconds[0], strict=True)]
        figures = {"ratio": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)}
        rounded = {name: round(value, 2) for name, value in figures.items()}
        times = {"step_s": round(statistics.median(of_way), 3), "first steps, s": round(first, 1)}
        result[way] = {**times, **rounded, **json.loads(process.said)}
        print(way, result[way], flush=True)
    write(out, result)


if __name__ == "__main__":
    if (settings := settings_of_process()) is not None:
        serve_steps(**settings)
    else:
        tyro.cli(main)
