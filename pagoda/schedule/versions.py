"""The versions of a unit's weights, and the update that makes the next one.

A version counts the steps whose gradients the weights contain.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from pagoda.memory.page import Run
from pagoda.schedule.gradients import Record
from pagoda.schedule.operations import Operation


class State(Enum):
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
    state: State = State.QUEUED
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
    later: list[Record] = field(default_factory=list)
    """Gradients of steps after that update, which wait for it to end."""
    publishing: bool = False
    read: bool = False
    """Whether this step has read the weights: then all of it must read this version."""
