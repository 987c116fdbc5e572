"""The longest sequence that trains under one memory limit: plain PyTorch with checkpointing, and with a chunked loss.

Each attempt is a process of its own that trains one step of one sequence; the limit is on its anonymous memory beyond
what it had before its first long forward, which is where activations are. Plain PyTorch's longest is found to one part
in eight; then Pagoda is tried at eight times the length that was too much for it, and on from there.

    python benchmarks/sequence.py [--limit 768MiB] [--vocab 65536] [--out FILE]
    python benchmarks/sequence.py --compare throughput [--length 1024] [--rounds 12] [--out FILE]

Throughput is compared where both fit, with as many steps of each in turn, in every round in another order; the ratio is
that of plain PyTorch's seconds over Pagoda's.
"""

import json
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from torch import nn

import pagoda
from beyond_memory import resident_bytes
from pagoda.memory.sizes import parse_bytes
from script import begin, machine, write
from training import llama
from turns import ROOT, Checkout, ratio_of, serve, settings_of_process, take_turns

NAMES = {"plain": False, "pagoda": True}
SHORTEST, LONGEST = 256, 1 << 14
MOST_SECONDS = 90
"""Of one attempt."""
Sizes = tuple[int, int, int]
"""Vocabulary, hidden size, layers."""


def build(sizes: Sizes, length: int) -> nn.Module:
    vocab, hidden, layers = sizes
    torch.manual_seed(0)
    model = llama(vocab, hidden, 2 * hidden, layers, max_position_embeddings=length, tie_word_embeddings=True)
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def trainer(paged: bool, sizes: Sizes, length: int) -> Callable[[torch.Tensor], None]:
    """What trains one step on tokens [1, S]; its state, gradients and libraries' own buffers are there."""
    torch.set_num_threads(2)
    model = build(sizes, length)
    optimizer: torch.optim.Optimizer
    if paged:
        model = pagoda.chunked_loss(model)
        model, optimizer = pagoda.wrap(model, pagoda.AdamW(), memory=pagoda.Memory(host="2GiB"), precision="bf16")
    else:
        model = model.bfloat16()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step()

    def step(ids: torch.Tensor) -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step(tokens_of(32))
    return step


def tokens_of(length: int) -> torch.Tensor:
    return torch.randint(256, (1, length), generator=torch.Generator().manual_seed(0))


def attempt(pipe: Any, paged: bool, sizes: Sizes, length: int, limit: int) -> None:
    """Send the seconds of a step, or None where memory was not enough."""
    step = trainer(paged, sizes, length)
    allowed = resident_bytes("self", "VmData") + limit
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
    start = time.perf_counter()
    try:
        step(tokens_of(length))
    except (RuntimeError, MemoryError):
        pipe.send(None)
        return
    pipe.send(time.perf_counter() - start)


def trains(paged: bool, sizes: Sizes, length: int, limit: int) -> bool:
    """Whether a step of `length` tokens fits, in a process of its own; not, too, where that is killed or hangs."""
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe(duplex=False)
    process = context.Process(target=attempt, args=(its, paged, sizes, length, limit))
    process.start()
    its.close()
    seconds: float | None = None
    with suppress(EOFError):
        if mine.poll(MOST_SECONDS):
            seconds = mine.recv()
    process.kill()
    process.join()
    said = "does not train" if seconds is None else f"trains, a step in {seconds:.1f} s"
    print("pagoda" if paged else "plain", length, said, flush=True)
    return seconds is not None


def longest_plain(sizes: Sizes, limit: int) -> tuple[int, int]:
    """The longest length that trains, and one at most an eighth longer that does not."""
    fits, fails = 0, SHORTEST
    while trains(False, sizes, fails, limit):
        fits, fails = fails, 2 * fails
    step = max(64, fits // 8)
    while fails - fits > step:
        middle = fits + (fails - fits) // 2 // 64 * 64
        fits, fails = (middle, fails) if trains(False, sizes, middle, limit) else (fits, middle)
    return fits, fails


def longest_paged(sizes: Sizes, limit: int, start: int) -> int:
    """The longest length that trains, of those that are a power of two times `start`; 0 if that one does not."""
    length = 0
    while (tried := 2 * length or start) <= max(LONGEST, start) and trains(True, sizes, tried, limit):
        length = tried
    return length


def serve_steps(paged: bool, sizes: list[int], length: int, steps: int) -> None:
    """A process that trains so many steps when it is its turn."""
    vocab, hidden, layers = sizes
    step, ids = trainer(paged, (vocab, hidden, layers), length), tokens_of(length)
    serve({"steps": lambda: [step(ids) for _ in range(steps)]})


def compare_throughput(sizes: Sizes, length: int, rounds: int, steps: int) -> dict[str, Any]:
    """Seconds of a step of each, and the ratio of both, round by round."""
    settings = {"sizes": sizes, "length": length, "steps": steps}
    processes = [Checkout(ROOT, __file__, {"paged": paged, **settings}) for paged in NAMES.values()]
    plain, paged = (turns["steps"] for turns in take_turns(processes, ["steps"], rounds))
    step_s = {name: statistics.median(seconds) / steps for name, seconds in zip(NAMES, (plain, paged), strict=True)}
    return {"length": length, "step_s": step_s, "ratio": ratio_of(plain, paged)}


def main(
    limit: str = "768MiB",
    vocab: int = 65536,
    hidden: int = 128,
    layers: int = 2,
    compare: Literal["length", "throughput"] = "length",
    length: int = 512,
    rounds: int = 12,
    steps: int = 1,
    out: Path | None = None,
) -> None:
    """Print the longest sequence of each under `limit`, or the throughput of each at `length` without one."""
    begin()
    sizes = vocab, hidden, layers
    result: dict[str, Any] = {**machine(), "model": {"vocab": vocab, "hidden": hidden, "layers": layers}}
    if compare == "length":
        nbytes = parse_bytes(limit, "limit")
        plain, too_long = longest_plain(sizes, nbytes)
        paged = longest_paged(sizes, nbytes, 8 * too_long)
        result |= {"limit": limit, "plain": plain, "plain_fails": too_long, "pagoda": paged, "ratio": paged / plain}
    else:
        result |= compare_throughput(sizes, length, rounds, steps)
    print(json.dumps(result, indent=1))
    write(out, result)


if __name__ == "__main__":
    if (settings := settings_of_process()) is not None:
        serve_steps(**settings)
    else:
        tyro.cli(main)
