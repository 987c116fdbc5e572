"""Trains on as many stand-ins for a GPU as there are processes, and prints what came of it, a line of JSON from each.

Arguments, for each model that is trained: one of the zoo, or "moe" for experts of which each of two ranks has half; and
the stage, or "alone" for each process by itself.
"""

import hashlib
import json
import os
import sys
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

from cuda_stand_in.cuda import install

native = install()

import torch  # noqa: E402
from torch import nn  # noqa: E402
from transformers import MixtralConfig, MixtralForCausalLM  # noqa: E402
from zoo import VOCABULARY, Recipe, batch, loss_of  # noqa: E402

import pagoda  # noqa: E402
from cuda_stand_in.collectives import install_collectives  # noqa: E402

STEPS, PARTS = 2, 2
RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def mixture() -> tuple[nn.Module, Any]:
    """Experts on two ranks, with room for few of them on the device."""
    mesh = pagoda.open_mesh(expert_parallel=2)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_local_experts": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    torch.manual_seed(RANK)
    model = MixtralForCausalLM(MixtralConfig(vocab_size=VOCABULARY, use_cache=False, **sizes, **heads))
    # transformers' default kernel calls histc with integers, which the CPU's kernels do not take.
    model.set_experts_implementation("batched_mm")
    memory = pagoda.Memory(device="384KiB", host="64MiB", page_size=4096)
    return pagoda.wrap(model, pagoda.AdamW(), memory=memory, mesh=mesh, clip_grad_norm=1.0)


def divided(name: str, stage: str) -> tuple[nn.Module, Any]:
    """A model whose state is divided, with room for few units on the device."""
    mesh = None if stage == "alone" else pagoda.open_mesh(stage=int(stage))
    memory = pagoda.Memory(device="336KiB", host="64MiB", page_size=4096, unit_limit="64KiB")
    model = Recipe(name).build()
    return pagoda.wrap(model, pagoda.AdamW(), memory=memory, precision="fp32", mesh=mesh, clip_grad_norm=1.0)


def main(name: str, stage: str) -> None:
    """Each rank takes its share of the micro-batches of a step."""
    model, optimizer = mixture() if name == "moe" else divided(name, stage)
    rank, size = (0, 1) if stage == "alone" else (RANK, SIZE)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        for part in range(PARTS):
            inputs = batch("llama" if name == "moe" else name, generator)
            if part % size == rank:
                loss = loss_of(model(**{key: value.cuda() for key, value in inputs.items()}))
                (loss * size / PARTS).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = hashlib.sha256(b"".join(value.cpu().view(torch.uint8).numpy() for value in model.state_dict().values()))
    optimizer.close()
    said = {"model": name, "stage": stage, "weights": weights.hexdigest(), "races": native.take_races()}
    os.write(1, f"{json.dumps(said)}\n".encode())  # at once: both ranks write to one pipe


torch.set_num_threads(1)
install_collectives(native)
for name, stage in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
    main(name, stage)
