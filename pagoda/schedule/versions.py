"""The versions of each unit's weights, and the update that makes the next one.

A version is the number of steps whose gradients the weights contain.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from pagoda.memory.page import Run
from pagoda.schedule.gradients import Record
from pagoda.schedule.operations import Operation, SchedulePlan


class UpdateState(Enum):
    ASKING = auto()
    """The update is early. RECLAIM asks whether anything refers to the weights, or the answer was that something
    does."""
    QUEUED = auto()
    LOADING = auto()
    """The gradient is being moved to RAM. From here on, the update counts as under way."""
    RUNNING = auto()
    UNDOING = auto()


@dataclass(eq=False, slots=True)
class Update:
    """One update of a unit."""

    unit: int
    records: list[Record]
    speculative: bool = False
    """True until `step()` confirms the update."""
    state: UpdateState = UpdateState.QUEUED
    query: Operation | None = None
    """The RECLAIM under way."""
    urgent: bool = False
    """Whether compute waits for the update."""
    keeps: Run | None = None
    """Where the update keeps the old states for a checkpoint, if it does."""
    admitted: bool = False
    """Whether the update counts toward the limit of updates under way."""
    has_read: bool = False
    """Whether the update has read its gradient for the last time."""
    has_written: bool = False
    """Whether the update has written the new weights."""
    extent: int = 0
    """The extent of the weights that the update writes: see `Weights.front`."""
    withdrawn: bool = False
    """Whether the update will be undone as soon as it has ended."""


@dataclass(eq=False, slots=True)
class Weights:
    """The versions of one unit's weights."""

    newest: int = 0
    """The version that the latest update has written."""
    due: int = 0
    """The number of steps that have requested an update."""
    lag: int = 0
    """The number of these steps that accesses do not see yet. Not 0 only with asynchronous updates."""
    update: Update | None = None
    """The update that is queued or under way."""
    asking: Update | None = None
    """An early update that is not queued yet."""
    guess: Update | None = None
    """A speculative update, in any state, until it is confirmed or undone."""
    sharing: int | None = None
    """The step of a confirmed speculative update while the other ranks' parts of it have not arrived."""
    later: list[Update] = field(default_factory=list)
    """Updates that wait for `update` to end."""
    open: list[Record] = field(default_factory=list)
    """Gradients that an asynchronous update will apply together with those of coming steps."""
    front: int = 0
    """The extent that accesses read. With asynchronous updates, weights have two extents, 0 and 1."""

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
        """Whether an update has failed. States are then damaged until all are `restored`."""

    def readable(self, unit: int) -> int | None:
        """The version of a unit's weights that can be read now. None if an operation must end first."""
        weights = self.of[unit]
        if self.failed or weights.guess is not None or weights.newest < weights.version:
            return None
        if weights.sharing is not None:
            return None
        return weights.version

    def fetchable(self, unit: int) -> int | None:
        """The version of a unit's weights for which a FETCH can be issued. If ranks must agree on fetches, it does not
        depend on whether the update has ended, because the FETCH waits for that."""
        return self.of[unit].version if self._plan.ranks_fetch_alike else self.readable(unit)

    def awaited(self, unit: int, version: int) -> tuple[int, ...]:
        """The step whose update a FETCH of this version must wait for, if ranks must agree and the update, or other
        ranks' parts of it, have not ended. Otherwise empty."""
        weights = self.of[unit]
        missing = version - weights.newest
        guess = weights.guess
        if guess is not None and guess.withdrawn and guess.has_written:  # `newest` includes it until it is undone
            missing += len(guess.records)
        if missing == 0 and weights.sharing is not None:
            return (weights.sharing,)
        if not self._plan.ranks_fetch_alike or missing <= 0 or weights.update is None:
            return ()
        begun = [] if weights.update.has_written or weights.update is guess else [weights.update]
        records = [record for update in (*begun, *weights.later) for record in update.records]
        return (records[missing - 1].step,)

    def undoing(self, unit: int) -> bool:
        """Whether a speculative update of a unit is being undone or will be."""
        guess = self.of[unit].guess
        return guess is not None and guess.withdrawn

    def settled(self, unit: int) -> int | None:
        """The version of a unit's states. None while they change."""
        weights = self.of[unit]
        update = weights.update
        busy = update is not None and update.state in (UpdateState.RUNNING, UpdateState.UNDOING)
        return None if busy or weights.sharing is not None else weights.newest
