"""Measures Pagoda's overhead per parameter: the time that a step takes for it, whatever its size, in addition to plain
PyTorch's."""

import time
from contextlib import closing

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pagoda.api import wrap
from pagoda.calibrate.meter import Meter
from pagoda.calibrate.model import drop_gradient
from pagoda.config.memory import Memory
from pagoda.mesh.mesh import Mesh
from pagoda.mesh.world import World
from pagoda.optim import AdamW
from pagoda.plan.ranks import ALONE
from pagoda.simulate.hardware import Figure

_LAYERS, _LINEARS = 4, 8
_WIDTH, _ROWS = 128, 1024
"""Sizes whose products take about a tenth of a millisecond, with weights so small that storing and updating them takes
no time."""
_HOST = 64 << 20
_STEPS = 2
"""Steps of a turn. The first one finds the other model's data in the caches."""


class _Net(nn.Module):
    """Layers that are recomputed in backward. Each has as many parameters as a transformer's layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(_LAYERS):
            linears = [nn.Sequential(nn.Linear(_WIDTH, _WIDTH, bias=False), nn.Tanh()) for _ in range(_LINEARS)]
            self.layers.append(nn.Sequential(*linears))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def measure_bookkeeping(meter: Meter) -> Figure:
    """Seconds per parameter that a step of a small net in RAM takes in addition to its plain compute.

    Restores torch's random state.
    """
    meter.report("bookkeeping of parameters")
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        plain, net = _Net(), _Net()
        for param in plain.parameters():
            param.register_post_accumulate_grad_hook(drop_gradient)  # type: ignore[no-untyped-call]
        x = torch.randn(_ROWS, _WIDTH)
        alone = Mesh(World(), ALONE)  # also where torchrun has started others
        paged, optimizer = wrap(
            net, AdamW(), memory=Memory(host=_HOST), precision="fp32", gradient_accumulation_steps=1, mesh=alone
        )

        def seconds(model: nn.Module) -> float:
            """Seconds per parameter of the last step of a turn."""
            for _ in range(_STEPS):
                start = time.perf_counter()
                model(x).sum().backward()
                if model is paged:
                    optimizer.step()
                elapsed = time.perf_counter() - start
            return elapsed / (_LAYERS * _LINEARS)

        with closing(optimizer):
            seconds(paged)
            seconds(paged)  # by now with a plan that follows a step
            return meter.difference(
                lambda: seconds(plain), lambda: seconds(paged), "a step of small linear layers in RAM"
            )
