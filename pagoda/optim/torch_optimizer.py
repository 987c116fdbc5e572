"""Any `torch.optim.Optimizer` class as a rule: its own code, run on one parameter after another."""

import inspect
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any, ClassVar, Literal

import torch

from pagoda.config.settings import require
from pagoda.errors import ConfigError, UsageError
from pagoda.optim.probe import Probe, kept_in
from pagoda.optim.rule import StateSpec, TensorRule, plain_setting

Mode = Literal["train", "eval"]
"""Methods of schedule-free optimizers, which change weights."""


@dataclass(frozen=True, init=False)
class Optim(TensorRule):
    """An optimizer class of torch or of any other package, with its settings: ``pagoda.Optim(torch.optim.Adagrad,
    lr=1e-2)``.

    For each parameter, the class is instantiated with the parameter's fp32 master, gets the stored states, and steps
    once. So the bits are those of the class run in memory on fp32 parameters. `probe` finds out what states it keeps,
    by running it on tiny tensors, and without values on the model's shapes. These live in pages like any state,
    numbers too. Numbers in param groups that each step changes, such as a count of steps, change there.

    Raises ConfigError for a class that needs a closure (LBFGS), whose update of one parameter depends on others
    (Prodigy), on its place in the group, on its name (Adam-mini) or on random numbers, that keeps state elsewhere than
    in ``state`` and param groups, or that refuses ``settings``.
    """

    name: ClassVar[str] = "Optim"
    element_work: ClassVar[float] = 6.0
    """That of RMSprop and Adagrad. torch's functions read and write a parameter's states several times."""
    kind: type[torch.optim.Optimizer]
    settings: Mapping[str, Any]
    """The arguments of the class's constructor."""
    group: Mapping[str, Any]
    """The settings of a param group."""
    _probe: Probe = field(compare=False, repr=False)

    def __init__(self, kind: type[torch.optim.Optimizer], /, **settings: Any) -> None:
        """`settings` are the class's own, as for its constructor."""
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
            raise ConfigError(f"pagoda.Optim wants a class of optimizers, such as torch.optim.Adagrad, not {kind!r}.")
        label = f"{kind.__module__.split('.')[0]}'s {kind.__name__}"
        first = next(iter(inspect.signature(kind).parameters), None)
        if first in ("named_parameters", "model"):
            raise ConfigError(
                f"{label} cannot be run unit by unit: its constructor takes {first!r}, so its update of a parameter "
                "depends on the parameter's name."
            )
        try:
            probe = Probe(label, lambda params: kind(params, **settings))
        except ConfigError as error:
            raise ConfigError(
                f"{error} Its settings are {settings}: change them, use another class, or an optimizer of Pagoda's "
                "own, such as pagoda.AdamW."
            ) from error
        for name, value in (("kind", kind), ("settings", settings), ("group", probe.group), ("_probe", probe)):
            object.__setattr__(self, name, value)

    def with_group(self, group: Mapping[str, Any]) -> "Optim":
        """The rule with the present settings of a param group. Raises ConfigError if they add or remove states."""
        other = copy(self)
        settings = {key: plain_setting(group[key], old) for key, old in self.group.items()}
        for key, old in self.group.items():
            fits = isinstance(settings[key], Real | None) or not isinstance(old, Real)
            require(fits, f"{self._probe.label}'s {key}", settings[key], f"a number, such as {old!r}")
        fixed = settings.keys() - self._probe.clock
        switched = {key: settings[key] for key in fixed if bool(settings[key]) != bool(self.group[key])}
        if switched and not self._probe.has_same_states(switched):
            raise ConfigError(
                f"{self._probe.label} keeps {sorted(self._probe.states) or 'no states'}, and others with {switched} "
                "in a param group: give these settings to pagoda.Optim or to the optimizer's constructor."
            )
        object.__setattr__(other, "group", settings)
        return other

    def own_states(self) -> tuple[StateSpec, ...]:
        """The states of the class. A state that is a number has one element."""
        return tuple(
            StateSpec(name, state.dtype, shape_of=partial(self._shape_of, name))
            for name, state in self._probe.states.items()
        )

    def defaults(self) -> dict[str, Any]:
        """The class's own defaults that are numbers or strings."""
        return dict(self.group)

    def after_step(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """The numbers of the class's clock after a step."""
        return self._probe.changes("step", self.with_group(group).group) if self._probe.clock else {}

    def update(
        self, step: int, weight: torch.Tensor, gradient: torch.Tensor, states: Mapping[str, torch.Tensor]
    ) -> None:
        """Do one step of the class in place. Raises UsageError if it keeps other states than were found."""
        self._call("step", step > 1, weight, gradient, states)

    def switch(self, mode: Mode, updated: bool, weight: torch.Tensor, states: Mapping[str, torch.Tensor]) -> None:
        """Call the class's `train` or `eval` for a parameter, which it changes in place.

        updated: whether the parameter has had an update. weight, states: as for `update`.
        """
        self._call(mode, updated, weight, None, states)

    def after_switch(self, mode: Mode, group: Mapping[str, Any]) -> dict[str, Any]:
        """What the class's `train` or `eval` changes in a param group. Empty if it has no such method."""
        return self._probe.changes(mode, self.with_group(group).group) if hasattr(self.kind, mode) else {}

    def _call(
        self,
        method: str,
        updated: bool,
        weight: torch.Tensor,
        gradient: torch.Tensor | None,
        states: Mapping[str, torch.Tensor],
    ) -> None:
        """Call a method of an optimizer that has just this parameter."""
        param = torch.nn.Parameter(weight)
        param.grad = gradient
        optimizer = self.kind([param], **self.settings)
        optimizer.param_groups[0].update(self.group)
        if updated and states:  # else nothing has been found out about this shape, which a lane must not do
            values = {name: self._value(name, kept) for name, kept in states.items()}
            optimizer.state[param] = self._probe.of("", tuple(weight.shape)).entry(values)
        getattr(optimizer, method)()
        if method != "step" and not updated:
            return
        found, _ = kept_in(optimizer, param)
        if {name: _shape(value) for name, value in found.items()} != {n: tuple(s.shape) for n, s in states.items()}:
            raise UsageError(
                f"{self._probe.label} keeps the states {sorted(found)} for a parameter of shape {list(weight.shape)}, "
                f"but the tiny parameters that were tried have {sorted(states)}, or states of other shapes: "
                "pagoda.Optim cannot run it with these settings."
            )
        for name, kept in states.items():
            value = found[name]
            if not isinstance(value, torch.Tensor):
                kept.fill_(value)
            elif value.data_ptr() != kept.data_ptr():
                kept.copy_(value.detach())

    def torch_state(self, step: int, kept: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """The class's own entry."""
        return {name: self._value(name, value) for name, value in kept.items()}

    def steps_in(self, state: Mapping[str, Any]) -> int:
        """The class's own count, if it has one, and at least 1, because there are states. 0 for an empty entry."""
        return max(1, int(state.get("step", 1))) if state else 0

    def kept_states(self, state: Mapping[str, Any], parameter: str, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
        """Numbers become tensors of one element."""
        tensors = {name: torch.as_tensor(value) for name, value in state.items() if value is not None}
        return super().kept_states(tensors, parameter, shape)

    def _shape_of(self, state: str, parameter: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        probed = self._probe.of(parameter, shape).states.get(state)
        return None if probed is None else probed.shape(shape)

    def _value(self, name: str, kept: torch.Tensor) -> Any:
        number = self._probe.states[name].number
        return kept if number is None else number(kept.item())


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()
