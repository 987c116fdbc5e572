"""Python's share of a step: what thousands of small units cost above plain PyTorch, for each parameter and each unit.

    python benchmarks/bookkeeping.py [--units 2000] [--rounds 9] [--cpu] [--against CHECKOUT] [--out FILE]

The model is a residual stream of small linear layers, and each layer is a unit of its own. Its arithmetic is nearly
nothing, and torch does it in one thread. So the step of the same model in plain PyTorch (fused AdamW), subtracted round
by round, leaves the bookkeeping. State is in RAM in place, or weights are leased from an arena that holds a quarter of
them. With --against, another checkout, such as a git worktree of an earlier commit, takes turns with this one. --cpu
counts the seconds that the process's threads compute, without those in which they wait for each other or for other
programs: for a busy machine.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import nn

import pagoda
from turns import ROOT, Checkout, ratio_of, serve, settings_of_process, shown, take_turns

WIDTH, ROWS = 32, 8
PARAMS_PER_UNIT = 2
UNIT_BYTES = 8 << 10
"""Of the weights of a layer, in pages of 4 KiB."""
LR = 1e-4


class Net(nn.Module):
    """Linear layers, each of which adds a little to the stream."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        linear = [nn.Linear(WIDTH, WIDTH) for _ in range(layers)]
        self.layers = nn.ModuleList(linear)
        for layer in linear:
            nn.init.normal_(layer.weight, std=1e-3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def stepper(net: nn.Module, optimizer: torch.optim.Optimizer, drain: Callable[[], None]) -> Callable[[], None]:
    """A function that takes one step, until all of it has ended."""
    x = torch.ones(ROWS, WIDTH)

    def step() -> None:
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        drain()

    return step


def serve_steps(units: int, cpu: bool) -> None:
    """A process that holds the model three times, and trains the one whose turn it is."""
    torch.set_num_threads(1)  # threads that wait for each other would be most of the step on a busy machine
    torch.manual_seed(0)
    plain = Net(units)
    turns = {"plain": stepper(plain, torch.optim.AdamW(plain.parameters(), lr=LR, fused=True), lambda: None)}
    host = 8 * units * UNIT_BYTES
    memories = {
        "RAM in place": pagoda.Memory(host=host, unit_limit=UNIT_BYTES),
        "leases": pagoda.Memory(device=f"cpu:{units * UNIT_BYTES // 4}", host=host, unit_limit=UNIT_BYTES),
    }
    for name, memory in memories.items():
        net, optimizer = pagoda.wrap(
            Net(units), pagoda.AdamW(lr=LR), memory=memory, precision="fp32", gradient_accumulation_steps=1
        )
        made = len(pagoda.plan_of(net).units)
        assert made == units, f"{name}: {made} units in place of {units}"
        turns[name] = stepper(net, optimizer, optimizer.synchronize)
    serve(turns, time.process_time if cpu else time.perf_counter)


def main(
    units: int = 2000, rounds: int = 9, cpu: bool = False, against: Path | None = None, out: Path | None = None
) -> None:
    """Print microseconds for each parameter and each unit."""
    from script import machine, write

    roots = {"new": ROOT} if against is None else {"new": ROOT, "old": against}
    names = ["plain", "RAM in place", "leases"]
    checkouts = [Checkout(root, __file__, {"units": units, "cpu": cpu}) for root in roots.values()]
    seconds = dict(zip(roots, take_turns(checkouts, names, rounds), strict=True))
    table = Table("state", "", "plain s", "step s", "us/parameter", "us/unit", "new / old (quartiles)")
    for name in names[1:]:
        above = {
            label: [step - plain for step, plain in zip(turns[name], turns["plain"], strict=True)]
            for label, turns in seconds.items()
        }
        for label, turns in seconds.items():
            us = 1e6 * statistics.median(above[label]) / units
            ratio = shown(ratio_of(above["new"], above["old"])) if label == "old" else ""
            steps = (f"{statistics.median(turns[of]):.3f}" for of in ("plain", name))
            table.add_row(name, label, *steps, f"{us / PARAMS_PER_UNIT:.1f}", f"{us:.1f}", ratio)
    Console().print(f"{units} units of {PARAMS_PER_UNIT} parameters, {rounds} rounds", table, sep="\n")
    write(out, {**machine(), "units": units, "rounds": rounds, "cpu": cpu, "seconds": seconds})


if __name__ == "__main__":
    if (settings := settings_of_process()) is not None:
        serve_steps(**settings)
    else:
        tyro.cli(main)
