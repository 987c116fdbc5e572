"""What the next update of a unit is, by the hyperparameters as they are now; what may not change before it."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pagoda.errors import UsageError
from pagoda.optim.rule import Hyper, Rule
from pagoda.runtime.unit import LiveUnit

Group = Mapping[str, Any]
"""One of torch's `param_groups`, as it stands when a step is taken."""

GroupOf = Callable[[LiveUnit, int], Group]
"""The param group of a unit's parameter, by slot."""


class NextHypers:
    """Hyperparameters as they are now. Each group is read once, and what parameters share is made once."""

    def __init__(self, group_of: GroupOf, rule: Rule) -> None:
        self._group_of = group_of
        self._rule = rule
        self._rules: dict[int, Rule] = {}
        """Identity of a group -> the rule with its settings."""
        self._made: dict[tuple[int, int, float], Hyper] = {}
        """(identity of a group, step, scale) -> the hyperparameters."""

    def of(self, unit: LiveUnit, scale: Callable[[int], float]) -> dict[int, Hyper]:
        """slot -> hyperparameters of a unit's next update, for slots with a gradient; `scale` says what the gradient
        of a slot is multiplied by."""
        hypers: dict[int, Hyper] = {}
        for slot in range(unit.trainable):
            if unit.params[slot].grad is None:
                continue
            group = self._group_of(unit, slot)
            key = id(group), unit.steps[slot] + 1, scale(slot)
            if key not in self._made:
                rule = self._rules.get(key[0])
                if rule is None:
                    rule = self._rules[key[0]] = self._rule.with_group(group)
                self._made[key] = Hyper(rule, *key[1:])
            hypers[slot] = self._made[key]
        return hypers


def check_frozen(units: Iterable[LiveUnit]) -> None:
    """A parameter for which `wrap` placed no optimizer state cannot be trained later."""
    for unit in units:
        for slot in range(unit.trainable, len(unit.params)):
            if unit.params[slot].requires_grad:
                raise UsageError(
                    f"{unit.name(slot)!r} was frozen when wrap() placed it, so it has no optimizer state. To unfreeze "
                    "it later, pass it to wrap(reserve=...) or list it in wrap(param_groups=...)."
                )


def check_gradients(units: Iterable[LiveUnit]) -> None:
    """Every gradient that `step()` would use is one that autograd has delivered."""
    for unit in units:
        for slot in unit.grouped:
            check_is_ours(unit, slot)


def check_is_ours(unit: LiveUnit, slot: int) -> None:
    """Raises UsageError where somebody else has set a parameter's gradient: nothing reads that."""
    grad = unit.params[slot].grad
    if grad is not None and grad is not unit.markers[slot]:
        raise UsageError(
            f"The gradient of {unit.name(slot)!r} was set by hand, but Pagoda's updates take gradients from backward "
            "alone: set it to None. To change gradients, scale the loss, or change them as they arrive, by "
            "param.register_hook(...)."
        )


def check_hypers_are_as_used(
    units: Iterable[LiveUnit], used_groups: Mapping[int, Hyper], group_of: GroupOf, rule: Rule
) -> None:
    """Hyperparameters must be what the updates under backward used."""
    as_now: dict[int, Rule] = {}
    for unit in units:
        if not unit.updated:
            continue
        for slot in range(unit.trainable):
            used, group = used_groups.get(id(unit.params[slot])), group_of(unit, slot)
            if id(group) not in as_now:
                as_now[id(group)] = rule.with_group(group)
            if used is not None and used.rule != as_now[id(group)]:
                raise UsageError(
                    "param_groups changed between backward and step(), but units were updated under backward "
                    "with the old values. Change them before backward or after step(), or leave out "
                    "wrap(accumulation_steps=...)."
                )
