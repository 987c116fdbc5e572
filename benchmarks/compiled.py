"""What torch.compile (inductor) gives on the CPU: a step of plain PyTorch and of Pagoda, as it is, with each layer
compiled, and with the whole model compiled before `wrap`. Compiling after `wrap` is refused.

Processes take turns, one for each way. Of each: its step against plain PyTorch's that is not compiled, the seconds that
the first steps took, graphs, graph breaks, and graphs that later steps compiled again.

    python benchmarks/compiled.py [--rounds 6] [--layers 4] [--hidden 512] [--batch 2] [--seq-len 256] [--out FILE]

With `--other-lengths` it also counts the graphs that batches of other lengths have compiled.
"""

import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import tyro
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM

import pagoda
from pagoda.calibrate.meter import cpu_name
from pagoda.process import keep_freed_memory
from script import write

WAYS = [f"{who}, {what}" for who in ("plain", "Pagoda") for what in ("eager", "layers", "model")]
_WARM_UP = 3
_VOCABULARY = 8192


def graphs() -> dict[str, int]:
    """Graphs and graph breaks of this process so far."""
    return {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}


def work(way: str, layers: int, hidden: int, batch: int, seq_len: int, other_lengths: bool, pipe: Connection) -> None:
    """Take a step each time that the parent asks for one, and answer with its seconds; at the end, with what it saw."""
    keep_freed_memory()
    who, _, what = way.partition(", ")
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=_VOCABULARY,
            hidden_size=hidden,
            intermediate_size=hidden * 8 // 3,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
            use_cache=False,
        )
    )
    for module in {"eager": [], "layers": model.model.layers, "model": [model]}[what]:
        module.compile()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if who == "Pagoda":
        del optimizer
        memory = pagoda.Memory(host="8GiB")
        model, optimizer = pagoda.wrap(model, pagoda.AdamW(lr=1e-4), memory=memory, precision="fp32")

    def step(length: int = seq_len) -> float:
        start = time.perf_counter()
        ids = torch.randint(_VOCABULARY, (batch, length))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    first_s = sum(step() for _ in range(_WARM_UP))
    seen = graphs()
    pipe.send(first_s)
    while pipe.recv():
        pipe.send(step())
    again = graphs()["graphs"] - seen["graphs"]
    found = {**seen, "first steps, s": round(first_s, 1), "again": again}
    if other_lengths:
        for length in (seq_len // 2, seq_len // 2 + 8, seq_len):
            step(length)
        found["other lengths"] = graphs()["graphs"] - seen["graphs"] - again
    pipe.send(found)


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
    os.environ.update(GOMP_SPINCOUNT="10000", KMP_BLOCKTIME="1")  # for the processes that are started here
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Any] = {}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for way in WAYS:
        pipes[way], theirs = context.Pipe()
        context.Process(
            target=work, args=(way, layers, hidden, batch, seq_len, other_lengths, theirs), daemon=True
        ).start()
        pipes[way].recv()
    for number in range(rounds):
        for index in range(len(WAYS)):
            way = WAYS[(number + index) % len(WAYS)]
            pipes[way].send(True)
            seconds[way].append(pipes[way].recv())
    result: dict[str, Any] = {"machine": cpu_name(), "tokens": batch * seq_len, "layers": layers, "hidden": hidden}
    for way in WAYS:
        pipes[way].send(False)
        ratios = sorted(mine / plain for mine, plain in zip(seconds[way], seconds[WAYS[0]], strict=True))
        figures = {"ratio": statistics.median(ratios), "lowest": ratios[0], "highest": ratios[-1]}
        rounded = {name: round(value, 2) for name, value in figures.items()}
        result[way] = {"step_s": round(statistics.median(seconds[way]), 3), **rounded, **pipes[way].recv()}
        print(way, result[way], flush=True)
    write(out, result)


if __name__ == "__main__":
    tyro.cli(main)
