"""Prepares the next update of a unit from the current hyperparameters, and checks what may not change before it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Self

from pagoda.errors import UsageError
from pagoda.optim.rule import ElementwiseRule, Hyper, Key, Rule
from pagoda.parameters.unit import LiveUnit

Group = Mapping[str, Any]
"""One of torch's `param_groups`, as it is when a step is taken."""


class Groups:
    """The optimizer's param groups."""

    def __init__(self, units: Sequence[LiveUnit]) -> None:
        self.all: list[dict[str, Any]] = []
        """The optimizer's `param_groups`."""
        self._units = units
        self._numbers: dict[int, int] = {}
        """Identity of a parameter -> the number of its group, as `mark` found it."""

    def of(self, unit: LiveUnit, slot: int) -> Group:
        """The group of a unit's parameter."""
        return self.all[self._numbers[id(unit.params[slot])]]

    def mark(self) -> None:
        """Parameters have come into groups: look which, and tell units."""
        self._numbers = {id(param): number for number, group in enumerate(self.all) for param in group["params"]}
        for unit in self._units:
            unit.grouped.clear()
            unit.grouped.update(slot for slot in range(unit.trainable) if id(unit.params[slot]) in self._numbers)

    @property
    def edited(self) -> bool:
        """Whether the groups' lists of parameters have changed since `mark`."""
        return [*self._numbers] != [id(param) for group in self.all for param in group["params"]]


@dataclass(eq=False)
class NextHypers:
    """The current hyperparameters. Each group is read once, and values that parameters share are computed once."""

    _groups: Groups
    _rule: Rule
    _rules: dict[int, Rule] = field(default_factory=dict)
    """Identity of a group -> the rule with its settings."""
    _made: dict[tuple[int, int, float], Hyper] = field(default_factory=dict)
    """(identity of a rule, step, scale) -> the hyperparameters."""

    def rule(self, unit: LiveUnit, slot: int) -> Rule:
        """The rule with the settings of a parameter's group."""
        group = self._groups.of(unit, slot)
        if id(group) not in self._rules:
            self._rules[id(group)] = self._rule.with_group(group)
        return self._rules[id(group)]

    def of(self, unit: LiveUnit, scale: Callable[[int], float]) -> dict[int, Hyper]:
        """slot -> hyperparameters of a unit's next update, for slots with a gradient. `scale` returns the factor for a
        slot's gradient."""
        hypers: dict[int, Hyper] = {}
        for slot in range(unit.trainable):
            if not unit.has_gradient(slot):
                continue
            rule, step, factor = self.rule(unit, slot), unit.steps[slot] + 1, scale(slot)
            key = id(rule), step, factor
            if key not in self._made:
                self._made[key] = Hyper(rule, step, factor)
            hypers[slot] = self._made[key]
        return hypers


@dataclass(frozen=True, slots=True)
class Segment:
    """Adjoining elements [start, stop) of a unit with the same update. With random rounding, a segment is part of one
    parameter."""

    start: int
    stop: int
    hyper: Hyper
    noise: Key | None
    """Key of the random rounding of states, if rounding is random."""
    origin: int
    """First element of its parameter, for `noise`."""

    def within(self, start: int, stop: int) -> Self:
        """The part of the segment in [start, stop)."""
        return replace(self, start=max(start, self.start), stop=min(stop, self.stop))

    @property
    def arguments(self) -> tuple[float, ...]:
        """Arguments of the kernel of an element-wise rule, without addresses and the number of elements."""
        assert isinstance(self.hyper.rule, ElementwiseRule)
        rule = self.hyper.rule
        scalars = (*rule.arguments, *_scalars(rule, self.hyper.step, self.hyper.grad_scale))
        return scalars if self.noise is None else (self.start - self.origin, *self.noise, *scalars)


@lru_cache(maxsize=256)
def _scalars(rule: ElementwiseRule, step: int, grad_scale: float) -> tuple[float, ...]:
    """A rule's scalars. Most parameters of a step share them."""
    return rule.scalars(step, grad_scale)


def segments_of(unit: LiveUnit, hypers: Mapping[int, Hyper]) -> tuple[Segment, ...]:
    """The segments that an update with these hyperparameters (by slot) changes. Adjoining slots form one segment where
    possible."""
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
    """Raises UsageError if a parameter without optimizer state, frozen when `wrap` was called, is to be trained."""
    for unit in units:
        for slot in range(unit.trainable, len(unit.params)):
            if unit.params[slot].requires_grad:
                raise UsageError(
                    f"{unit.name(slot)!r} was frozen when wrap() placed it, so it has no optimizer state. To unfreeze "
                    "it later, pass it to wrap(reserve=...) or list it in wrap(param_groups=...)."
                )


def check_is_ours(unit: LiveUnit, slot: int) -> None:
    """Raises UsageError if a gradient is about to be added to one that nothing has told of."""
    grad = unit.params[slot].grad
    if grad is not None and grad is not unit.markers[slot]:
        raise UsageError(
            f"Backward adds to the gradient of {unit.name(slot)!r}, which was set inside a forward or inside "
            "pagoda.gathered(...), or two threads ran backward at once. Set gradients elsewhere, and let one backward "
            "wait for the other."
        )
