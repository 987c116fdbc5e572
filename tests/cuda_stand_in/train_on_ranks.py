"""Trains on as many stand-ins for a GPU as there are processes, and prints what came of it, a line of JSON from each.

Arguments, for each model that is trained: one of the zoo, or "moe" for experts of which each of two ranks has half; and
the stage.
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
from zoo import Recipe, batch, loss_of  # noqa: E402

import pagoda  # noqa: E402
from cuda_stand_in.collectives import install_collectives  # noqa: E402
from pagoda.models import build_model  # noqa: E402

STEPS, PARTS = 3, 2
RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def mixture() -> tuple[nn.Module, Any]:
    """Experts on two ranks, with room for few of them on the device."""
    mesh = pagoda.open_mesh(expert_parallel=2)
    torch.manual_seed(RANK)
    model = build_model("mixtral-15m", seq_len=32)
    # transformers' default kernel and its balance loss call histc with integers, which the CPU's kernels do not take.
    model.set_experts_implementation("batched_mm")
    model.config.output_router_logits = False
    memory = pagoda.Memory(device="24MiB", host="1GiB", unit_limit="1MiB")
    return pagoda.wrap(model, pagoda.AdamW(), memory=memory, mesh=mesh, clip_grad_norm=1.0)


def divided(name: str, stage: int) -> tuple[nn.Module, Any]:
    """A model whose state is divided, with room for few units on the device."""
    mesh = pagoda.open_mesh(stage=stage) if SIZE > 1 else None
    memory = pagoda.Memory(device="336KiB", host="64MiB", page_size=4096, unit_limit="64KiB")
    model = Recipe(name).build()
    return pagoda.wrap(model, pagoda.AdamW(), memory=memory, precision="fp32", mesh=mesh, clip_grad_norm=1.0)


def main(name: str, stage: int) -> None:
    """Each rank takes its share of the micro-batches of a step."""
    model, optimizer = mixture() if name == "moe" else divided(name, stage)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        for part in range(PARTS):
            inputs = batch("llama" if name == "moe" else name, generator)
            if part % SIZE == RANK:
                loss = loss_of(model(**{key: value.cuda() for key, value in inputs.items()}))
                (loss * SIZE / PARTS).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = hashlib.sha256(b"".join(value.cpu().view(torch.uint8).numpy() for value in model.state_dict().values()))
    optimizer.close()
    print(json.dumps({"model": name, "weights": weights.hexdigest(), "races": native.take_races()}), flush=True)


torch.set_num_threads(1)
install_collectives(native)
for name, stage in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
    main(name, int(stage))
