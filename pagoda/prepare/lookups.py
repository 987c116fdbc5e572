"""Embeddings that the CPU can look up while a GPU computes."""

import torch
from torch import nn

from pagoda.mesh.dtensors import as_dtensor


def lookups_in(model: nn.Module) -> dict[nn.Module, str]:
    """Every embedding of a model -> why the CPU cannot look up its rows, or "" if it can."""
    users: dict[int, list[str]] = {}
    compiled: set[nn.Module] = set()
    for name, module in model.named_modules():
        for param in module.parameters(recurse=False):
            users.setdefault(id(param), []).append(name)
        if module._compiled_call_impl is not None:
            compiled.update(module.modules())
    found: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding):
            continue
        others = [user for param in module.parameters() for user in users[id(param)] if user != name]
        reason = ""
        if not name:
            reason = "it is the model itself"
        elif others:
            reason = f"{others[0]!r} computes with its weights too"
        elif [*module._parameters] != ["weight"] or next(module.children(), None) is not None:
            reason = "it has more than its matrix"
        elif module.max_norm is not None:
            reason = "it writes to its weights (max_norm)"
        elif module in compiled:
            reason = "torch.compile has compiled it"
        elif as_dtensor(module.weight) is not None:
            reason = "tensor parallelism has divided it"
        found[module] = reason
    return found


def device_of(model: nn.Module) -> torch.device:
    """Where a model computes. Parameters that the CPU looks up are in RAM."""
    devices = [param.device for param in model.parameters()]
    return next((device for device in devices if device.type != "cpu"), devices[0])
