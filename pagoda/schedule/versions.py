"""The versions of each unit's weights, and the update that makes the next one.

A version counts the steps whose gradients the weights contain.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from pagoda.memory.page import Run
from pagoda.schedule.gradients import Record
from pagoda.schedule.operations import Operation, SchedulePlan


class UpdateState(Enum):
    ASKING = auto()
    """It is early: RECLAIM asks whether anything refers to the weights, or has been answered that something does."""
    QUEUED = auto()
    LOADING = auto()
    """Its gradient is on its way to RAM. From here on it is one of the updates under way."""
    RUNNING = auto()
    UNDOING = auto()


@dataclass(eq=False, slots=True)
class Update:
    """One update of a unit."""

    unit: int
    records: list[Record]
    speculative: bool = False
    """Whether `step()` has not yet said that it stands."""
    state: UpdateState = UpdateState.QUEUED
    query: Operation | None = None
    """The RECLAIM under way."""
    urgent: bool = False
    """Whether compute waits for it."""
    keeps: Run | None = None
    """Where it keeps the old states for a checkpoint, if it does."""
    admitted: bool = False
    """Whether it counts among those under way at once."""
    has_read: bool = False
    """Whether it has read its gradient for the last time."""
    has_written: bool = False
    """Whether it has written the new weights."""
    withdrawn: bool = False
    """It is to be undone as soon as it has ended."""


@dataclass(eq=False, slots=True)
class Weights:
    """The versions of one unit's weights."""

    version: int = 0
    """Of the weights that are read."""
    newest: int = 0
    """Of the newest weights; above `version` while they wait for PUBLISH."""
    due: int = 0
    """Steps that have asked for an update."""
    update: Update | None = None
    """The one that is queued or under way."""
    asking: Update | None = None
    """An early one that is not queued yet."""
    guess: Update | None = None
    """A speculative one, in any state, until it stands or is undone."""
    later: list[Record] = field(default_factory=list)
    """Gradients of steps after `update`, which wait for it to end."""
    read: bool = False
    """Whether this step has read the weights: then all of it must read this version."""

    @property
    def lag(self) -> int:
        """How many steps the weights that are read lack, of those that `step()` has asked for."""
        return self.due - self.version


class Versions:
    """The weights of every unit."""

    def __init__(self, plan: SchedulePlan) -> None:
        self._plan = plan
        self.restored()

    def restored(self) -> None:
        """Every state has been replaced."""
        self.of = [Weights() for _ in self._plan.units]
        """By unit."""
        self.failed = False
        """Whether an update has failed: states are damaged, until all are `restored`."""

    def readable(self, unit: int) -> int | None:
        """The version of a unit's weights that can be read now; None where something must come first."""
        weights = self.of[unit]
        if self.failed or weights.guess is not None or weights.lag > (self._plan.max_staleness or 0):
            return None
        return weights.version

    def fetchable(self, unit: int) -> int | None:
        """The version of a unit's weights that a FETCH can be issued for. Where ranks must agree on fetches, that does
        not depend on whether its update has ended: the FETCH waits for that."""
        return self.of[unit].due if self._plan.ranks_fetch_alike else self.readable(unit)

    def awaited(self, unit: int) -> tuple[int, ...]:
        """The step whose gradient makes the version that a FETCH is issued for, if that is yet to come."""
        weights = self.of[unit]
        if not self._plan.ranks_fetch_alike or weights.version == weights.due or weights.update is None:
            return ()
        return ((weights.later or weights.update.records)[-1].step,)

    def settled(self, unit: int) -> int | None:
        """The version of a unit's states; None while they change."""
        update = self.of[unit].update
        busy = update is not None and update.state in (UpdateState.RUNNING, UpdateState.UNDOING)
        return None if busy else self.of[unit].newest
