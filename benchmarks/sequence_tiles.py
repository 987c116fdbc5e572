"""Long sequences in one process: plain PyTorch with checkpointing, the parts of ALST that one process can use
(DeepSpeed's TiledMLP and TiledFusedLogitsLoss, arXiv 2506.13996), and Pagoda with sequence tiles and a chunked loss.

Each system trains one short step and then one step of one long sequence, in a process of its own in which malloc
returns every freed block at once. All compute in fp32 on one thread, and have weights, gradients and AdamW's moments
in RAM before the long step. Seconds are those that cores work, which depend little on what else runs.

    python benchmarks/sequence_tiles.py [--lengths 16384 32768] [--cache DIR] --out FILE [--docs docs/long-sequences.md]
    python benchmarks/sequence_tiles.py --part docs --out FILE --docs docs/long-sequences.md
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from torch import nn
from torch.nn import functional

import pagoda
from activations import EXACT
from beyond_memory import resident_bytes
from marks import write_between_marks
from peer_suite.systems import DEEPSPEED
from script import machine, write
from training import llama

SIZES = {"vocab": 32768, "hidden": 384, "ffn": 1536, "layers": 3}
"""19 M parameters, and the ratio of widths of a Llama."""
SHORT = 256
LOSS_TOKENS = 1024
"""Tokens of ALST's loss at a time."""
SYSTEMS = {"plain": "plain PyTorch, checkpointing", "alst": "ALST's tiles", "pagoda": "Pagoda, `sequence_tiles`"}
Step = Callable[[torch.Tensor], float]


def model_for(length: int, checkpointing: bool) -> nn.Module:
    torch.manual_seed(0)
    model = llama(**SIZES, max_position_embeddings=length, tie_word_embeddings=True, num_key_value_heads=2)
    if checkpointing:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def in_pages(length: int) -> Step:
    model, optimizer = pagoda.wrap(
        pagoda.chunked_loss(model_for(length, checkpointing=False)),
        pagoda.AdamW(),
        memory=pagoda.Memory(host="2GiB"),
        precision="fp32",
        activations="recompute",
        tiles=pagoda.Tiles(sequence_tiles="auto"),
    )

    def step(ids: torch.Tensor) -> float:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.synchronize()
        return float(loss.item())

    return step


def in_memory(length: int, loss_of: Callable[[Any, torch.Tensor], torch.Tensor]) -> Step:
    model = model_for(length, checkpointing=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)

    def step(ids: torch.Tensor) -> float:
        loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return float(loss.item())

    return step


def alst(length: int) -> Step:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss, TiledMLP
    from transformers.models.llama.modeling_llama import LlamaMLP

    def mlp(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    def tiled(self: Any, x: torch.Tensor) -> torch.Tensor:
        pieces = -(-x.shape[1] // x.shape[2])  # as its documentation has it
        return TiledMLP.apply(mlp, self, x, pieces, list(self.parameters()))

    LlamaMLP.forward = tiled

    def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
        hidden = model.model(input_ids=ids).last_hidden_state
        targets = functional.pad(ids[:, 1:], (0, 1), value=-100)
        pieces = -(-ids.shape[1] // LOSS_TOKENS)

        def of_piece(head: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            # Its backward does not scale the gradient of the head, so the mean is taken in here.
            return functional.cross_entropy(head(x).float(), y, ignore_index=-100, reduction="sum") / (ids.numel() - 1)

        head = model.lm_head
        loss: torch.Tensor = TiledFusedLogitsLoss.apply(
            of_piece, head, hidden, targets, None, pieces, [head.weight], "sum"
        )
        return loss

    return in_memory(length, loss_of)


BUILD: dict[str, Callable[[int], Step]] = {
    "plain": lambda length: in_memory(length, lambda model, ids: model(input_ids=ids, labels=ids).loss),
    "alst": alst,
    "pagoda": in_pages,
}


def measure(system: str, length: int) -> dict[str, float]:
    """MiB that a step adds to this process at most, the seconds that cores work for it, and its loss."""
    torch.set_num_threads(1)
    step, generator = BUILD[system](length), torch.Generator().manual_seed(0)
    ids = torch.randint(SIZES["vocab"], (1, length), generator=generator)
    for _ in range(2):
        step(ids[:, :SHORT])
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before, started = resident_bytes("self", "VmRSS"), time.process_time()
    loss = step(ids)
    seconds = time.process_time() - started
    return {"added_mib": (resident_bytes("self", "VmHWM") - before) / 2**20, "core_s": seconds, "loss": loss}


def table(results: dict[str, Any]) -> str:
    rows = [
        "| tokens | system | memory that a step adds | of plain | core seconds, of plain |",
        "|--:|---|--:|--:|--:|",
    ]
    for length, of_length in results["lengths"].items():
        plain = of_length["plain"]
        for name, label in SYSTEMS.items():
            its = of_length[name]
            memory, seconds = its["added_mib"] / plain["added_mib"], its["core_s"] / plain["core_s"]
            rows.append(f"| {int(length):,} | {label} | {its['added_mib']:,.0f} MiB | {memory:.2f} | {seconds:.2f} |")
    return "\n".join(rows)


def main(
    lengths: tuple[int, ...] = (16384, 32768),
    systems: tuple[str, ...] = (*SYSTEMS,),
    cache: Path | None = None,
    out: Path | None = None,
    docs: Path | None = None,
    part: Literal["all", "docs"] = "all",
    one: tuple[str, int] | None = None,
) -> None:
    if one is not None:
        print(json.dumps(measure(*one)))
        return
    if part == "all":
        python, variables = replace(DEEPSPEED, prepare="").process(cache or Path(tempfile.gettempdir()))
        found: dict[str, dict[str, Any]] = {}
        if out is not None and out.exists():
            found = json.loads(out.read_text())["lengths"]  # those that are not measured now stay
        for length in lengths:
            for system in systems:
                command = [python if system == "alst" else sys.executable, __file__, "--one", system, str(length)]
                environment = {**os.environ, **variables, "GLIBC_TUNABLES": EXACT}
                done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
                found.setdefault(str(length), {})[system] = json.loads(done.stdout.splitlines()[-1])
                print(length, system, found[str(length)][system], flush=True)
        torch.set_num_threads(1)
        write(out, {**machine(), **SIZES, "lengths": found})
    if out is not None and docs is not None:
        write_between_marks(docs, "sequence_tiles.py", table(json.loads(out.read_text())))


if __name__ == "__main__":
    tyro.cli(main)
