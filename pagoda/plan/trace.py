"""The trace: the order in which one step uses its units."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from math import inf


class Phase(IntEnum):
    """The phase of a step in which a unit is used. STEP marks `optimizer.step()` and belongs to no unit."""

    FORWARD = 0
    BACKWARD = 1
    STEP = 2


@dataclass(frozen=True, slots=True)
class Access:
    """One use of a unit's weights. `unit` is -1 for STEP."""

    unit: int
    phase: Phase


STEP = Access(-1, Phase.STEP)


@dataclass(frozen=True, slots=True)
class Trace:
    """The accesses of one step, from the first forward after `step()` to the next `step()`, which is the last
    access."""

    accesses: tuple[Access, ...]
    assumed: bool = False
    """True before a step was seen. Then it has the modules in the order of their declaration, and back."""

    def __post_init__(self) -> None:
        if not self.accesses or self.accesses[-1] != STEP or STEP in self.accesses[:-1]:
            raise ValueError("a trace holds one STEP, at its end")


def assumed_trace(uses: Sequence[int], gradient_accumulation_steps: int = 1) -> Trace:
    """The most likely trace of a model: in each micro-batch, every unit in forward order, then back."""
    forward = [Access(u, Phase.FORWARD) for u in uses]
    backward = [Access(u, Phase.BACKWARD) for u in reversed(uses)]
    return Trace((*(forward + backward) * gradient_accumulation_steps, STEP), assumed=True)


@dataclass(frozen=True, slots=True)
class Gradient:
    """The gradient of a unit in one pass. Autograd has made it when the access at `tick` ends."""

    tick: int
    unit: int
    last: bool
    """Whether it is the unit's last one in the step."""


def gradients_of(trace: Trace, trained: frozenset[int]) -> list[Gradient]:
    """The gradients of a step: one per pass for each unit in `trained` that the pass uses.

    Autograd adds up the gradients of all uses of a parameter. So a gradient is made at the last backward access of the
    unit. If the backward of a use reads none of the unit's weights, as that of an embedding, forward accesses the unit
    more often than backward. Then the gradient is made at the end of the pass.
    """
    found: list[tuple[int, int]] = []
    read: dict[int, int] = {}
    """unit -> the last tick of this pass at which backward reads it, in the order of ticks."""
    unread: Counter[int] = Counter()
    """unit -> number of forward accesses minus number of backward accesses."""
    for tick, (access, following) in enumerate(pairwise(trace.accesses)):
        if access.unit in trained and access.phase is Phase.FORWARD:
            unread[access.unit] += 1
        elif access.unit in trained:
            unread[access.unit] -= 1
            read.pop(access.unit, None)
            read[access.unit] = tick
        if access.phase is Phase.BACKWARD and following.phase is not Phase.BACKWARD:
            at_end = [unit for unit, uses in unread.items() if uses > 0]
            found += [(at, unit) for unit, at in read.items() if unit not in at_end]
            found += [(tick, unit) for unit in at_end]
            read, unread = {}, Counter()
    last = {unit: tick for tick, unit in found}
    return [Gradient(tick, unit, last[unit] == tick) for tick, unit in found]


class Cursor:
    """Follows a trace during a live step, and finds the way back after a departure from it."""

    def __init__(self, trace: Trace) -> None:
        self._accesses = trace.accesses
        self.position = len(trace.accesses) - 1
        """Tick of the last access that matched. A new cursor is at STEP, before the first forward."""
        self._where: dict[Access, list[int]] = {}
        for tick, access in enumerate(trace.accesses):
            self._where.setdefault(access, []).append(tick)

    def advance(self, access: Access) -> int | None:
        """The tick of `access`, or None if this trace does not contain it. Jumps ahead if accesses were left out."""
        if access == self._accesses[self.position]:
            return self.position
        following = (self.position + 1) % len(self._accesses)
        if access != self._accesses[following]:
            ticks = self._where.get(access)
            if ticks is None:
                return None
            following = next((t for t in ticks if t > self.position), ticks[0])
        self.position = following
        return following


class NextUse:
    """For each unit, the ticks at which a cyclic trace uses it."""

    def __init__(self, trace: Trace) -> None:
        self.period = len(trace.accesses)
        self._ticks: dict[int, list[int]] = {}
        for tick, access in enumerate(trace.accesses):
            if access != STEP:
                self._ticks.setdefault(access.unit, []).append(tick)

    def after(self, unit: int, tick: int) -> float:
        """Ticks from `tick` to the next use of `unit`, at least 1. Infinite if the trace never uses it."""
        ticks = self._ticks.get(unit)
        if not ticks:
            return inf
        later = bisect_right(ticks, tick)
        return (ticks[later] if later < len(ticks) else ticks[0] + self.period) - tick
