"""A script in the manner of torchtitan: a `parallelize` function for the model, and torch.distributed.checkpoint.

python examples/titan.py [STEPS] [plain]
torchrun --nproc-per-node=2 examples/titan.py [STEPS]

The lines that Pagoda changes end with `# Pagoda`. With `plain` it is torch's own loop, on one process. A run goes on
from its last checkpoint, in the directory `titan-run`.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import pagoda  # Pagoda

steps = int(next((word for word in sys.argv[1:] if word.isdigit()), "40"))
plain = "plain" in sys.argv
vocabulary, width, layers, length, batch_size = 256, 96, 4, 64, 4
save_every, out = max(1, steps // 2), Path("titan-run")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Predicts the next byte from the four before."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.mix = nn.Conv1d(width, width, kernel_size=4)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids):  # [batch, length]
        x = F.pad(self.tokens(ids).transpose(1, 2), (3, 0))
        x = self.mix(x).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def parallelize(model, mesh):
    """Tensor parallelism on ranks, compiled blocks on one; what data-parallel ranks share out is left to `wrap`."""
    for block in model.blocks:
        if mesh is not None:
            parallelize_module(block, mesh.tensor, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        else:
            block.compile(backend="aot_eager")  # inductor, where there is a C++ compiler
    return model


def build():
    """The model and its optimizer, and what a checkpoint is made of."""
    torch.manual_seed(0)
    model = Model()
    if plain:
        for block in model.blocks:
            block.compile(backend="aot_eager")
        return model, torch.optim.SGD(model.parameters(), lr=0.1), {}
    mesh = pagoda.open_mesh(tensor_parallel=2) if dist.is_torchelastic_launched() else None  # Pagoda
    model, optimizer = pagoda.wrap(  # Pagoda
        parallelize(model, mesh),
        pagoda.SGD(lr=0.1),
        memory=pagoda.Memory(host="6MiB"),
        precision="fp32",
        mesh=mesh,
    )
    state = {"model": pagoda.ModelState(model), "optim": pagoda.OptimizerState(optimizer)}  # Pagoda
    return model, optimizer, state


def main():
    model, optimizer, state = build()
    text = torch.tensor(list(Path(torch.__file__).read_bytes()))
    saved = sorted(out.glob("step-*")) if state else []
    first = int(saved[-1].name.removeprefix("step-")) if saved else 0
    if saved:
        dcp.load(state, checkpoint_id=saved[-1])  # type: ignore[attr-defined]
    talks = not dist.is_initialized() or dist.get_rank() == 0
    for step in range(first, steps):
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(text) - length - 1, (batch_size,), generator=generator)
        ids = torch.stack([text[at : at + length + 1] for at in starts])
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if talks:
            print(f"step {step}: loss {loss.item():.5f}")
        if state and (step + 1) % save_every == 0:
            dcp.save(state, checkpoint_id=out / f"step-{step + 1:06d}")  # type: ignore[attr-defined]
    if not plain:
        optimizer.close()  # Pagoda


if __name__ == "__main__":
    main()
