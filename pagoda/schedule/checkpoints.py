"""Checkpoints: which units are read next, and the reserve of old states.

A checkpoint reads every state as the last `step()` left it. A later update of a unit that has not been read waits for
its SAVE. Or, if there is room, the update first copies the old states to the reserve, and the SAVE reads the copy.

A later update may wait for room on SSD that the checkpoint frees only when it is complete. So nothing that the
checkpoint needs waits for a later update: the SAVE of a copy does not wait until that update has ended, and no later
update begins while an update that the checkpoint needs is missing.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from pagoda.memory.page import PageRun
from pagoda.memory.pool import PagePool
from pagoda.schedule.operations import Kind, Operation, SchedulePlan
from pagoda.schedule.order import Order
from pagoda.schedule.versions import Versions

MOST_SAVES = 2
"""The number of units that a checkpoint reads at once."""


@dataclass(slots=True)
class UnitSaving:
    """What the checkpoint needs from one unit."""

    version: int | None = None
    """The version that the checkpoint has not read yet."""
    reading: bool = False
    kept: PageRun | None = None
    """The room in the reserve for the states of `version`, if an update has replaced them in their home or is about
    to."""
    copied: bool = False
    """Whether the states have been copied to `kept`."""


@dataclass(eq=False, repr=False)
class Checkpoint:
    """The checkpoint under way, if any, and the reserve.

    Invariants: the checkpoint reads the version that it requested; kept states fit the reserve.
    """

    _plan: SchedulePlan
    _order: Order
    _versions: Versions
    _issue: Callable[[Operation], None]

    def __post_init__(self) -> None:
        self.restored()

    def restored(self) -> None:
        """Every state has been replaced. The checkpoint under way, if any, was given up."""
        self._units = [UnitSaving() for _ in self._plan.units]
        self._in_place: Collection[int] = ()
        """Units whose old states can only be read in their home."""
        self._next: list[tuple[float, int]] = []
        """A heap of (urgency, unit) of what has not been read yet. It may contain outdated entries."""
        self._reading = 0
        self._behind: set[int] = set()
        """Units still without an update that the checkpoint needs."""
        self.left = 0
        """The number of units that have not been read yet."""
        self.under_way = False
        """True until the checkpoint is written or given up."""
        pages = self._plan.reserve_pages
        self.reserve = PagePool(pages) if pages else None

    def begin(self, in_place: Collection[int]) -> None:
        """Begin a checkpoint of every state as the last `step()` left it. The states of units `in_place` are not kept
        elsewhere."""
        self.left, self.under_way = len(self._units), True
        self._in_place = in_place
        self._behind = set(range(len(self._units)))
        for unit, weights in enumerate(self._versions.of):
            self._units[unit].version = weights.due
            self.retry(unit)

    def ended(self, unit: int) -> None:
        """A SAVE has ended or failed."""
        self._give_back(unit)
        self._units[unit] = UnitSaving()
        self._reading -= 1
        self.left -= 1

    def retry(self, unit: int) -> bool:
        """An update has ended for which a SAVE may have waited. Returns whether it is the last update that the
        checkpoint needs, so that later updates need not wait any more."""
        lacked = bool(self._behind)
        if self._versions.settled(unit) == self._units[unit].version:
            self._behind.discard(unit)
        if self._units[unit].version is not None:
            use = self._order.next_use(unit)  # backward uses, and so updates, in the opposite order
            heappush(self._next, (-use if self._plan.during_backward else use, unit))
        return lacked and not self._behind

    def refused(self, unit: int, kept: bool) -> None:
        """An update has left a unit's states unchanged. `kept`: it was going to copy them to the reserve, but has
        not."""
        of_unit, version = self._units[unit], self._versions.of[unit].newest
        if of_unit.version is not None and of_unit.version > version:
            of_unit.version -= 1
        if kept and not of_unit.copied:
            self._give_back(unit)

    def copied(self, unit: int) -> None:
        """The reserve has the old states of a unit."""
        if self._units[unit].kept is not None:
            self._units[unit].copied = True
            self.retry(unit)

    def holds_back(self, unit: int) -> bool:
        """Whether the next update of a unit must wait for updates of other units that the checkpoint needs."""
        return bool(self._behind) and unit not in self._behind

    def would_lose(self, unit: int) -> bool:
        """Whether the next update of a unit destroys states that the checkpoint has not read yet."""
        of_unit = self._units[unit]
        return of_unit.version == self._versions.of[unit].newest and of_unit.kept is None

    def can_keep(self, unit: int) -> bool:
        """Whether an update can keep the old states now. If not, it has to wait for the SAVE."""
        heappush(self._next, (-inf, unit))  # the sooner it is read, the sooner the update may begin
        if unit in self._in_place or self._units[unit].reading:
            return False
        pages = self._plan.units[unit].old_state_pages
        return not pages or (self.reserve is not None and self.reserve.largest_free >= pages)

    def keep(self, unit: int) -> PageRun | None:
        """Where an update keeps the old states. None if it has to wait for the SAVE."""
        of_unit, pages = self._units[unit], self._plan.units[unit].old_state_pages
        if self.can_keep(unit):
            of_unit.kept = self.reserve.alloc(pages) if self.reserve is not None and pages else PageRun(0, 0)
        return of_unit.kept

    def pump(self) -> None:
        """Start every SAVE that can start now."""
        while self._reading < MOST_SAVES and self._next:
            unit = heappop(self._next)[-1]
            of_unit = self._units[unit]
            if of_unit.version is None or of_unit.reading or not self._readable(unit):
                continue  # it has been read, or comes back when an update has ended
            of_unit.reading = True
            self._reading += 1
            self._issue(Operation(Kind.SAVE, unit, of_unit.kept, of_unit.version))

    @property
    def lost(self) -> bool:
        """Whether the checkpoint waits for an update after one has failed. It may then never end."""
        waiting = (unit for unit, of in enumerate(self._units) if of.version is not None and not of.reading)
        return self._versions.failed and not all(map(self._readable, waiting))

    def _give_back(self, unit: int) -> None:
        """Free the old states of a unit, which are no longer needed."""
        kept, self._units[unit].kept = self._units[unit].kept, None
        if kept is not None and kept.count:
            assert self.reserve is not None
            self.reserve.free(kept)

    def _readable(self, unit: int) -> bool:
        """Whether the states that the checkpoint needs of a unit are in its home or in the reserve."""
        of_unit = self._units[unit]
        return of_unit.copied if of_unit.kept is not None else self._versions.settled(unit) == of_unit.version
