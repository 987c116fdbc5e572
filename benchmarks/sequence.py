"""The longest sequence that trains under one memory limit: plain PyTorch with checkpointing, and with a chunked loss.

Each attempt is a process of its own that trains two steps of one sequence; the limit is on its anonymous memory
beyond what it had before its first forward, which is where activations are. Throughput is compared where both fit.

    python benchmarks/sequence.py [--limit 768MiB] [--vocab 65536] [--out FILE]
"""

import json
import multiprocessing
import platform
import resource
import statistics
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import pagoda
from pagoda.memory.sizes import parse_bytes

NAMES = {"plain": False, "pagoda": True}
SHORTEST, LONGEST = 256, 1 << 16
MOST_SECONDS = 60
"""Of one attempt."""


def build(vocab: int, hidden: int, layers: int, length: int) -> nn.Module:
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        max_position_embeddings=length,
        tie_word_embeddings=True,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def data_bytes() -> int:
    """Anonymous memory of this process, as the limit counts it."""
    fields = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in fields if line.startswith("VmData")).split()[1]) * 1024


def attempt(pipe: Any, paged: bool, sizes: tuple[int, int, int], length: int, limit: int | None, steps: int) -> None:
    """Send the seconds of each step, or None where memory was not enough."""
    torch.set_num_threads(2)
    model = build(*sizes, length)
    if paged:
        model = pagoda.chunked_loss(model)
        model, optimizer = pagoda.wrap(model, pagoda.AdamW(), memory=pagoda.Memory(host="2GiB"), precision="bf16")
    else:
        model = model.bfloat16()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for param in model.parameters():  # its state and gradients, before the limit
            param.grad = torch.zeros_like(param)
        optimizer.step()
    ids = torch.randint(256, (1, length))
    small = ids[:, :32]
    for tokens in (small, small):  # libraries' own buffers, and all threads
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if limit is not None:
        allowed = data_bytes() + limit
        resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
    seconds = []
    try:
        for _ in range(steps):
            start = time.perf_counter()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - start)
    except (RuntimeError, MemoryError):
        pipe.send(None)
        return
    pipe.send(seconds)


def run(*arguments: Any) -> list[float] | None:
    """`attempt` in a process of its own; None, too, where that was killed or hangs for want of memory."""
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe(duplex=False)
    process = context.Process(target=attempt, args=(its, *arguments))
    process.start()
    its.close()
    seconds: list[float] | None = None
    with suppress(EOFError):
        if mine.poll(MOST_SECONDS):
            seconds = mine.recv()
    process.kill()
    process.join()
    print(arguments, "does not train" if seconds is None else f"trains, {seconds}", flush=True)
    return seconds


def longest(paged: bool, sizes: tuple[int, int, int], limit: int, start: int) -> int:
    """The longest sequence that trains, of those that are a power of two times `start`; 0 if that one does not."""
    length = 0
    while 2 * length <= LONGEST:
        tried = 2 * length or start
        if run(paged, sizes, tried, limit, 1) is None:
            break
        length = tried
    return length


def main(
    limit: str = "768MiB",
    vocab: int = 65536,
    hidden: int = 128,
    layers: int = 2,
    compare: Literal["length", "throughput"] = "length",
    compare_length: int = 512,
    steps: int = 6,
    out: Path | None = None,
) -> None:
    """Print the longest sequence of each under `limit`, or the seconds of a step at `compare_length` without one."""
    sizes = vocab, hidden, layers
    result: dict[str, Any] = {
        "model": {"vocab": vocab, "hidden": hidden, "layers": layers},
        "machine": {"processor": platform.processor(), "torch": torch.__version__},
    }
    if compare == "length":
        nbytes = parse_bytes(limit, "limit")
        plain = longest(False, sizes, nbytes, SHORTEST)
        chunked = longest(True, sizes, nbytes, 8 * plain)
        result |= {"limit": limit, "plain": plain, "pagoda": chunked, "ratio": chunked / plain}
    else:
        seconds = {name: run(paged, sizes, compare_length, None, steps) for name, paged in NAMES.items()}
        medians = {name: statistics.median((of_steps or [float("nan")])[1:]) for name, of_steps in seconds.items()}
        result |= {"length": compare_length, "step_s": medians, "ratio": medians["plain"] / medians["pagoda"]}
    print(json.dumps(result, indent=1))
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    tyro.cli(main)
