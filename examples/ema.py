"""An exponential moving average of the weights, for a model that does not fit RAM: it is a file, mapped into memory.

python examples/ema.py [STEPS]
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import pagoda

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 150
DECAY, EVERY = 0.9, 5


class Average:
    """Of each trainable parameter, in fp32, in one file; the system keeps in RAM what of it there is room for."""

    def __init__(self, model, path):
        sizes = {name: param.numel() for name, param in model.named_parameters() if param.requires_grad}
        flat = torch.from_file(str(path), shared=True, size=sum(sizes.values()), dtype=torch.float32)
        parts = dict(zip(sizes, flat.split([*sizes.values()]), strict=True))
        self.values = {name: parts[name].view(model.get_parameter(name).shape) for name in sizes}
        self.update(model, decay=0.0)

    def update(self, model, decay=DECAY):
        """One parameter is in memory at a time."""
        for name, value in self.values.items():
            param = model.get_parameter(name)
            with pagoda.gathered(param), torch.no_grad():
                value.lerp_(param.float(), 1 - decay)

    def swap(self, model):
        """Exchange the weights with their average: to evaluate with it, and back."""
        for name, value in self.values.items():
            param = model.get_parameter(name)
            with pagoda.gathered(param, modify=True), torch.no_grad():
                weight = param.float().clone()
                param.copy_(value)
                value.copy_(weight)


torch.manual_seed(0)
layers = [nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)]
with tempfile.TemporaryDirectory() as folder:
    model, optimizer = pagoda.wrap(
        nn.Sequential(*layers), pagoda.AdamW(lr=1e-2), memory=pagoda.Memory(host="1MiB", ssd=folder), precision="fp32"
    )
    average = Average(model, Path(folder, "average"))
    held_out = torch.randn(256, 64)

    def loss_of(x):
        noise = 1.0 * torch.randn(len(x), 1) if model.training else 0.0
        return (model(x) - x[:, :1].sin() - noise).square().mean()

    for step in range(steps):
        loss_of(torch.randn(16, 64)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY == EVERY - 1:
            average.update(model)
    model.eval()
    with torch.no_grad():
        last = loss_of(held_out).item()
        average.swap(model)
        averaged = loss_of(held_out).item()
        average.swap(model)
        assert loss_of(held_out).item() == last, "the weights are back"
    print(f"held-out loss of the last weights {last:.4f}, of their average {averaged:.4f}")
    optimizer.close()
