"""What the next update of a unit is, by the hyperparameters as they are now; what may not change before it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Self

from pagoda.errors import UsageError
from pagoda.optim.codecs import Key
from pagoda.optim.rule import ElementwiseRule, Hyper, Rule
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
        """(identity of a rule, step, scale) -> the hyperparameters."""

    def rule(self, unit: LiveUnit, slot: int) -> Rule:
        """The rule with the settings of a parameter's group."""
        group = self._group_of(unit, slot)
        if id(group) not in self._rules:
            self._rules[id(group)] = self._rule.with_group(group)
        return self._rules[id(group)]

    def of(self, unit: LiveUnit, scale: Callable[[int], float]) -> dict[int, Hyper]:
        """slot -> hyperparameters of a unit's next update, for slots with a gradient; `scale` says what the gradient
        of a slot is multiplied by."""
        hypers: dict[int, Hyper] = {}
        for slot in range(unit.trainable):
            if unit.params[slot].grad is None:
                continue
            rule, step, factor = self.rule(unit, slot), unit.steps[slot] + 1, scale(slot)
            key = id(rule), step, factor
            if key not in self._made:
                self._made[key] = Hyper(rule, step, factor)
            hypers[slot] = self._made[key]
        return hypers


@dataclass(frozen=True, slots=True)
class Segment:
    """Adjoining elements [start, stop) of a unit that are updated alike. Where rounding is random, they are of one
    parameter."""

    start: int
    stop: int
    hyper: Hyper
    noise: Key | None = None
    """What states are rounded with, where that is random."""
    origin: int = 0
    """Where its parameter starts, for `noise`."""

    def within(self, start: int, stop: int) -> Self:
        """What of it lies in [start, stop)."""
        return replace(self, start=max(start, self.start), stop=min(stop, self.stop))

    @property
    def arguments(self) -> tuple[float, ...]:
        """What the kernel of an element-wise rule takes besides addresses and a number of elements."""
        assert isinstance(self.hyper.rule, ElementwiseRule)
        scalars = _scalars(self.hyper.rule, self.hyper.step, self.hyper.grad_scale)
        return scalars if self.noise is None else (self.start - self.origin, *self.noise, *scalars)


@lru_cache(maxsize=256)
def _scalars(rule: ElementwiseRule, step: int, grad_scale: float) -> tuple[float, ...]:
    """A rule's scalars, which most parameters of a step have in common."""
    return rule.scalars(step, grad_scale)


def segments_of(unit: LiveUnit, hypers: Mapping[int, Hyper]) -> tuple[Segment, ...]:
    """What an update with these hyperparameters, by slot, changes; adjoining slots are one segment where possible."""
    segments: list[Segment] = []
    for slot, hyper in hypers.items():
        placed, rule, last = unit.spec.slots[slot], hyper.rule, segments[-1] if segments else None
        start, stop = placed.offset, placed.offset + placed.param.numel
        noise = rule.noise(unit.name(slot), hyper.step) if isinstance(rule, ElementwiseRule) else None
        if noise is None and last is not None and (last.stop, last.hyper) == (start, hyper):
            segments[-1] = replace(last, stop=stop)
        else:
            segments.append(Segment(start, stop, hyper, noise, start))
    return tuple(segments)


def check_frozen(units: Iterable[LiveUnit]) -> None:
    """A parameter for which `wrap` placed no optimizer state cannot be trained later."""
    for unit in units:
        for slot in range(unit.trainable, len(unit.params)):
            if unit.params[slot].requires_grad:
                raise UsageError(
                    f"{unit.name(slot)!r} was frozen when wrap() placed it, so it has no optimizer state. To unfreeze "
                    "it later, pass it to wrap(reserve=...) or list it in wrap(param_groups=...)."
                )


def check_is_ours(unit: LiveUnit, slot: int) -> None:
    """Raises UsageError where somebody else has set a parameter's gradient: nothing reads that."""
    grad = unit.params[slot].grad
    if grad is not None and grad is not unit.markers[slot]:
        raise UsageError(
            f"The gradient of {unit.name(slot)!r} was set by hand, but Pagoda's updates take gradients from backward "
            "alone: set it to None. To change gradients, scale the loss, or change them as they arrive, by "
            "param.register_hook(...)."
        )
