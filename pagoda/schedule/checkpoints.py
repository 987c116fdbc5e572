"""Checkpoints: which units are read next.

A checkpoint reads every state as the last `step()` left it. As soon as a unit has that version, the checkpoint refers
to its runs, so that no update changes them before they are read (`versions.py`).

A later update may wait for room on SSD that the checkpoint frees only when it is complete. So nothing that the
checkpoint needs waits for a later update: no later update begins while an update that the checkpoint needs is missing.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from pagoda.memory.page import PageRun
from pagoda.schedule.operations import Operation, Save, SchedulePlan
from pagoda.schedule.order import Order
from pagoda.schedule.versions import Versions

MOST_SAVES = 2
"""The number of units that a checkpoint reads at once."""


@dataclass(slots=True)
class UnitSaving:
    """What the checkpoint needs from one unit."""

    version: int | None = None
    """The version that the checkpoint has not read yet."""
    runs: tuple[PageRun, ...] | None = None
    """Where that version is, once the unit has it."""
    reading: bool = False


@dataclass(eq=False, repr=False)
class Checkpoint:
    """The checkpoint under way, if any.

    Invariant: the checkpoint reads the version that it requested.
    """

    _plan: SchedulePlan
    _order: Order
    _versions: Versions
    _issue: Callable[[Operation], None]

    def __post_init__(self) -> None:
        self._units: list[UnitSaving] = []
        self.restored()

    def restored(self) -> None:
        """Every state has been replaced. The checkpoint under way, if any, was given up."""
        for unit, saving in enumerate(self._units):
            self._versions.unpin(unit, saving.runs or ())
        self._units = [UnitSaving() for _ in self._plan.units]
        self._one_version: Collection[int] = ()
        """Units whose next version must not be written before these are read, because SSD has no room for both."""
        self._next: list[tuple[float, int]] = []
        """A heap of (urgency, unit) of what has not been read yet. It may contain outdated entries."""
        self._reading = 0
        self._behind: set[int] = set()
        """Units still without an update that the checkpoint needs."""
        self.left = 0
        """The number of units that have not been read yet."""
        self.under_way = False
        """True until the checkpoint is written or given up."""

    def begin(self, one_version: Collection[int]) -> None:
        """Begin a checkpoint of every state as the last `step()` left it. SSD has no room for another version of units
        `one_version`."""
        self.left, self.under_way = len(self._units), True
        self._one_version = one_version
        self._behind = set(range(len(self._units)))
        for unit, weights in enumerate(self._versions.of):
            self._units[unit].version = weights.due
            self.wake(unit)

    def ended(self, unit: int) -> None:
        """A SAVE has ended or failed."""
        self._versions.unpin(unit, self._units[unit].runs or ())
        self._units[unit] = UnitSaving()
        self._reading -= 1
        self.left -= 1

    def wake(self, unit: int) -> bool:
        """An update has ended for which a SAVE may have waited. Returns whether it is the last update that the
        checkpoint needs, so that later updates need not wait any more."""
        lacked, saving = bool(self._behind), self._units[unit]
        if saving.version is not None and saving.runs is None and self._versions.settled(unit) == saving.version:
            self._behind.discard(unit)
            saving.runs = self._versions.pin(unit)
            use = self._order.next_use(unit)  # backward uses, and so updates, in the opposite order
            heappush(self._next, (-use if self._plan.during_backward else use, unit))
        return lacked and not self._behind

    def refused(self, unit: int) -> None:
        """An update has left a unit's states unchanged."""
        saving, version = self._units[unit], self._versions.of[unit].newest
        if saving.version is not None and saving.version > version:
            saving.version -= 1

    def holds_back(self, unit: int) -> bool:
        """Whether the next update of a unit must wait. A unit that has the checkpoint's version waits until all units
        have theirs. If SSD has no room for another version of it, it also waits until it has been read."""
        if unit in self._one_version and self._units[unit].runs is not None:
            self.hurry(unit)
            return True
        return bool(self._behind) and unit not in self._behind

    def hurry(self, unit: int) -> None:
        """An update may wait for the unit to be read. The sooner it is, the sooner the update may begin."""
        if self._units[unit].runs is not None:
            heappush(self._next, (-inf, unit))

    def pump(self) -> None:
        """Start every SAVE that can start now."""
        while self._reading < MOST_SAVES and self._next:
            unit = heappop(self._next)[-1]
            saving = self._units[unit]
            if saving.version is None or saving.runs is None or saving.reading:
                continue  # it has been read
            saving.reading = True
            self._reading += 1
            self._issue(Save(unit, saving.version, saving.runs))

    @property
    def lost(self) -> bool:
        """Whether the checkpoint waits for an update after one has failed. It may then never end."""
        return self._versions.failed and any(of.version is not None and of.runs is None for of in self._units)
