"""A pipeline by torch.distributed.pipelining, whose stages keep their state in pages.

torchrun --nproc-per-node=2 examples/pipeline.py [STEPS]

With 4 processes, two of them share out the state of each stage. A run goes on from its last checkpoint, in the
directory `pipeline-run`.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

import pagoda

steps = int(next((word for word in sys.argv[1:] if word.isdigit()), "40"))
vocabulary, width, layers, length, micro_batches, rows = 256, 96, 8, 64, 4, 2
out = Path("pipeline-run")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stage(nn.Module):
    """The layers of a stage, under the names that they have in the whole model."""

    def __init__(self, number, count):
        super().__init__()
        mine = range(number * layers // count, (number + 1) * layers // count)
        self.tokens = nn.Embedding(vocabulary, width) if number == 0 else None
        self.blocks = nn.ModuleDict({str(layer): Block() for layer in mine})
        self.head = nn.Linear(width, vocabulary) if number == count - 1 else None

    def forward(self, x):  # [rows, length] ids, or [rows, length, width]
        if self.tokens is not None:
            x = self.tokens(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()) / micro_batches


def main():
    mesh = pagoda.open_mesh(pipeline_parallel=2)
    stage, count = mesh.pipeline_stage, mesh.ranks.pipeline_parallel
    with pagoda.deferred_init():
        model = Stage(stage, count)
    model, optimizer = pagoda.wrap(
        model, pagoda.AdamW(lr=1e-3), memory=pagoda.Memory(host="16MiB"), max_grad_norm=1.0, mesh=mesh
    )
    saved = sorted(out.glob("step-*"))
    first = optimizer.load_checkpoint(saved[-1])["step"] if saved else 0
    part = PipelineStage(model, stage, count, torch.device("cpu"), group=mesh.pipeline)
    schedule = Schedule1F1B(part, micro_batches, loss_fn=loss_of, scale_grads=False)  # the loss is divided already
    text = torch.tensor(list(Path(torch.__file__).read_bytes()))
    for step in range(first, steps):
        generator = torch.Generator().manual_seed(mesh.size * step + mesh.rank)  # the same on all stages
        starts = torch.randint(len(text) - length - 1, (micro_batches * rows,), generator=generator)
        ids = torch.stack([text[at : at + length + 1] for at in starts])
        losses: list[torch.Tensor] = []
        given = (ids[:, :-1],) if stage == 0 else ()
        asked: dict = {"target": ids[:, 1:], "losses": losses} if stage == count - 1 else {}
        schedule.step(*given, **asked)
        optimizer.step()
        optimizer.zero_grad()
        if losses and mesh.rank == 0:
            print(f"step {step}: loss {float(sum(losses)):.5f}", flush=True)
    optimizer.save_checkpoint(out / f"step-{steps:06d}", {"step": steps})
    optimizer.close()


if __name__ == "__main__":
    main()
