"""Segments: what of a unit an update changes, and with which numbers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Self

from pagoda.optim.codecs import Key
from pagoda.optim.rule import ElementwiseRule, Hyper
from pagoda.runtime.unit import LiveUnit


@dataclass(frozen=True, slots=True)
class Segment:
    """Adjoining elements [start, stop) of a unit that are updated alike."""

    start: int
    stop: int

    def within(self, start: int, stop: int) -> Self:
        """What of it lies in [start, stop)."""
        if start <= self.start and self.stop <= stop:
            return self
        return replace(self, start=max(start, self.start), stop=min(stop, self.stop))


@dataclass(frozen=True, slots=True)
class BlockSegment(Segment):
    """What an element-wise rule updates with the same scalars. Where rounding is random, it is of one parameter."""

    scalars: tuple[float, ...]
    """The rule's, of one step."""
    noise: Key | None = None
    """What its states are rounded with."""
    origin: int = 0
    """Where its parameter starts, for `noise`."""

    @property
    def arguments(self) -> tuple[float, ...]:
        """What a kernel takes beside addresses and a number of elements."""
        return self.scalars if self.noise is None else (self.start - self.origin, *self.noise, *self.scalars)


@dataclass(frozen=True, slots=True)
class TensorSegment(Segment):
    """A parameter, for a rule that takes parameters whole; or a piece of it, where it may be cut."""

    hyper: Hyper


@lru_cache(maxsize=256)
def _scalars(rule: ElementwiseRule, step: int, grad_scale: float) -> tuple[float, ...]:
    """A rule's scalars, which most parameters of a step have in common."""
    return rule.scalars(step, grad_scale)


def segments_of(unit: LiveUnit, hypers: Mapping[int, Hyper]) -> list[Segment]:
    """What an update with these hyperparameters, by slot, does; adjoining slots are one segment where possible."""
    segments: list[Segment] = []
    for slot, hyper in hypers.items():
        placed = unit.spec.slots[slot]
        start, stop = placed.offset, placed.offset + placed.param.numel
        rule = hyper.rule
        if not isinstance(rule, ElementwiseRule):
            segments.append(TensorSegment(start, stop, hyper))
            continue
        scalars, noise = _scalars(rule, hyper.step, hyper.grad_scale), rule.noise(unit.name(slot), hyper.step)
        last = segments[-1] if segments else None
        if noise is None and isinstance(last, BlockSegment) and (last.stop, last.scalars) == (start, scalars):
            segments[-1] = BlockSegment(last.start, stop, scalars)
        else:
            segments.append(BlockSegment(start, stop, scalars, noise, start))
    return segments
