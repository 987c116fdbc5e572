"""Idle leases: which of them are evicted, to make room for another lease."""

from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import islice
from math import inf

from pagoda.memory.page import PageRun
from pagoda.schedule.agenda import Agenda
from pagoda.schedule.frames import Frames
from pagoda.schedule.records import Lease

_CANDIDATES = 16
"""The number of slabs in which a prefetch looks for frames. A fetch for which compute waits looks in all slabs."""


class IdleLeases:
    """The leases that may make room, by slab of frames.

    Invariant: every lease that may make room is listed in its slab, and its slab in `_slabs`. The reverse need not
    hold: what an event outdates is corrected when it is read (`Agenda`).
    """

    def __init__(self, frames: Frames, leases: dict[int, Lease], next_use: Callable[[Lease], float | None]) -> None:
        """`leases`: by unit. `next_use`: the time of a lease's next use. None if it may not make room now."""
        self._frames, self._leases, self._next_use = frames, leases, next_use
        self._units = [Agenda(partial(self._entry, slab)) for slab in range(frames.slabs)]
        """By slab, units by minus the time of their next use."""
        self._slabs = Agenda(self._entry_of_slab)
        """Slabs, by the least time in their `_units`."""
        self._no_room: dict[int, tuple[int, float]] = {}
        """Slab -> the frames and the time for which its leases could not make room. It holds for more frames and later
        times, too. It is forgotten when a lease there becomes idle or free. An expected use that does not happen does
        not clear it, so a prefetch may begin later."""

    def note(self, unit: int) -> None:
        """A unit's lease may have become idle, or is used at another time."""
        lease = self._leases.get(unit)
        if lease is not None and (use := self._next_use(lease)) is not None:
            slab = self._frames.slab_of(lease.run)
            self._units[slab].put(unit, -use, lease.run.count)
            self._slabs.put(slab, min(-use, self._slabs.time(slab)))
            self._no_room.pop(slab, None)

    def freed(self, run: PageRun) -> None:
        """The frames of a lease are free."""
        self._no_room.pop(self._frames.slab_of(run), None)

    def victims(self, count: int, needed_at: float) -> list[PageRun]:
        """The leases to end so that `count` adjacent frames are free: those that are used last, all after `needed_at`.
        Empty if there are none."""
        with closing(self._slabs.in_order()) as slabs:
            for time, slab in islice(slabs, None if needed_at == -inf else _CANDIDATES):
                if -time <= needed_at:
                    break
                if victims := self._victims_in(slab, count, needed_at):
                    return victims
        return []

    def _victims_in(self, slab: int, count: int, needed_at: float) -> list[PageRun]:
        """The leases of a slab to end. Empty if others are between them."""
        fewest, earliest = self._no_room.get(slab, (inf, inf))
        if count >= fewest and needed_at >= earliest:
            return []
        window = self._frames.window(slab, count)
        with closing(self._units[slab].in_order()) as units:
            for time, unit in units:
                if -time <= needed_at:
                    break
                if victims := window.offer(self._leases[unit].run):
                    return victims
        self._no_room[slab] = count, needed_at
        return []

    def _entry(self, slab: int, unit: int) -> tuple[float, int] | None:
        lease = self._leases.get(unit)
        if lease is None or self._frames.slab_of(lease.run) != slab or (use := self._next_use(lease)) is None:
            return None  # it comes back when it is idle again
        return -use, lease.run.count

    def _entry_of_slab(self, slab: int) -> tuple[float, int] | None:
        first = self._units[slab].first()
        return None if first is None else (first[0], 0)
