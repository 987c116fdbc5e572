"""A pretraining script in the manner of LitGPT, on Lightning Fabric. The lines that Pagoda changes end with `# Pagoda`.

python examples/fabric.py [STEPS] [FILE]

A run goes on from its last checkpoint, in the directory `fabric-run`.
"""

import sys
from pathlib import Path

import lightning
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, LlamaConfig

import pagoda  # Pagoda
from pagoda.integrations import Paging  # Pagoda
from pagoda.integrations.lightning import PagodaFabricStrategy  # Pagoda

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 100
file = sys.argv[2] if len(sys.argv) > 2 else torch.__file__
length, batch_size, micro_batches, save_every, out = 64, 4, 2, max(1, steps // 2), Path("fabric-run")


class Bytes(Dataset):
    """Stretches of a file; the target is the byte that follows."""

    def __init__(self):
        self.text = torch.tensor(list(Path(file).read_bytes()))

    def __len__(self):
        return (len(self.text) - 1) // length

    def __getitem__(self, index):
        part = self.text[index * length : (index + 1) * length + 1]
        return part[:-1], part[1:]


def main(fabric):
    fabric.seed_everything(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=96, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4
    )
    with fabric.init_module():
        model = AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(Bytes(), batch_size=batch_size))
    state = {"model": model, "optimizer": optimizer, "step": 0, "micro_batch": 0}
    saved = sorted(out.glob("step-*"))
    if saved:
        fabric.load(saved[-1], state)
        fabric.print(f"resumed at step {state['step']}")
    train(fabric, state, loader)


def train(fabric, state, loader):
    model, optimizer = state["model"], state["optimizer"]
    for index, (ids, targets) in enumerate(loader):
        if index < state["micro_batch"]:
            continue
        if state["step"] == steps:
            return
        state["micro_batch"] = index + 1
        accumulating = state["micro_batch"] % micro_batches != 0
        with fabric.no_backward_sync(model, enabled=accumulating):
            logits = model(input_ids=ids).logits
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            fabric.backward(loss / micro_batches)
        if accumulating:
            continue
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        state["step"] += 1
        if state["step"] % 10 == 0 or steps < 10:
            fabric.print(f"step {state['step']}: loss {loss.item():.5f}")
        if state["step"] % save_every == 0:
            fabric.save(out / f"step-{state['step']:06d}", state)


if __name__ == "__main__":
    paging = Paging(memory=pagoda.Memory(host="3MiB", ssd="."))  # Pagoda
    strategy = PagodaFabricStrategy(paging=paging)  # Pagoda
    fabric = lightning.Fabric(accelerator="cpu", devices=1, strategy=strategy, precision="32-true")
    fabric.launch()
    main(fabric)
    fabric.strategy.optimizer_in_pages.close()  # Pagoda
