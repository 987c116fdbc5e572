"""The trace: in which order one step uses its units."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from math import inf


class Phase(IntEnum):
    """What a unit is needed for. STEP marks `optimizer.step()`; it belongs to no unit."""

    FORWARD = 0
    BACKWARD = 1
    STEP = 2


@dataclass(frozen=True, slots=True)
class Access:
    """One use of a unit's weights; `unit` is -1 for STEP."""

    unit: int
    phase: Phase


STEP = Access(-1, Phase.STEP)


@dataclass(frozen=True, slots=True)
class Trace:
    """The accesses of one step, from the first forward after `step()` to the next `step()`, which ends it."""

    accesses: tuple[Access, ...]
    assumed: bool = False
    """True before a step has been seen: modules in the order they are declared, then back."""

    def __post_init__(self) -> None:
        if not self.accesses or self.accesses[-1] != STEP or STEP in self.accesses[:-1]:
            raise ValueError("a trace holds one STEP, at its end")


def assumed_trace(uses: Sequence[int], accumulation_steps: int = 1) -> Trace:
    """The trace a model most likely has: every unit as forward uses them, then back again, per micro-batch."""
    forward = [Access(u, Phase.FORWARD) for u in uses]
    backward = [Access(u, Phase.BACKWARD) for u in reversed(uses)]
    return Trace((*(forward + backward) * accumulation_steps, STEP), assumed=True)


@dataclass(frozen=True, slots=True)
class Gradient:
    """The gradient of a unit in one pass, which autograd has made when the access at `tick` ends."""

    tick: int
    unit: int
    last: bool
    """Whether the step makes no other of the unit."""


def gradients_of(trace: Trace, trained: frozenset[int]) -> list[Gradient]:
    """The gradients of a step: one a pass for each unit in `trained` that it uses. Autograd adds up what all uses of a
    parameter give, so that is at the last backward access of the unit; or at the end of the pass, if the backward of a
    use reads none of the unit's weights, as an embedding's does not: then forward accesses it more often."""
    found: list[tuple[int, int]] = []
    read: dict[int, int] = {}
    """unit -> the last tick in this pass at which backward reads it, in the order of these."""
    unread: Counter[int] = Counter()
    """unit -> how many more accesses forward has had than backward."""
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


class Recorder:
    """Writes down accesses as they happen; consecutive uses of the same unit in one phase count once."""

    def __init__(self) -> None:
        self._accesses: list[Access] = []

    def note(self, access: Access) -> None:
        if not self._accesses or self._accesses[-1] != access:
            self._accesses.append(access)

    def finish(self) -> Trace:
        """Close the step and start a new one."""
        trace = Trace((*self._accesses, STEP))
        self._accesses = []
        return trace


class Cursor:
    """Follows a trace while a live step runs, and finds its way back after a departure from it."""

    def __init__(self, trace: Trace) -> None:
        self._accesses = trace.accesses
        self.position = len(trace.accesses) - 1
        """Tick of the last access that matched; a fresh cursor stands on STEP, before the first forward."""
        self._where: dict[Access, list[int]] = {}
        for tick, access in enumerate(trace.accesses):
            self._where.setdefault(access, []).append(tick)

    def advance(self, access: Access) -> int | None:
        """The tick `access` is at, or None when this trace never has it. Jumps ahead where steps were left out."""
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
        """Ticks from `tick` to the next use of `unit`, at least 1; infinite if the trace never uses it."""
        ticks = self._ticks.get(unit)
        if not ticks:
            return inf
        later = bisect_right(ticks, tick)
        return (ticks[later] if later < len(ticks) else ticks[0] + self.period) - tick
