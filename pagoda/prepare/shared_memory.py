"""Checks that trained parameters share memory with nothing else of the model: in pages, each has memory of its own."""

from collections.abc import Container, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from pagoda.checkpoint.waiting import WaitingTensor, memory_start
from pagoda.errors import ConfigError


class _Place(NamedTuple):
    """A tensor of a model, and where it lies."""

    space: tuple[str, int]
    """A device, and the memory of a waiting tensor or 0. Tensors in different spaces share no memory."""
    start: int
    """First byte in the space."""
    stop: int
    name: str
    kind: str
    """parameter, buffer or attribute."""
    tensor: torch.Tensor


def check_memory_is_apart(model: nn.Module, trained: Container[str]) -> None:
    """Raises ConfigError for a parameter in `trained` that shares memory with another parameter, a buffer or a tensor
    attribute of a module, or whose elements share memory. Views whose elements alternate, such as columns of one
    tensor, count as sharing it.

    With torch's optimizers they change together, but in pages each has its own memory.
    """
    open_places: list[_Place] = []
    for place in sorted(_places(model), key=lambda place: place[:4]):
        is_trained = place.kind == "parameter" and place.name in trained
        if is_trained and any(size > 1 and not stride for size, stride in _dims(place.tensor)):
            raise ConfigError(f"{place.name!r} is an expanded tensor, whose elements share memory: clone it.")
        open_places = [other for other in open_places if other.space == place.space and place.start < other.stop]
        for other in open_places:
            other_is_trained = other.kind == "parameter" and other.name in trained
            if is_trained or other_is_trained:
                raise _refusal(*sorted((place, other), key=lambda one: one.kind != "parameter"))
        open_places.append(place)


def _refusal(param: _Place, other: _Place) -> ConfigError:
    if other.kind == "parameter":
        first, second = sorted((param.name, other.name))
        return ConfigError(
            f"{first!r} and {second!r} are two parameters in the same memory, which would be trained separately. To "
            "tie them, assign one parameter to both modules (a.weight = b.weight), and transpose or cut it in forward; "
            "otherwise, clone one."
        )
    return ConfigError(
        f"The {other.kind} {other.name!r} lies in the memory of the parameter {param.name!r}, which moves to pages, so "
        "it would keep the old values. Compute it from the parameter in forward, or clone it."
    )


def _dims(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    return zip(tensor.shape, tensor.stride(), strict=True)


def _places(model: nn.Module) -> Iterator[_Place]:
    seen: set[int] = set()
    for name, kind, tensor in _tensors(model):
        is_waiting = isinstance(tensor, WaitingTensor)
        has_storage = is_waiting or type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        if id(tensor) in seen or not has_storage or tensor.layout is not torch.strided or not tensor.numel():
            continue
        if tensor.is_meta and not is_waiting:
            continue
        seen.add(id(tensor))
        memory, start = memory_start(tensor)
        space = str(tensor.device), memory
        last = sum((size - 1) * stride for size, stride in _dims(tensor))
        yield _Place(space, start, start + (last + 1) * tensor.itemsize, name, kind, tensor)


def _tensors(model: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    for name, param in model.named_parameters():
        yield name, "parameter", param
    for name, buffer in model.named_buffers():
        yield name, "buffer", buffer
    for prefix, module in model.named_modules():
        # What a hook before forward computes anew, as torch's weight_norm and spectral_norm do, is not kept.
        computed = {getattr(hook, "name", None) for hook in module._forward_pre_hooks.values()}
        held: dict[str, Any] = vars(module)
        for name, value in held.items():
            if isinstance(value, torch.Tensor) and name not in computed:
                yield f"{prefix}.{name}" if prefix else name, "attribute", value
