"""Checkpoints: which units are read next, and the reserve of old states.

A checkpoint reads every state as the last `step()` leaves it. An update that comes later destroys what the checkpoint
has yet to read. So it waits for the SAVE, or keeps the old states in the reserve, if there is room: the SAVE then reads
them there. The same reserve holds what an UNDO may need. A checkpoint waits for a later update only while that update
runs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

from pagoda.schedule.operations import Kind, Operation, SchedulePlan
from pagoda.schedule.order import Order

MOST_SAVES = 2
"""Units that a checkpoint reads at once."""


@dataclass(slots=True)
class Saving:
    """What the checkpoint needs of one unit."""

    version: int | None = None
    """The version that it has yet to read."""
    reading: bool = False
    kept: bool = False
    """Whether the reserve holds the states of `version`, because the home has others by now, or is about to."""


class Checkpoint:
    """The one that is under way, if any; and the reserve.

    Invariants: it reads the version that it asked for; what is kept fits the reserve.
    """

    def __init__(
        self,
        plan: SchedulePlan,
        order: Order,
        settled: Callable[[int], int | None],
        issue: Callable[[Operation], None],
    ) -> None:
        """`settled` gives the version of a unit's states, None while they change."""
        self._plan = plan
        self._order = order
        self._settled = settled
        self._issue = issue
        self._units = [Saving() for _ in plan.units]
        self._next: list[tuple[float, int]] = []
        """(urgency, unit) of what is yet to be read: a heap, with entries that no longer count."""
        self._reading = 0
        self.left = 0
        """Units that are yet to be read."""
        self.reserve = plan.reserve_pages
        """Pages that are free."""

    def begin(self, versions: list[int]) -> None:
        """A checkpoint is to have these versions of the units' states."""
        self.left = len(versions)
        for unit, version in enumerate(versions):
            self._units[unit].version = version
            self.retry(unit)

    def ended(self, unit: int) -> None:
        """A SAVE has ended, well or not."""
        if self._units[unit].kept:
            self.give_back(unit)
        self._units[unit] = Saving()
        self._reading -= 1
        self.left -= 1

    def retry(self, unit: int) -> None:
        """An update that a SAVE may have waited for has ended."""
        if self._units[unit].version is not None:
            heappush(self._next, (self._order.next_use(unit), unit))

    def refused(self, unit: int, version: int, newest: int) -> None:
        """A unit's states are to stay at `version`, not to become `newest`."""
        wanted = self._units[unit].version
        if wanted is not None and wanted > version:
            self._units[unit].version = wanted - (newest - version)

    def keep(self, unit: int, version: int, speculative: bool) -> bool | None:
        """Whether an update of these states is to keep them, and has room for that; None if it has to wait."""
        of_unit, pages = self._units[unit], self._plan.units[unit].old_state_pages
        needed = of_unit.version == version and not of_unit.kept
        if needed:
            heappush(self._next, (-1.0, unit))  # the sooner it is read, the sooner the update may begin
        if not (needed or speculative):
            return False
        if (needed and of_unit.reading) or self.reserve < pages:
            return None
        self.reserve -= pages
        of_unit.kept = of_unit.kept or needed
        return True

    def give_back(self, unit: int) -> None:
        """Old states of a unit are not needed any more."""
        self.reserve += self._plan.units[unit].old_state_pages

    def pump(self) -> None:
        """Start every SAVE that can start now."""
        while self._reading < MOST_SAVES and self._next:
            unit = heappop(self._next)[-1]
            of_unit, version = self._units[unit], self._settled(unit)
            if of_unit.version is None or of_unit.reading or version is None:
                continue  # it has been read, or comes back when an update has ended
            if version == of_unit.version or of_unit.kept:
                of_unit.reading = True
                self._reading += 1
                self._issue(Operation(Kind.SAVE, unit, version=of_unit.version, keeps_old=of_unit.kept))
