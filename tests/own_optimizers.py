"""Optimizer classes with the structure of those that people take from other packages, in few lines."""

from typing import Any

import torch
from torch.optim import Optimizer


class ScheduleFree(Optimizer):
    """Schedule-free SGD: counts its steps in the group, and has other weights in evaluation, which must be asked
    for."""

    def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.9) -> None:
        defaults = {"lr": lr, "momentum": momentum, "k": 0, "train_mode": False, "weight_sum": 0.0}
        super().__init__(params, defaults)

    def train(self) -> None:
        self._switch(True)

    def eval(self) -> None:
        self._switch(False)

    @torch.no_grad()
    def _switch(self, training: bool) -> None:
        for group in self.param_groups:
            for param in group["params"] if group["train_mode"] != training else ():
                if "z" in self.state[param]:
                    weight = 1 - group["momentum"] if training else 1 - 1 / group["momentum"]
                    param.lerp_(self.state[param]["z"], weight)
            group["train_mode"] = training

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("Optimizer was not in train mode when step is called.")
            weight = (group["k"] + 1) ** 2 * group["lr"]
            group["k"] += 1
            group["weight_sum"] += weight
            share = weight / group["weight_sum"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                z = self.state[param].setdefault("z", param.clone())
                param.lerp_(z, share)
                param.add_(param.grad, alpha=group["lr"] * (group["momentum"] * (1 - share) - 1))
                z.sub_(param.grad, alpha=group["lr"])


class Whitened(Optimizer):
    """As SOAP: counts in the group from the first step on, and keeps a list of matrices for each parameter."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state, grad = self.state[param], param.grad
                if not state:
                    state["squares"] = [torch.eye(size) for size in grad.shape] if grad.dim() > 1 else [[]]
                if grad.dim() > 1:
                    flat = grad.flatten(1)
                    state["squares"][0].lerp_(flat @ flat.T, 1 / group["step"])
                    grad = torch.linalg.solve(state["squares"][0] + torch.eye(len(flat)), flat).view_as(grad)
                param.sub_(grad, alpha=group["lr"])


class Distance(Optimizer):
    """As Prodigy: estimates one distance from all gradients."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "d": 1e-6})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["d"] += 1e-3 * sum(param.grad.abs().sum().item() for param in group["params"])
            for param in group["params"]:
                param.sub_(param.grad, alpha=group["lr"] * group["d"])


class Named(Optimizer):
    """As Adam-mini: its constructor takes names."""

    def __init__(self, named_parameters: Any, lr: float = 0.1) -> None:
        super().__init__([{"params": [param], "name": name} for name, param in named_parameters], {"lr": lr})
