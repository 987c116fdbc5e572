"""Leases: which weights compute can read, which are fetched next, and which make room.

This file has decisions only. The tensors of leases are in `runtime/leases.py`.

The rule is the "aggressive" strategy of Cao, Felten, Karlin and Li, "A study of integrated prefetching and caching
strategies" (SIGMETRICS 1995): fetch the next missing unit as soon as frames allow, evict the unit whose next use is
furthest away, and never evict a unit that is needed before the one that it makes room for.

A lease is filled, ends when it is evicted or its weights change, and is reclaimed: then its frames are free. If it ends
before it is filled, it is reclaimed once it is.

A graph that will run backward, or a tensor of the user, may still refer to the frames of an ended lease. Only the
executor knows, so EVICT or OUTDATE asks it. If something still refers to the frames, `let_go` comes when nothing does.

If several ranks must fetch alike (`plan.ranks_fetch_alike`), no decision here depends on when an operation ends.
Fetches start only in compute's events, before the UPDATE that they wait for has ended, and a lease may make room while
it is being filled. The executor makes such an operation wait for what is under way. A speculative update ends no lease,
because it changes no weights before it is confirmed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from pagoda.memory.page import PageRun
from pagoda.schedule.agenda import Agenda
from pagoda.schedule.frames import Frames
from pagoda.schedule.idle_leases import IdleLeases
from pagoda.schedule.operations import Evict, Operation, Outdate, SchedulePlan
from pagoda.schedule.order import Order
from pagoda.schedule.records import Lease
from pagoda.schedule.versions import Versions

MOST_PREFETCHES = 2
"""A prefetch starts only while fewer FETCHes are running. More would delay fetches for which compute waits. How far
ahead of compute leases are filled depends on their frames alone: LEASES_AHEAD (`plan/buffers.py`), or on a separate
device, all that is left of its memory (`plan/place.py`)."""


@dataclass(eq=False, repr=False)
class Leases:
    """All uses of weights by compute, and all leases. A unit has at most one lease that has not ended.

    Invariants: a frame belongs to at most one lease; a unit in use is not evicted; a fetch reads the version that
    accesses need, and a lease ends before that version changes, so no access ever finds old weights. The unit that
    compute used last is not evicted either, because backward accesses it once for each of its operations.
    """

    _plan: SchedulePlan
    _order: Order
    _versions: Versions
    _issue: Callable[[Operation], None]

    def __post_init__(self) -> None:
        plan = self._plan
        self.frames = Frames(plan.frame_pool, plan.frame_slab or max(unit.lease_frames for unit in plan.units))
        in_place = (unit for unit, of in enumerate(plan.units) if not of.lease_frames)
        self._leases = {unit: Lease(unit, PageRun(0, 0), 0, filled=True) for unit in in_place}
        """unit -> its lease that has not ended."""
        self._owner: dict[int, Lease] = {}
        """first frame -> the lease that holds it. Includes ended leases."""
        self._users = [0] * len(plan.units)
        """By unit, the number of forwards and backwards that use it now or wait for it."""
        self._waiting: dict[int, int] = {}
        """unit -> the number of its users that wait for it, in the order in which units began to wait."""
        self._last_used = -1
        """The unit that compute used last."""
        self._missing = Agenda(self._use_if_missing)
        """Units that may need a lease, by the time of their next use."""
        self._idle = IdleLeases(self.frames, self._leases, self._next_use_if_idle)
        self._after_step: list[int] = []
        """Units that are not prefetched before `step()`, because it will change their weights."""
        self.changes = True
        """Whether an event since the last pump may let a fetch start."""
        self._reclaiming = 0
        """The number of EVICT and OUTDATE operations without an answer."""
        self._filling = 0
        """The number of FETCH operations that have not ended."""
        self._fetching: list[list[int]] = [[] for _ in plan.units]
        """By unit, the versions that FETCHes under way bring. There are several if the first version is outdated
        already."""
        self._others_read = [0] * len(plan.units)
        """By unit, the number of other ranks that read the weights in their home."""
        for unit in range(len(plan.units)):
            self._note_missing(unit)

    # --- events ---

    def access(self, unit: int) -> None:
        """Compute begins to use a unit. `order` has already advanced to this access."""
        self.changes = True
        self._users[unit] += 1
        self._waiting[unit] = self._waiting.get(unit, 0) + 1
        self._turn_to(unit)

    def expect(self, units: Sequence[int]) -> Iterator[Lease]:
        """These units are used next, in this order. Compute does little before it needs them, so all are fetched at
        once if frames allow. Yields their leases, as `pump` does."""
        for unit in units:
            self._note_missing(unit)
        return self._begin((unit, self._order.next_use(unit)) for unit in units if self._may_begin(unit))

    def release(self, unit: int) -> None:
        """Compute has ended one use of a unit, or no longer waits for it."""
        self._users[unit] -= 1
        if unit in self._waiting:
            self._waiting[unit] = min(self._waiting[unit], self._users[unit])
        if not self._users[unit]:
            self.changes = self.changes or unit != self._last_used or unit in self._waiting
            self._waiting.pop(unit, None)
            self._idle.note(unit)

    def issued(self, lease: Lease) -> None:
        """The copy that fills a lease is in the device's queue, so compute can continue behind it."""
        if lease.filled:
            return
        lease.filled = True
        if self._plan.ranks_fetch_alike:
            return
        if lease.ended_by is not None:
            self._reclaim(lease)
        else:
            self._idle.note(lease.unit)

    def ended(self, lease: Lease, failed: bool = False) -> None:
        """The fetch of a lease has ended. A failed fetch is tried again as long as compute waits for it."""
        self.changes = True
        self._filling -= 1
        self._fetching[lease.unit].remove(lease.version)
        self._versions.end_read(lease.unit, lease)
        if failed and lease.ended_by is None:
            lease.filled = True
            self._end(lease, again=False)
        else:
            self.issued(lease)

    def reclaimed(self, lease: Lease, freed: bool) -> None:
        """The answer to EVICT or OUTDATE: whether the frames of a lease are free, because nothing refers to them."""
        self._reclaiming -= 1
        self.changes = True
        if freed:
            self.free(lease)

    def free(self, lease: Lease) -> None:
        """Nothing refers any more to an ended lease."""
        self.changes = True
        del self._owner[lease.run.start]
        self.frames.free(lease.run)
        self._idle.freed(lease.run)

    def others_read(self, unit: int, begin: bool) -> None:
        """Another rank begins or ends a read of a unit's weights in their home."""
        if begin and not self._others_read[unit]:
            self._versions.begin_read(unit, "other ranks")
        self._others_read[unit] += 1 if begin else -1
        if not self._others_read[unit]:
            self._versions.end_read(unit, "other ranks")

    def outdate(self, unit: int) -> None:
        """A unit's weights are about to change, so its lease ends."""
        lease = self._leases.get(unit)
        if lease is not None and lease.run.count:
            self._end(lease)

    def end_step(self, retraced: bool) -> None:
        """`step()` has queued its updates, so the other units can be prefetched across it. `retraced`: the trace was
        replaced, and with it the order in which units are missing or idle."""
        self._turn_to(-1)
        self.changes = True
        for unit in range(len(self._users)) if retraced else self._after_step:
            self._note_missing(unit)
            self._idle.note(unit)
        self._after_step.clear()

    # --- questions ---

    def of(self, unit: int) -> Lease | None:
        """A unit's lease that has not ended, which may not be filled yet."""
        return self._leases.get(unit)

    def waits(self, unit: int) -> bool:
        """Whether compute has accessed a unit and cannot read its weights yet."""
        return unit in self._waiting

    def uses(self, unit: int) -> bool:
        """Whether compute uses a unit whose weights it can read."""
        return self._users[unit] > self._waiting.get(unit, 0)

    def blocks_update(self, unit: int) -> bool:
        """Whether compute uses a unit, or a FETCH or another rank reads what the unit's next update may overwrite. An
        asynchronous update overwrites no weights, and waits only until compute has left the unit."""
        if self._plan.asynchronous:
            return self.uses(unit)
        read = any(version <= self._versions.of[unit].newest for version in self._fetching[unit])
        return self.uses(unit) or read or self._others_read[unit] > 0

    def holders(self) -> list[int]:
        """Units whose frames cannot be taken now."""
        return sorted({lease.unit for lease in self._owner.values() if not self._may_end(lease)})

    # --- decisions ---

    def pump(self) -> Iterator[Lease]:
        """Begin every lease that can begin now. Yields each one, so that its FETCH starts before anything else is
        decided."""
        if not self._reclaiming:  # else wait: frames taken now would leave gaps beside those that are about to be free
            yield from self._begin(self._next())
        self.changes = False

    def serve(self) -> None:
        """Resume compute for each unit whose weights it can now read."""
        for unit in [*self._waiting] if self._waiting else ():
            lease = self._leases.get(unit)
            if lease is not None and lease.filled and self._versions.readable(unit) is not None:
                del self._waiting[unit]

    def _next(self) -> Iterator[tuple[int, float]]:
        """The units whose leases begin next, each with the time at which it is needed. Those for which compute waits
        come first."""
        for unit in [*self._waiting]:
            if self._may_begin(unit):
                yield unit, -inf
        while self._plan.ranks_fetch_alike or self._filling < MOST_PREFETCHES:
            if (missing := self._next_missing()) is None:
                return
            yield missing, self._order.next_use(missing)
            self._missing.remove(missing)  # its lease has begun

    def _may_begin(self, unit: int) -> bool:
        """Whether a unit needs a lease, and its weights can be read."""
        return unit not in self._leases and self._versions.fetchable(unit) is not None

    def _next_missing(self) -> int | None:
        """The unit to prefetch next: the one that is used first. None also if that unit waits for its update."""
        while (first := self._missing.first()) is not None:
            use, unit = first
            if use == inf or not self._order.is_expected(unit):
                self._missing.remove(unit)  # the trace never uses it
            elif self._updated_before(unit, use):
                self._missing.remove(unit)
                self._after_step.append(unit)
            else:
                # Units that are used after it must not take its frames.
                return None if self._versions.fetchable(unit) is None else unit
        return None

    def _use_if_missing(self, unit: int) -> tuple[float, int] | None:
        return None if unit in self._leases else (self._order.next_use(unit), 0)

    def _next_use_if_idle(self, lease: Lease) -> float | None:
        """The time of a lease's next use. Infinite if an update ends the lease before. None if it may not make room."""
        if not self._may_end(lease):
            return None
        use = self._order.next_use(lease.unit)
        return inf if self._updated_before(lease.unit, use) else use

    def _updated_before(self, unit: int, use: float) -> bool:
        return self._plan.units[unit].trained and use > self._order.step

    def _begin(self, wanted: Iterable[tuple[int, float]]) -> Iterator[Lease]:
        """Begin the leases of units that are needed at some time, in this order, until there are no frames for one. So
        later ones do not overtake it."""
        for unit, needed_at in wanted:
            count, version = self._plan.units[unit].lease_frames, self._versions.fetchable(unit)
            assert version is not None
            run = self.frames.alloc(count)
            if run is None:
                for victim in () if self._reclaiming else self._idle.victims(count, needed_at):
                    self._end(self._owner[victim.start], by=Evict)
                return
            lease = self._leases[unit] = self._owner[run.start] = Lease(unit, run, version)
            self._filling += 1
            self._fetching[unit].append(version)
            self._versions.begin_read(unit, lease)
            if self._plan.ranks_fetch_alike:
                self._idle.note(unit)
            yield lease

    def _may_end(self, lease: Lease) -> bool:
        """Whether a lease may end to make room for another."""
        settled = lease.ended_by is None and (lease.filled or self._plan.ranks_fetch_alike)
        return lease.run.count > 0 and settled and not self._users[lease.unit] and lease.unit != self._last_used

    def _turn_to(self, unit: int) -> None:
        """Compute has left the unit that it used last."""
        before, self._last_used = self._last_used, unit
        if before >= 0:
            self._idle.note(before)

    def _note_missing(self, unit: int) -> None:
        """List a unit without a lease for prefetching, at the time of its next use."""
        if unit not in self._leases:
            self.changes = True
            self._missing.put(unit, self._order.next_use(unit))

    def _end(self, lease: Lease, by: type[Evict | Outdate] = Outdate, again: bool = True) -> None:
        """End a lease. If `again`, its unit may be fetched ahead again."""
        del self._leases[lease.unit]
        lease.ended_by = by
        if again:
            self._note_missing(lease.unit)
        if lease.filled or self._plan.ranks_fetch_alike:
            self._reclaim(lease)

    def _reclaim(self, lease: Lease) -> None:
        self._reclaiming += 1
        self._issue(lease.ended_by(lease.unit, lease))
