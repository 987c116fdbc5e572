"""The settings that a framework's trainer passes to `wrap`."""

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from types import NoneType
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

from pagoda.api import wrap
from pagoda.budgets import compute_device, own_directories
from pagoda.checkpoint.optimizer_states import read_entry
from pagoda.checkpoint.state import state_of
from pagoda.config.memory import Memory
from pagoda.config.training import ActivationMode, Activations, MixedPrecision, Precision, Tiles, UpdateMode, Updates
from pagoda.errors import BudgetError, ConfigError, UsageError
from pagoda.mesh.mesh import Mesh
from pagoda.optim.adamw import AdamW
from pagoda.optim.rule import Rule, plain_setting
from pagoda.optim.torch_optimizer import Optim
from pagoda.optimizer import PagedOptimizer

_ONLY_FASTER = ("fused", "foreach", "capturable", "differentiable")
"""Settings of torch's optimizers that change how they compute, but not the result."""
_TAKEN = "_pagoda_taken"
"""Attribute of a model that a framework has wrapped: its optimizer, and the settings of the framework."""


@dataclass(frozen=True, kw_only=True)
class Paging:
    """The settings of `pagoda.wrap` that have no place in a framework's own configuration.

    All others, such as the clipping norm, come from the framework's configuration.
    """

    memory: Memory = field(default_factory=Memory)
    """Budgets of the tiers. With Accelerate and Lightning, checkpoints copy state on SSD unless `ssd_checkpoints` is
    given, because these delete the directories of checkpoints without telling Pagoda."""
    optimizer: Rule | None = None
    """By default, the optimizer that the framework's configuration names. One that is given here has its own learning
    rate and weight decay. The framework only says which parameters have no weight decay."""
    precision: Precision | MixedPrecision | None = None
    """By default, the precision in the framework's configuration, or the dtype of the model if there is none."""
    autocast: bool = False
    """With "bf16" in the framework's configuration: weights and gradients keep the dtype of the model, and its forward
    runs under `torch.autocast`, as without Pagoda. By default, weights and gradients are in bf16."""
    backward_passes: int | Literal["auto"] | None = "auto"
    """Number of backward passes that a `Trainer` runs for each micro-batch. If it is known, units can be updated during
    the last one. None: it varies, and updates wait for the end of the step. "auto": one for the losses of transformers
    and TRL, and None for those of other classes."""
    update: UpdateMode | Updates = "sync"
    activations: ActivationMode | Activations = "keep"
    tiles: Tiles | None = None
    mesh: Mesh | DeviceMesh | None = None
    skip_non_finite: bool = False
    """Skip a step whose gradients are NaN or infinite, with a warning. By default such a step raises
    NonFiniteGradientError. Either way, no weight changes. This needs clipping or `backward_passes=None`: otherwise
    updates run during backward, and some units may have theirs before such a gradient arrives, which is an error."""
    export: bool | None = None
    """Whether each checkpoint of a `Trainer` also has the whole model, for `from_pretrained`. All weights are read and
    written for it while training waits. By default only if something else needs it: `save_only_model`, or a
    `hub_strategy` that pushes during training. Adapters are always saved. `save_model`, or `pagoda export` with the
    directory `pagoda` in a checkpoint, writes the model at any time."""
    save_minutes: float = 0.0
    """A `Trainer` also saves a checkpoint if so many minutes have passed since the last one. 0: it does not."""
    reference: Memory | None = None
    """Budgets of a second, frozen model, such as the reference model of DPO. By default, it is not paged. Only one
    model at a time can use an SSD directory, so give another directory than in `memory`."""

    def of_model(self, number: int) -> "Paging":
        """The settings of one of several models, from 0 on: the same budgets, but from the second model on, a directory
        of its own in each directory of `memory.ssd`."""
        if not number or self.memory.ssd is None:
            return self
        own = own_directories(self.memory.ssd_directories, f"model-{number + 1}")
        return replace(self, memory=replace(self.memory, ssd=own))

    def wrap_frozen(
        self, model: nn.Module, memory: Memory | None, precision: Precision | None = None
    ) -> PagedOptimizer:
        """Freeze a model and wrap it. Raises the errors of `pagoda.wrap`."""
        return wrap(model.requires_grad_(False), AdamW(), memory=memory, precision=precision, mesh=self.mesh)[1]

    def wrap_reference(self, model: nn.Module, precision: Precision | None) -> PagedOptimizer:
        """Freeze a reference model and wrap it in its own budgets. It computes as the trained model does, if the
        framework's configuration has this precision. Raises the errors of `pagoda.wrap`."""
        chosen = self._precision(model, precision)
        if isinstance(chosen, MixedPrecision):
            chosen = chosen.precision
        try:
            return self.wrap_frozen(model, self.reference, chosen)
        except BudgetError as error:
            raise BudgetError(f"The reference model: {error}", error.tier, error.needed_bytes) from error

    def take_over(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        precision: Precision | None,
        groups: list[dict[str, Any]] | None = None,
        *,
        max_grad_norm: float | None = None,
        gradient_accumulation_steps: int | None = None,
        keeps_pages: bool = False,
    ) -> PagedOptimizer:
        """Wrap a model with the update rule of an optimizer in RAM, and with the framework's settings. The settings
        here take precedence. An optimizer of Pagoda is returned as it is.

        Afterwards, both have the same list of param groups. So schedulers of the optimizer, and schedulers inside
        of these, change the learning rate of the one that is returned.

        A model that a framework has wrapped keeps its weights and gets what a new optimizer is: the settings of this
        one, and no state.

        `groups` are by default the optimizer's own. `keeps_pages`: checkpoints may keep their pages on SSD by default,
        because only Pagoda deletes them. Raises ConfigError if the optimizer has taken a step, UsageError if
        the model is wrapped with another optimizer or other settings, and the errors of `pagoda.wrap`.
        """
        if isinstance(optimizer, PagedOptimizer):
            return optimizer
        if any(float(state.get("step", 1)) for state in optimizer.state.values()):
            raise ConfigError("The optimizer has taken steps already: pass it before its first step.")
        if groups is None:
            groups = optimizer.param_groups if self.optimizer is None else _without_settings(optimizer.param_groups)
        rule = self.optimizer or rule_of(optimizer)
        settings = {
            "paging": self,
            "precision": self.precision or precision,
            "gradient clipping": max_grad_norm,
            "gradient accumulation": gradient_accumulation_steps,
        }
        if (paged := optimizer_of(model)) is not None:
            _begin_anew(paged, rule, groups, _differences(getattr(model, _TAKEN)[1], settings))
        else:
            memory = self.memory
            if memory.ssd_checkpoints is None and not keeps_pages:
                memory = replace(memory, ssd_checkpoints=0)
            _, paged = wrap(
                model,
                rule,
                param_groups=groups,
                memory=memory,
                precision=self._precision(model, precision),
                max_grad_norm=max_grad_norm,
                gradient_accumulation_steps=gradient_accumulation_steps,
                update=self.update,
                activations=self.activations,
                tiles=self.tiles,
                mesh=self.mesh,
            )
            paged._engine.stepper.scaler.skips_always = self.skip_non_finite
            setattr(model, _TAKEN, (paged, settings))
        optimizer.param_groups = paged.param_groups
        optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers ask whether it steps before them
        return paged

    def _precision(self, model: nn.Module, said: Precision | None) -> Precision | MixedPrecision | None:
        """The precision to wrap with, if the framework's configuration has `said`. With autocast, the model's forward
        runs under it from now on. Raises ConfigError for autocast in fp16."""
        if not self.autocast or said is None:
            return self.precision or said
        if said != "bf16":
            raise ConfigError(f"Paging(autocast=True) is for bf16, and the framework says {said}: leave it out.")
        model.forward = _under_autocast(model.forward, self.autocast_context)
        return self.precision

    def autocast_context(self) -> Any:
        """A context of `torch.autocast` in bf16 where compute is. Casts of weights are not kept for later uses in the
        same forward, because all of them together may not fit."""
        return torch.autocast(compute_device(self.memory).type, dtype=torch.bfloat16, cache_enabled=False)

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


def _under_autocast(forward: Callable[..., Any], context: Callable[[], Any]) -> Callable[..., Any]:
    """A forward in the context of autocast, with results in fp32, as Accelerate makes it."""

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with context():
            results = forward(*args, **kwargs)
        return tree_map_only(torch.Tensor, lambda each: each.float() if each.dtype is torch.bfloat16 else each, results)

    return run


def optimizer_of(model: nn.Module) -> PagedOptimizer | None:
    """The optimizer of a model that a framework has wrapped. None for any other model."""
    return getattr(model, _TAKEN, (None,))[0]


def _begin_anew(paged: PagedOptimizer, rule: Rule, groups: list[dict[str, Any]], differences: list[str]) -> None:
    """Give the optimizer of a wrapped model the settings of new param groups, and no state.

    Raises UsageError if that is not all in which it differs from a new one, whose rule this is.
    """
    members, mine = ([[*map(id, group["params"])] for group in each] for each in (groups, paged.param_groups))
    if _kind(rule) != _kind(paged._engine.rule):
        differences = [*differences, "optimizer class"]
    if members != mine:
        differences = [*differences, "parameters of the param groups"]
    if differences:
        raise UsageError(
            f"The model is wrapped already, and this differs from the first time: {', '.join(differences)}. Give it as "
            "it was, or build a new model, or keep the model's optimizer: with a Trainer, give "
            "optimizers=(trainer.optimizer, None)."
        )
    indices = iter(range(sum(map(len, mine))))
    for group in (settings := [{**rule.defaults(), **group} for group in groups]):
        paged._engine.rule.with_group(group)
        group["params"] = [next(indices) for _ in group["params"]]
    paged.load_state_dict({"state": {}, "param_groups": settings})


def _kind(rule: Rule) -> tuple[Any, ...]:
    """What a rule is, apart from the settings that each param group has."""
    if not isinstance(rule, Optim):
        return (type(rule),)
    return rule.kind, {name: value for name, value in rule.settings.items() if name not in rule.group}


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return [name for name, value in one.items() if other[name] != value]


def rule_of(optimizer: torch.optim.Optimizer) -> Rule:
    """The update rule of an optimizer in RAM, of a class from torch or any other library.

    Raises ConfigError, like `pagoda.Optim`, for a class that cannot step one parameter at a time, and for an optimizer
    that does not tell all of its settings.
    """
    kind, told = type(optimizer), _told(optimizer)
    if kind is torch.optim.AdamW and not told["amsgrad"] and not told["maximize"]:
        return AdamW(**{name: told[name] for name in ("lr", "betas", "eps", "weight_decay")})
    names = inspect.signature(kind).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in names.values())
    settings = {name: told[name] for name in optimizer.defaults if name in told and (takes_any or name in names)}
    for _ in range(2):  # settings that are no defaults are passed only where they differ
        rule = Optim(kind, **settings)
        again = _told(kind([nn.Parameter(torch.zeros(2, 2))], **settings))
        settings |= {name: told[name] for name in names if name in told and again.get(name) != told[name]}
    lost = [f"{name} = {value!r}" for name, value in told.items() if again.get(name) != value]
    if lost:
        raise ConfigError(
            f"The {kind.__name__} has {', '.join(lost)}, but not as a setting of its constructor: give "
            f"Paging(optimizer=pagoda.Optim({kind.__name__}, ...)) with all of its settings."
        )
    return rule


def _told(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What an optimizer tells of its settings: its defaults, and plain attributes, which bitsandbytes has in `args`."""
    attributes = {**vars(getattr(optimizer, "args", optimizer)), **vars(optimizer)}
    plain = {k: v for k, v in attributes.items() if k[0] != "_" and isinstance(v, int | float | str | NoneType)}
    defaults = {name: plain_setting(value, None) for name, value in optimizer.defaults.items()}
    return {name: value for name, value in {**plain, **defaults}.items() if name not in _ONLY_FASTER}


def _without_settings(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Param groups without settings, except that those without weight decay keep that if others have it.

    Raises ConfigError if the groups differ in anything else, because their settings are not used.
    """
    settings = [
        {name: v for name, v in group.items() if name not in ("params", "param_names", "weight_decay")}
        for group in groups
    ]
    if any(each != settings[0] for each in settings):
        raise ConfigError(
            "The param groups have different settings, which Paging(optimizer=...) would replace: leave it out."
        )
    decays = any(group.get("weight_decay") for group in groups)
    spared = [{"weight_decay": 0.0} if decays and not group.get("weight_decay") else {} for group in groups]
    return [{"params": group["params"], **own} for group, own in zip(groups, spared, strict=True)]


def hand_over(scheduler: Any, optimizer: PagedOptimizer) -> None:
    """Let the scheduler of an optimizer that was taken over name this one as its optimizer.

    Schedulers warn if an optimizer's steps are not counted, and only a scheduler's constructor lets an optimizer count
    them. transformers' AdafactorSchedule only reports the rates that Adafactor chooses itself.
    """
    torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0, total_iters=0)
    scheduler.optimizer = optimizer
    reports = getattr(sys.modules.get("transformers.optimization"), "AdafactorSchedule", None)
    if reports is not None and type(scheduler) is reports:
        scheduler.__class__ = type(reports.__name__, (reports,), {"get_lr": _rates_of_adafactor})


def _rates_of_adafactor(scheduler: Any) -> list[float]:
    """The rates of the last step. Before the first step, those that the scheduler was given."""
    adafactor: Any = sys.modules["transformers.optimization"].Adafactor
    groups = scheduler.optimizer.param_groups
    states = [state for group in groups if (state := state_of(group["params"][0])) is not None]
    if not all(state.unit.steps[state.slot] for state in states):
        return list(scheduler.base_lrs)
    with states[0].engine.settled():
        return [adafactor._get_lr(group, read_entry(state)) for group, state in zip(groups, states, strict=True)]
