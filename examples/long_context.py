"""Long sequences on several ranks: each rank has a part of every sequence, and the state is divided over all of them.

torchrun --nproc-per-node=2 examples/long_context.py [STEPS]

With 4 processes, two groups of two ranks train on a sequence each.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import pagoda

steps, length, ranks = int(next((word for word in sys.argv[1:] if word.isdigit()), "20")), 512, 2
sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}


def main():
    mesh = pagoda.open_mesh()
    with pagoda.deferred_init():
        model = LlamaForCausalLM(LlamaConfig(vocab_size=256, use_cache=False, **sizes)).train()
    model, optimizer = pagoda.wrap(
        pagoda.chunked_loss(model),
        pagoda.AdamW(lr=3e-3),
        memory=pagoda.Memory(host="64MiB"),
        max_grad_norm=1.0,
        activations="recompute",
        tiles=pagoda.Tiles(sequence_tiles="auto"),
        mesh=mesh,
    )
    sequences = pagoda.divide_sequences(model, ranks)
    text = torch.tensor(list(Path(torch.__file__).read_bytes()))
    groups, group = mesh.size // ranks, mesh.rank // ranks
    for step in range(steps):
        start = (step * groups + group) * length % (len(text) - length)  # the same on all ranks of a group
        ids = text[start : start + length][None]
        part = sequences.part({"input_ids": ids, "labels": ids})
        loss = part.loss(model(**part.inputs).logits)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if mesh.rank == 0:
            print(f"step {step + 1}  loss {mean / mesh.size:.4f}", flush=True)
    optimizer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
