"""A model of layers and what users do with it; training loops that depart from the usual one, each with its model."""

from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from reference import InMemory
from torch import nn
from zoo import Loop, Outcome, Plain, assert_equal, batch, loss_of, take_step

import pagoda
from pagoda.optimizer import PagedOptimizer

STEPS = 4
WIDTH = 160
OfStep = Callable[[Any, torch.Generator, Outcome, int], None]
Wrapped = tuple[nn.Module, PagedOptimizer]


class Layers(nn.Module):
    """A stack of layers from which each call picks some, and a loss of its own."""

    def __init__(self, depth: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(depth))

    def forward(self, x: torch.Tensor, picked: list[int]) -> torch.Tensor:
        x = x.to(self.layers[0][0].weight.dtype)
        for index in picked:
            x = x + self.layers[index](x)
        return x.float().square().mean()


def layers(depth: int = 3) -> nn.Module:
    """The same each time."""
    torch.manual_seed(0)
    return Layers(depth)


def inputs(seed: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))


def backward(model: nn.Module, seed: int, picked: Sequence[int] = (0, 1, 2)) -> float:
    """Forward and backward of a model of `Layers`; its loss."""
    loss: torch.Tensor = model(inputs(seed), [*picked])
    loss.backward()
    return loss.item()


def loss_of_layers(model: Any) -> torch.Tensor:
    """Of a model of `Layers`."""
    loss: torch.Tensor = model(torch.ones(2, WIDTH), [0, 1, 2])
    return loss


def train_layers(model: Any, optimizer: Any, steps: int = 2) -> None:
    """Steps of a model of `Layers`."""
    for _ in range(steps):
        loss_of_layers(model).backward()
        optimizer.step()


def state_of(model: nn.Module, optimizer: PagedOptimizer) -> Outcome:
    """All that training has changed."""
    return Outcome(weights=model.state_dict(), optimizer=optimizer.state_dict())


def in_memory(model: nn.Module, loop: Loop, lr: float = 1e-2, is_split: bool = False) -> Outcome:
    """Training with torch alone, one parameter at a time, by the definition of the update."""
    outcome = Outcome()
    optimizer = InMemory(model.parameters(), pagoda.AdamW(lr=lr, weight_decay=0.1), is_split)
    torch.manual_seed(2)
    loop(model, optimizer, outcome)
    outcome.weights = model.state_dict()
    taken = [optimizer.steps[param] for param in model.parameters()]
    outcome.optimizer = {"state": {index: {"step": steps} for index, steps in enumerate(taken) if steps}}
    return outcome


def assert_trained_alike(wrapped: Any, by_torch: Any) -> None:
    """A wrapped model was trained to the bits of one `in_memory`: a parameter without a gradient has no state."""
    assert wrapped.losses == by_torch.losses
    assert_equal(wrapped.weights, by_torch.weights)
    steps = [{index: of["step"] for index, of in run.optimizer["state"].items()} for run in (wrapped, by_torch)]
    assert steps[0] == steps[1]


def assert_same_state(one: Wrapped, other: Wrapped) -> None:
    """Two wrapped models have the same weights and optimizer states, to the bit."""
    state_of(*one).assert_same_bits(state_of(*other))


USES: dict[str, Callable[[Any, Any, Path], object]] = {
    "forward": lambda model, optimizer, path: loss_of_layers(model),
    "a-layer": lambda model, optimizer, path: model.layers[0](torch.ones(2, WIDTH)),
    "state-dict": lambda model, optimizer, path: model.state_dict(),
    "load-state-dict": lambda model, optimizer, path: model.load_state_dict(Layers().state_dict()),
    "full-state-dict": lambda model, optimizer, path: pagoda.full_state_dict(model),
    "model-state": lambda model, optimizer, path: pagoda.ModelState(model).state_dict(),
    "gathered": lambda model, optimizer, path: pagoda.gathered(model).__enter__(),
    "step": lambda model, optimizer, path: optimizer.step(),
    "zero-grad": lambda model, optimizer, path: optimizer.zero_grad(),
    "clip": lambda model, optimizer, path: optimizer.clip_grad_norm_(1.0),
    "drain": lambda model, optimizer, path: optimizer.synchronize(),
    "optimizer-state": lambda model, optimizer, path: optimizer.state_dict(),
    "save": lambda model, optimizer, path: optimizer.save_checkpoint(path / "another"),
    "load": lambda model, optimizer, path: optimizer.load_checkpoint(path / "checkpoint"),
}
"""What users do with a model of `Layers` and its optimizer, and a directory with a checkpoint."""


class Nested(nn.Module):
    """Modules in modules, each with a large parameter of its own that its forward needs from beginning to end."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.inner = Nested(depth - 1) if depth else nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.weight.dtype)
        return x + self.inner(x @ self.weight) @ self.weight


def learn(loss: torch.Tensor, outcome: Outcome, **options: bool) -> None:
    """Backward; notes the loss."""
    loss.backward(**options)
    outcome.losses.append(loss.item())


def every_step(of_step: OfStep, steps: int = STEPS) -> Loop:
    """A loop over `of_step(model, generator of the data, outcome, number)`: each step calls it, and steps."""

    @wraps(of_step)
    def loop(model: nn.Module, optimizer: Any, outcome: Outcome) -> None:
        generator = torch.Generator().manual_seed(1)
        for number in range(steps):
            of_step(model, generator, outcome, number)
            take_step(optimizer, outcome)

    return loop


def plain_loss(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
    return loss_of(model(**batch("plain", generator)))


def rows(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=generator)


def layers_skipped_at_random(model: Any, generator: Any, outcome: Outcome, step: int) -> None:
    kept = (torch.rand(8, generator=generator) < 0.6).nonzero().flatten().tolist()
    order = kept or [step % 8]
    learn(model(rows(generator), order if step % 2 else order[::-1]), outcome)


def no_gradient_in_one_micro_batch(model: Any, generator: Any, outcome: Outcome, step: int) -> None:
    """Layer 3 is used in the second pass only, layer 4 in the first two steps only, layer 2 twice in one pass."""
    for picked in ([0, 1, 2], [0, 3, 2, 2] if step < 2 else [0, 4, 2]):
        learn(model(rows(generator), picked), outcome)


def several_forwards_before_their_backwards(model: Any, generator: Any, outcome: Outcome, step: int) -> None:
    """As in a stage of a pipeline: F F B F B F B B, later F F F F B B B B."""
    waiting: list[torch.Tensor] = []
    for do in "FFBFBFBB" if step < 3 else "FFFFBBBB":
        if do == "F":
            waiting.append(plain_loss(model, generator) / 4)
        else:
            learn(waiting.pop(0), outcome)


def parts_with_graphs_of_their_own(model: Any, generator: Any, outcome: Outcome, _step: int) -> None:
    """As in interleaved stages: nobody calls the model, each part has several graphs at once, and gradients go from
    one to the other by hand."""
    passes = [rows(generator).to(model.layers[0][0].weight.dtype) for _ in range(3)]
    graphs: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in passes]
    for part in range(2):
        for number, x in enumerate(passes):
            x = x.detach().requires_grad_()
            y = x
            for layer in model.layers[4 * part : 4 * part + 4]:
                y = y + layer(y)
            graphs[number].append((x, y))
            passes[number] = y
    for (first_x, first_y), (x, y) in graphs:
        loss = y.float().square().mean()
        outcome.losses.append(loss.item())
        y.backward(torch.autograd.grad(loss, y)[0])
        first_y.backward(x.grad)
        assert first_x.grad is not None


def gradient_penalty(model: Any, generator: Any, outcome: Outcome, _step: int) -> None:
    """A second backward through the first one's graph."""
    x = rows(generator).requires_grad_()
    loss: torch.Tensor = model(x, [0, 1, 2])
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    learn(loss + slope.square().sum(), outcome)


CASES: dict[str, tuple[Callable[[], nn.Module], Loop]] = {
    of_step.__name__: (build, every_step(of_step, steps))
    for build, of_step, steps in (
        (Layers, layers_skipped_at_random, 2 * STEPS),
        (Layers, no_gradient_in_one_micro_batch, STEPS),
        (Plain, several_forwards_before_their_backwards, STEPS + 1),
        (Layers, parts_with_graphs_of_their_own, STEPS),
        (Layers, gradient_penalty, STEPS),
    )
}
"""A model, and a loop that must not depend on where its state lives."""


def built(name: str) -> nn.Module:
    """The model of a case, the same each time."""
    torch.manual_seed(0)
    return CASES[name][0]().train()
