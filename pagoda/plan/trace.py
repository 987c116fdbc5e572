"""The trace: in which order one step uses its units."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum


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
