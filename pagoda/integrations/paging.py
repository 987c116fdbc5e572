"""The settings that a framework's trainer passes to `wrap`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pagoda.api import wrap
from pagoda.config.memory import Memory
from pagoda.config.training import ActivationMode, Activations, MixedPrecision, Precision, Tiles, UpdateMode, Updates
from pagoda.distributed.mesh import Mesh
from pagoda.errors import ConfigError
from pagoda.optim.adamw import AdamW
from pagoda.optim.param_groups import ParamGroups
from pagoda.optim.rule import Rule, plain_setting
from pagoda.optim.torch_optimizer import Optim
from pagoda.optimizer import PagedOptimizer

_OF_DTYPE: Mapping[torch.dtype, Precision] = {torch.float32: "fp32", torch.bfloat16: "bf16"}
_ONLY_FASTER = ("fused", "foreach", "capturable", "differentiable")
"""Settings of torch's optimizers that change how they compute, but not the result."""


@dataclass(frozen=True, kw_only=True)
class Paging:
    """The settings of `pagoda.wrap` that have no place in a framework's own configuration.

    All others, such as the clipping norm, come from the framework's configuration.
    """

    memory: Memory = field(default_factory=Memory)
    """Budgets of the tiers. By default, checkpoints copy state on SSD (`ssd_checkpoints=0`), because a framework
    deletes the directories of its checkpoints without telling Pagoda."""
    optimizer: Rule | None = None
    """By default, the optimizer that the framework's configuration names."""
    precision: Precision | MixedPrecision | None = None
    """By default, the precision in the framework's configuration, or the dtype of the model if there is none."""
    update: UpdateMode | Updates = "sync"
    activations: ActivationMode | Activations = "keep"
    tiles: Tiles | None = None
    mesh: Mesh | DeviceMesh | None = None
    reference: Memory | None = None
    """Budgets of a second, frozen model, such as the reference model of DPO. By default, it is not paged. Only one
    model at a time can use an SSD directory, so give another directory than in `memory`."""

    def wrap_frozen(self, model: nn.Module) -> None:
        """Freeze a model and wrap it. Raises the errors of `pagoda.wrap`."""
        wrap(model.requires_grad_(False), AdamW(), memory=self.reference, precision=precision_of(model), mesh=self.mesh)

    def wrap(
        self,
        model: nn.Module,
        optimizer: Rule,
        *,
        precision: Precision | None = None,
        param_groups: ParamGroups | None = None,
        clip_grad_norm: float | None = None,
        accumulation_steps: int | None = None,
    ) -> PagedOptimizer:
        """Wrap a model with the framework's settings. The settings here take precedence. Raises the errors of
        `pagoda.wrap`."""
        memory = self.memory
        if memory.ssd_checkpoints is None:
            memory = replace(memory, ssd_checkpoints=0)
        _, paged = wrap(
            model,
            self.optimizer or optimizer,
            param_groups=param_groups,
            memory=memory,
            precision=self.precision or precision or precision_of(model),
            clip_grad_norm=clip_grad_norm,
            accumulation_steps=accumulation_steps,
            update=self.update,
            activations=self.activations,
            tiles=self.tiles,
            mesh=self.mesh,
        )
        return paged

    def take_over(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, precision: Precision | None
    ) -> PagedOptimizer:
        """Wrap a model with the update rule of an optimizer in RAM. An optimizer of Pagoda is returned as it is.

        Raises ConfigError if the optimizer already has state, and the errors of `pagoda.wrap`.
        """
        if isinstance(optimizer, PagedOptimizer):
            return optimizer
        if optimizer.state:
            raise ConfigError("The optimizer has taken steps already: pass it before its first step.")
        rule = rule_of(type(optimizer), optimizer.defaults)
        return self.wrap(model, rule, precision=precision, param_groups=optimizer.param_groups)

    def check_device(self, device: torch.device) -> None:
        """Raises ConfigError if batches are on a GPU and compute is on the CPU, or vice versa."""
        here = "cpu" if self.memory.device is None or self.memory.arena_for_device else "cuda"
        if device.type == here:
            return
        if here == "cpu":
            raise ConfigError(
                f"Batches are moved to {device}, but memory.device is not given, so the CPU computes. Give "
                "Paging(memory=pagoda.Memory(device='20GiB', ...)), with the GPU memory for weights in use; or make "
                "the framework use the CPU."
            )
        raise ConfigError(
            f"memory.device is {self.memory.device!r}, a GPU's memory, but batches are moved to {device}: leave "
            "memory.device out, or let the framework use the GPU."
        )


def precision_of(model: nn.Module) -> Precision:
    """The precision of the model's dtype. Raises ConfigError for a dtype that needs an explicit precision."""
    dtype = next((param.dtype for param in model.parameters() if param.is_floating_point()), torch.float32)
    if dtype not in _OF_DTYPE:
        raise ConfigError(f"The model is in {dtype}: set fp16 or bf16 in the framework, or Paging(precision=...).")
    return _OF_DTYPE[dtype]


def rule_of(kind: type[torch.optim.Optimizer], settings: Mapping[str, Any]) -> Rule:
    """The update rule of an optimizer class, from torch or any other library, with these settings.

    Raises ConfigError, like `pagoda.Optim`, for a class that cannot step one parameter at a time.
    """
    meant = {name: plain_setting(value, None) for name, value in settings.items() if name not in _ONLY_FASTER}
    if kind is torch.optim.AdamW and not any(meant.get(name) for name in ("amsgrad", "maximize")):
        known = {name: value for name, value in meant.items() if name in ("lr", "betas", "eps", "weight_decay")}
        return AdamW(**known)
    return Optim(kind, **meant)


def hand_over(scheduler: Any, optimizer: PagedOptimizer) -> None:
    """Make the scheduler of the original optimizer control this one, whose groups have the same settings.

    Schedulers warn if an optimizer's steps are not counted, and only a scheduler's constructor makes an optimizer count
    them.
    """
    torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0, total_iters=0)
    scheduler.optimizer = optimizer
