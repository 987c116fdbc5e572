"""A model whose layers check the weights that they read, and give gradients that say where they come from."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from pagoda.prepare.experts import RoutedExperts


class Watcher(Protocol):
    """What layers report to."""

    def reads(self, layer: int, values: tuple[torch.Tensor, ...], forward: bool) -> None:
        """A layer reads its weights."""

    def gradients(self, layer: int, scale: float) -> tuple[float, ...] | None:
        """The gradient of each parameter, all of whose elements are equal, of a loss that was multiplied by `scale`.
        None if backward is to fail here."""

    def tensor(self, layer: int, size: int, value: float, dtype: torch.dtype) -> torch.Tensor:
        """A gradient that a layer's backward makes."""

    def saves(self) -> torch.Tensor:
        """An activation, of equal elements, that a layer saves for its backward."""

    def returned(self, activation: torch.Tensor, value: float) -> None:
        """A layer's backward gets the activation that had this value."""


class InterruptionError(Exception):
    """The program's own error, in the middle of a pass."""


class _Use(torch.autograd.Function):
    """A layer's forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, watcher: Watcher, layer: "Layer", *params: torch.Tensor) -> torch.Tensor:
        watcher.reads(layer.number, params, forward=True)
        ctx.watcher, ctx.layer = watcher, layer
        saved = [*params] if layer.is_read else []
        if layer.offloads:
            saved.append(watcher.saves())
            ctx.value = saved[-1][0].item()
        ctx.save_for_backward(*saved)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        layer, watcher = ctx.layer, ctx.watcher
        saved = ctx.saved_tensors
        if layer.offloads:
            *saved, activation = saved
            watcher.returned(activation, ctx.value)
        if layer.is_read:
            watcher.reads(layer.number, tuple(saved), forward=False)
        given = watcher.gradients(layer.number, grad.item())
        if given is None:
            raise InterruptionError
        grads = [
            watcher.tensor(layer.number, size, value, layer.dtype) if trains else None
            for size, value, trains in zip(layer.sizes, given, ctx.needs_input_grad[3:], strict=True)
        ]
        return (grad, None, None, *grads)


class Layer(nn.Module):
    """Flat parameters, each of equal elements."""

    def __init__(
        self, number: int, sizes: tuple[int, ...], trained: bool, is_read: bool, dtype: torch.dtype, offloads: bool
    ) -> None:
        super().__init__()
        self.number, self.is_read, self.dtype, self.offloads = number, is_read, dtype, offloads
        if offloads:
            self.part = nn.Identity()  # so that layers are blocks
        self.sizes = sizes
        for slot, size in enumerate(sizes):
            values = torch.full((size,), first_value(number, slot), dtype=dtype)
            self.register_parameter(f"p{slot}", nn.Parameter(values, requires_grad=trained))

    def forward(self, x: torch.Tensor, watcher: Watcher) -> torch.Tensor:
        used: torch.Tensor = _Use.apply(x, watcher, self, *self._parameters.values())
        return used


def first_value(layer: int, slot: int) -> float:
    """The weight with which a parameter begins."""
    return 8.0 * (layer + 1) + slot


class Experts(RoutedExperts):
    """Layers of which a router chooses some."""

    idle_get_zeros = False

    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        self.num_experts = len(layers)
        self.numbers = [layer.number for layer in layers]
        for layer in layers:
            self.add_module(f"e{layer.number}", layer)

    def layer(self, number: int) -> Layer:
        layer = self._modules[f"e{number}"]
        assert isinstance(layer, Layer)
        return layer

    def pieces(self) -> list[tuple[nn.Module, int]]:
        return [(self.layer(number), 1) for number in self.numbers]

    def forward(self, x: torch.Tensor, watcher: Watcher, chosen: list[int]) -> torch.Tensor:
        running = [self.layer(number) for number in chosen]
        if self.coming is not None:
            self.coming(running, [])
        for layer in running:
            x = layer(x, watcher)
        return x


class Model(nn.Module):
    """Layers that a program uses as it likes."""

    def __init__(self, layers: list[Layer], experts: int) -> None:
        super().__init__()
        plain = len(layers) - experts
        self.plain = nn.ModuleList(layers[:plain])
        if experts:
            self.experts = Experts(layers[plain:])

    def forward(self, program: Callable[["Model", torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return program(self, torch.ones(1, requires_grad=True))

    def layer(self, number: int) -> nn.Module:
        """A layer by its number."""
        plain = len(self.plain)
        return self.plain[number] if number < plain else self.experts.layer(number)
