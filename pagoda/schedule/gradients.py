"""Gradient buffers: where gradients wait for their update, and which of them are on SSD meanwhile.

This file has decisions only. The tensors of gradients are in `runtime/gradients.py`.

A record is the gradient of a unit for one step. It begins when autograd or another rank makes the first part of it, and
it ends when its update has used it. A unit whose gradients are never on SSD may have buffers of its own, one for each
step whose gradients may wait. The other units share the pages for buffers. If SSD has room, a complete gradient in
shared pages that waits for `step()` is written there at once, and keeps its buffer until another gradient needs the
pages. So a gradient that is used soon is not read back from SSD. Of several gradients, the one whose buffer has been
idle longest gives its pages up first.
"""

from bisect import insort
from collections.abc import Callable
from typing import Any

from pagoda.schedule.frames import Frames
from pagoda.schedule.operations import GradientMove, Offload, Operation, Reload, SchedulePlan, Spill
from pagoda.schedule.records import GradientRecord


class Gradients:
    """All records.

    Invariants: a page belongs to at most one record; a buffer that something moves or reads is not taken; a record is
    dropped once, by its update or with its step; a copy on SSD is used only while nothing newer has arrived.
    """

    def __init__(self, plan: SchedulePlan, issue: Callable[[Operation], None]) -> None:
        self._plan = plan
        self._issue = issue
        slab = plan.buffer_slab or max(unit.buffer_pages for unit in plan.units)
        self.pages = Frames(plan.buffer_pool, slab)
        self._own_buffers = [[*range(plan.own_buffers)] for _ in plan.units]
        """By unit, its own buffers that no record uses."""
        self._records: dict[int, GradientRecord] = {}
        """unit -> the record of this step."""
        self._earlier: dict[int, GradientRecord] = {}
        """unit -> the record of an earlier step, if an update still needs it."""
        self._to_reduce: list[list[GradientRecord]] = [[] for _ in plan.units]
        """By unit, the records of the parts that ranks have yet to add up, in the order in which they will."""
        self._idle: dict[GradientRecord, None] = {}
        """Records whose shared buffer nothing moves or reads. The one that has been idle longest is first."""
        self._busy: dict[GradientRecord, None] = {}
        """Records whose shared buffer something moves or reads."""
        self._waiting: dict[GradientRecord, None] = {}
        """Records that need a buffer for an update or for a gradient that autograd has made."""
        self.spilling_fails = False
        """Whether a SPILL has failed since compute last made a gradient or was told. Until then, none is tried."""
        self._unread: dict[GradientRecord, None] = {}
        """Records of which a RELOAD has failed. None is tried again before compute was told."""
        self.changes = False
        """Whether something has happened since the last pump that may give a buffer to a record. If not, no pump is
        needed."""

    # --- events ---

    def begin(self, unit: int, step: int, payload: Any = None) -> GradientRecord:
        """A unit's record of this step. If the unit has none, it begins here, with this payload."""
        record = self._records.get(unit)
        if record is None:
            record = self._records[unit] = GradientRecord(unit, step, payload=payload)
        return record

    def add(self, unit: int, step: int, complete: bool, delivery: Any) -> GradientRecord:
        """Autograd has made a gradient of a unit. `complete`: backward has finished with the unit."""
        record = self.begin(unit, step)
        record.complete = complete
        self._deliver(record, delivery)
        return record

    def expect(self, unit: int, step: int, complete: bool) -> GradientRecord:
        """As `add`, but ranks add up the gradient first. It needs no buffer until `reduce`: what frees buffers here may
        be what other ranks add up before it."""
        record = self.begin(unit, step)
        record.complete = complete
        record.to_reduce += 1
        self._to_reduce[unit].append(record)
        return record

    def reduce(self, unit: int, step: int, here: bool, payload: Any, delivery: Any) -> None:
        """Ranks add up gradients of a unit now. `here`: one of them is the oldest that was announced by `expect`."""
        if here:
            record = self._to_reduce[unit].pop(0)
            record.to_reduce -= 1
        else:
            record = self.begin(unit, step, payload)
        self._deliver(record, delivery)

    def moved(self, move: GradientMove, failed: bool) -> None:
        """An OFFLOAD, SPILL or RELOAD has ended. If a SPILL failed, the buffer still has the gradient; if a RELOAD did,
        SSD has. If an OFFLOAD failed, the gradient is lost."""
        record = move.gradient
        if isinstance(move, Offload):
            record.arriving -= 1
        else:
            record.transferring = False
        if isinstance(move, Spill):
            record.clean = record.clean and not failed
            self.spilling_fails = self.spilling_fails or failed
        elif isinstance(move, Offload):
            record.lost = record.lost or failed
        elif failed and not record.dropped:
            self._waiting.pop(record)
            self._unread[record] = None
            self._free(record)
        self._changed(record)
        if not isinstance(move, Offload) or self._plan.during_backward or record.dropped or record.lost:
            return
        if record.complete and record.arrived:
            self._spill(record)  # it waits for `step()`

    def try_again(self) -> None:
        """Compute was told that a SPILL or RELOAD has failed."""
        self.spilling_fails = False
        unread, self._unread = self._unread, {}
        for record in unread:
            record.wanted = True
            self._wait(record)
        self.changes = True

    def use(self, record: GradientRecord) -> None:
        """An update begins to read a gradient."""
        record.in_use = True
        self._changed(record)

    def used(self, record: GradientRecord, last: bool) -> None:
        """An update has read a gradient. If `last`, the gradient is dropped. Otherwise the update may be called off,
        and another update needs the gradient."""
        record.in_use = False
        self._changed(record)
        if last:
            self.drop(record)

    def lend(self, unit: int, lent: bool) -> None:
        """Compute wants to read the gradient of this step of a unit, once it `is_here`. Not `lent`: it has read it."""
        record = self._records.get(unit)
        if record is not None:
            record.lent = lent
            self._changed(record)
            self.usable(record)

    def drop(self, record: GradientRecord) -> None:
        """Drop a gradient that is no longer needed."""
        self._waiting.pop(record, None)
        self._unread.pop(record, None)
        if self._earlier.get(record.unit) is record:
            del self._earlier[record.unit]
        record.made, record.dropped = [], True
        self._changed(record)

    def take(self, unit: int) -> GradientRecord:
        """Hand over the record of this step. Later gradients belong to the next step."""
        record = self._records.pop(unit)
        self._earlier.setdefault(unit, record)
        return record

    def take_all(self) -> list[GradientRecord]:
        """Hand over the records of this step of all units that have one, in the order of units. Those to which nothing
        has come, because of an error, are dropped."""
        taken = [self.take(unit) for unit in sorted(self._records)]
        for record in taken:
            if record.lacks_buffer and record.arrived and not record.clean:
                self.drop(record)
        return [record for record in taken if not record.dropped]

    # --- questions ---

    def of(self, unit: int) -> GradientRecord | None:
        """The record of this step of a unit. None if it has none, or an update has taken it."""
        return self._records.get(unit)

    def usable(self, record: GradientRecord) -> bool:
        """Whether an update can read a gradient now. If not, it is brought to RAM."""
        if record.lacks_buffer:
            record.wanted = True
            self._wait(record)
        return not (record.lacks_buffer or record.transferring)

    def is_here(self, unit: int) -> bool:
        """Whether compute can read the gradient of a unit that was lent to it, and nothing newer is on its way. False
        if an update has taken it."""
        record = self._records.get(unit)
        return record is not None and record.arrived and not (record.lacks_buffer or record.transferring)

    @property
    def exhausted(self) -> bool:
        """Whether a gradient has no buffer, and nothing that is under way will free one."""
        return self.buffer_awaited and not self._busy

    @property
    def buffer_awaited(self) -> bool:
        """Whether a gradient that autograd has made lacks a buffer."""
        return any(record.made for record in (*self._waiting, *self._unread))

    # --- decisions ---

    def pump(self) -> None:
        """Give buffers to the records that wait for one. Updates come first, because they free buffers."""
        self.changes = False
        for record in sorted(self._waiting, key=lambda record: not record.wanted) if self._waiting else ():
            if record.transferring or (record.made and (record.in_use or record.lent)):
                continue
            if not self._give_buffer(record):
                if not record.wanted:
                    return  # gradients arrive in order
                continue
            del self._waiting[record]
            record.wanted = False
            record.clean = record.clean and not record.made
            record.arriving += len(record.made)
            self._changed(record)
            for delivery in record.made:
                self._issue(Offload(record.unit, record, delivery))
            record.made = []

    def _give_buffer(self, record: GradientRecord) -> bool:
        """Give a record a buffer, unless it has one. Returns whether its content is there now: False if there is no
        room, and while a RELOAD fills it."""
        if not record.lacks_buffer:
            return True
        count = self._plan.units[record.unit].buffer_pages
        if not count:
            own = self._own_buffers[record.unit]
            record.own_buffer = own.pop(0) if own else None
            return record.own_buffer is not None
        if self._plan.spills and self._earlier.get(record.unit, record) is not record:
            return False  # SSD has one place for the gradients of a unit
        record.run = self.pages.alloc(count)
        while record.run is None and self._make_room():
            record.run = self.pages.alloc(count)
        if record.run is None:
            return False
        self._changed(record)
        if record.clean:
            self._transfer(Reload, record)
        return not record.clean

    def _make_room(self) -> bool:
        """Free a buffer whose content is also on SSD. If there is none and no buffer is about to be free, write the
        oldest one to SSD."""
        for record in self._idle:
            if record.clean:
                self._free(record)
                return True
        if self._idle and not self._busy and not self.spilling_fails:
            self._spill(next(iter(self._idle)))
        return False

    def _spill(self, record: GradientRecord) -> None:
        if record.run is not None and self._plan.spills:
            record.clean = True  # unless it fails, or more arrives
            self._transfer(Spill, record)

    def _transfer(self, move: type[Spill | Reload], record: GradientRecord) -> None:
        record.transferring = True
        self._changed(record)
        self._issue(move(record.unit, record))

    def _deliver(self, record: GradientRecord, delivery: Any) -> None:
        """Something is there for a record's buffer."""
        self.spilling_fails = False
        record.made.append(delivery)
        self._wait(record)

    def _wait(self, record: GradientRecord) -> None:
        if record not in self._unread:
            self._waiting[record] = None
        self.changes = True

    def _changed(self, record: GradientRecord) -> None:
        """What moves or reads a buffer has changed: update `_idle` and `_busy`, and free the buffer if it was
        dropped."""
        self.changes = True
        if record.dropped and not record.busy:
            self._free(record)
        elif record.run is not None:
            here, there = (self._busy, self._idle) if record.busy else (self._idle, self._busy)
            there.pop(record, None)
            here[record] = None

    def _free(self, record: GradientRecord) -> None:
        if record.run is not None:
            self.pages.free(record.run)
            self._idle.pop(record, None)
            self._busy.pop(record, None)
        if record.own_buffer is not None:
            insort(self._own_buffers[record.unit], record.own_buffer)
        record.run = record.own_buffer = None
