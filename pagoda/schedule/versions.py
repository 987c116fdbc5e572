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
    in_two: bool = False
    """Whether it has two parts."""
    persists: bool = False
    """Whether its first part is over. It then goes through the queue once more, for the second."""
    extent: int = 0
    """Which extent of the weights it writes: see `Weights.front`."""
    withdrawn: bool = False
    """It is to be undone as soon as it has ended."""


@dataclass(eq=False, slots=True)
class Weights:
    """The versions of one unit's weights."""

    newest: int = 0
    """Of the weights that the latest update has written."""
    due: int = 0
    """Steps that have asked for an update."""
    lag: int = 0
    """How many of these accesses do not see yet: only with asynchronous updates."""
    update: Update | None = None
    """The one that is queued or under way."""
    asking: Update | None = None
    """An early one that is not queued yet."""
    guess: Update | None = None
    """A speculative one, in any state, until it stands or is undone."""
    sharing: int | None = None
    """The step of an update that was speculative and stands, where the other ranks' parts of it are yet to come."""
    later: list[Update] = field(default_factory=list)
    """Those that wait for it to end."""
    open: list[Record] = field(default_factory=list)
    """Gradients that an asynchronous update is to apply together with those of steps to come."""
    front: int = 0
    """Which extent accesses read, of the two that weights have where updates are asynchronous: 0 or 1."""

    @property
    def version(self) -> int:
        """The version that accesses read."""
        return self.due - self.lag


class Versions:
    """The weights of every unit."""

    def __init__(self, plan: SchedulePlan) -> None:
        self._plan = plan
        self.of = [Weights() for _ in plan.units]
        """By unit."""
        self.restored()

    def restored(self) -> None:
        """Every state has been replaced, in all extents."""
        self.of = [Weights(front=weights.front) for weights in self.of]
        self.failed = False
        """Whether an update has failed: states are damaged, until all are `restored`."""

    def readable(self, unit: int) -> int | None:
        """The version of a unit's weights that can be read now; None where something must come first."""
        weights = self.of[unit]
        if self.failed or weights.guess is not None or weights.newest < weights.version:
            return None
        if weights.sharing is not None:
            return None
        return weights.version

    def fetchable(self, unit: int) -> int | None:
        """The version of a unit's weights that a FETCH can be issued for. Where ranks must agree on fetches, that does
        not depend on whether its update has ended: the FETCH waits for that."""
        return self.of[unit].version if self._plan.ranks_fetch_alike else self.readable(unit)

    def awaited(self, unit: int, version: int) -> tuple[int, ...]:
        """The step whose gradient makes a version of a unit's weights, where ranks must agree and it is yet to come, or
        other ranks' parts of it are."""
        weights = self.of[unit]
        missing = version - weights.newest
        guess = weights.guess
        if guess is not None and guess.withdrawn and guess.has_written:  # until it is undone, `newest` counts it
            missing += len(guess.records)
        if missing == 0 and weights.sharing is not None:
            return (weights.sharing,)
        if not self._plan.ranks_fetch_alike or missing <= 0 or weights.update is None:
            return ()
        begun = [] if weights.update.has_written or weights.update is guess else [weights.update]
        records = [record for update in (*begun, *weights.later) for record in update.records]
        return (records[missing - 1].step,)

    def undoing(self, unit: int) -> bool:
        """Whether a speculative update of a unit is being undone, or is to be."""
        guess = self.of[unit].guess
        return guess is not None and guess.withdrawn

    def settled(self, unit: int) -> int | None:
        """The version of a unit's states; None while they change."""
        weights = self.of[unit]
        update = weights.update
        running = update is not None and update.state in (UpdateState.RUNNING, UpdateState.UNDOING)
        busy = running or (update is not None and update.persists)
        return None if busy or weights.sharing is not None else weights.newest
