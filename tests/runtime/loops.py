"""Training loops that depart from the usual one, each with a model that can take it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn
from zoo import ConvNet, Loop, Outcome, batch, gpt2, llama, loss_of, take_step

import pagoda
from pagoda.optimizer import PagedOptimizer

STEPS = 4
WIDTH = 160
LossOfStep = Callable[[nn.Module, torch.Generator, Outcome], torch.Tensor]
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
    "drain": lambda model, optimizer, path: optimizer.drain(),
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


@dataclass(frozen=True)
class Case:
    """A model, and a loop that must not depend on where its state lives."""

    build: Callable[[], nn.Module]
    loop: Loop


def one_loss_a_step(loss: LossOfStep) -> Loop:
    """A loop over `loss(model, generator of the data, outcome)`: each step is one of its losses, backward, step."""

    @wraps(loss)
    def loop(model: nn.Module, optimizer: Any, outcome: Outcome) -> None:
        generator = torch.Generator().manual_seed(1)
        for _ in range(STEPS):
            of_step = loss(model, generator, outcome)
            of_step.backward()
            outcome.losses.append(of_step.item())
            take_step(optimizer, outcome)

    return loop


@one_loss_a_step
def evaluation_between_forward_and_backward(
    model: nn.Module, generator: torch.Generator, outcome: Outcome
) -> torch.Tensor:
    loss = loss_of(model(**batch("gpt2", generator)))
    with torch.no_grad():
        outcome.losses.append(loss_of(model(**batch("gpt2", generator))).item())
    return loss


@one_loss_a_step
def inference_mode_between_steps(model: nn.Module, generator: torch.Generator, outcome: Outcome) -> torch.Tensor:
    with torch.inference_mode():
        outcome.losses.append(loss_of(model(**batch("llama", generator))).item())
    return loss_of(model(**batch("llama", generator)))


def gradients_asked_for_by_the_user(model: nn.Module, optimizer: Any, outcome: Outcome) -> None:
    """`torch.autograd.grad` of parameters returns gradients and leaves the accumulated ones alone."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        loss = model(**batch("conv", generator))
        loss.backward()
        other = model(**batch("conv", generator))
        for grad in torch.autograd.grad(other, [p for p in model.parameters() if p.requires_grad]):
            outcome.losses.append(grad.double().square().sum().item())
        outcome.losses.append(loss.item())
        take_step(optimizer, outcome)


def layers_skipped_at_random(model: nn.Module, optimizer: Any, outcome: Outcome) -> None:
    generator = torch.Generator().manual_seed(1)
    for step in range(2 * STEPS):
        kept = (torch.rand(8, generator=generator) < 0.6).nonzero().flatten().tolist()
        order = kept or [step % 8]
        loss = model(torch.randn(4, WIDTH, generator=generator), order if step % 2 else order[::-1])
        loss.backward()
        outcome.losses.append(loss.item())
        take_step(optimizer, outcome)


def no_gradient_in_one_micro_batch(model: nn.Module, optimizer: Any, outcome: Outcome) -> None:
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        # Layer 3 is used in the second pass only, layer 4 in the first two steps only, layer 2 twice in one pass.
        for picked in ([0, 1, 2], [0, 3, 2, 2] if step < 2 else [0, 4, 2]):
            loss = model(torch.randn(4, WIDTH, generator=generator), picked)
            loss.backward()
            outcome.losses.append(loss.item())
        take_step(optimizer, outcome)


def backward_twice(model: nn.Module, optimizer: Any, outcome: Outcome) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        loss = loss_of(model(**batch("llama", generator)))
        loss.backward(retain_graph=True)
        loss.backward()
        outcome.losses.append(loss.item())
        take_step(optimizer, outcome)


def two_graphs_at_once(model: nn.Module, optimizer: Any, outcome: Outcome) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        losses = [loss_of(model(**batch("llama", generator))) for _ in range(2)]
        (losses[0] * losses[1]).backward()
        outcome.losses += [loss.item() for loss in losses]
        take_step(optimizer, outcome)


def several_forwards_before_their_backwards(model: nn.Module, optimizer: Any, outcome: Outcome) -> None:
    """As in a stage of a pipeline: F F B F B F B B, later F F F F B B B B."""
    generator = torch.Generator().manual_seed(1)
    for step in range(5):
        waiting: list[torch.Tensor] = []
        for do in "FFBFBFBB" if step < 3 else "FFFFBBBB":
            if do == "F":
                waiting.append(loss_of(model(**batch("gpt2", generator))) / 4)
                outcome.losses.append(waiting[-1].item())
            else:
                waiting.pop(0).backward()
        take_step(optimizer, outcome)


def parts_with_graphs_of_their_own(model: nn.Module, optimizer: Any, outcome: Outcome) -> None:
    """As in interleaved stages: nobody calls the model, each part has several graphs at once, and gradients go from
    one to the other by hand."""
    generator = torch.Generator().manual_seed(1)
    layers: Any = model.layers
    for _ in range(STEPS):
        passes = [[torch.randn(4, WIDTH, generator=generator).to(layers[0][0].weight.dtype)] for _ in range(3)]
        graphs: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in passes]
        for part in range(2):
            for number, (x,) in enumerate(passes):
                x = x.detach().requires_grad_()
                y = x
                for layer in layers[4 * part : 4 * part + 4]:
                    y = y + layer(y)
                graphs[number].append((x, y))
                passes[number] = [y]
        for of_pass in graphs:
            loss = of_pass[-1][1].float().square().mean()
            outcome.losses.append(loss.item())
            of_pass[1][1].backward(torch.autograd.grad(loss, of_pass[1][1])[0])
            of_pass[0][1].backward(of_pass[1][0].grad)
        take_step(optimizer, outcome)


@one_loss_a_step
def one_layer_at_a_time(model: nn.Module, generator: torch.Generator, _outcome: Outcome) -> torch.Tensor:
    """The user calls the parts of a model, never the model."""
    x = torch.randn(4, WIDTH, generator=generator).to(model.layers[0][0].weight.dtype)
    for layer in model.layers:
        x = layer(layer(x))
    return x.float().square().mean()


@one_loss_a_step
def gradient_penalty(model: nn.Module, generator: torch.Generator, _outcome: Outcome) -> torch.Tensor:
    """A second backward through the first one's graph."""
    x = torch.randn(4, WIDTH, generator=generator).requires_grad_()
    loss: torch.Tensor = model(x, [0, 1, 2])
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + slope.square().sum()


def steps_without_gradients(model: nn.Module, optimizer: Any, outcome: Outcome) -> None:
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        if step % 2 == 0:
            loss = loss_of(model(**batch("conv", generator)))
            loss.backward()
            outcome.losses.append(loss.item())
        take_step(optimizer, outcome)


@one_loss_a_step
def gradient_of_an_input(model: nn.Module, generator: torch.Generator, outcome: Outcome) -> torch.Tensor:
    """Backward through the weights with no gradient for them, then a usual step."""
    images = batch("conv", generator)
    images["images"].requires_grad_()
    (slope,) = torch.autograd.grad(model(**images), images["images"])
    outcome.losses.append(slope.double().square().sum().item())
    return loss_of(model(**batch("conv", generator)))


CASES = {
    loop.__name__: Case(build, loop)
    for build, loop in (
        (gpt2, evaluation_between_forward_and_backward),
        (llama, inference_mode_between_steps),
        (ConvNet, gradients_asked_for_by_the_user),
        (Layers, layers_skipped_at_random),
        (Layers, no_gradient_in_one_micro_batch),
        (llama, backward_twice),
        (llama, two_graphs_at_once),
        (gpt2, several_forwards_before_their_backwards),
        (Layers, parts_with_graphs_of_their_own),
        (Layers, one_layer_at_a_time),
        (Layers, gradient_penalty),
        (ConvNet, steps_without_gradients),
        (ConvNet, gradient_of_an_input),
    )
}


def built(name: str) -> nn.Module:
    """The model of a case, the same each time."""
    torch.manual_seed(0)
    return CASES[name].build().train()
