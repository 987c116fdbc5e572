"""A make-believe machine: lanes that do what the scheduler says, and end their operations at random moments."""

from collections import Counter, deque

from pagoda.schedule.operations import Kind, Operation

from .memory import OTHERS, TORN, Memory, require

MAY_FAIL = frozenset(Kind) - {Kind.RECLAIM, Kind.READ_AHEAD}


class Machine(Memory):
    """Lanes, over memory."""

    def advance(self) -> bool:
        """Let one operation come a stage further; False if none can."""
        self.collect()
        if self.plan.ranks_fetch_alike and self.haste.random() < 0.1 and (self.lend() or self.take_part()):
            return True
        ready = [
            op for name, lane in self.lanes.items() if lane and name != self.stalled and (op := self.next_ready(lane))
        ]
        ready += [op for lane in self.lanes.values() for op in lane if op.kind is Kind.UPDATE and not self.kept(op)]
        if not ready:
            return self.lend(new=False) or self.let_go_of_something()
        op = self.haste.choice(ready)
        if op.kind is Kind.UPDATE and not self.kept(op):
            self.copied[op.unit] = op
            self.note("  old states kept", op.unit)
            self.scheduler.old_states_kept(op)
        elif op.kind is Kind.UPDATE and self.stages[op] < 2:
            self.advance_update(op)
        elif op.kind is Kind.FETCH and not self.stages[op] and self.haste.random() < 0.5:
            self.stages[op] = 1
            self.fill(op)
            self.note("  issued", op.kind, op.unit)
            self.scheduler.issued(op)
        else:
            self.lanes[self.lane(op)].remove(op)
            issued = op.kind is Kind.FETCH and self.stages[op]
            lacks = op.kind is Kind.SHARE and not self.is_written(op)
            if lacks or (op.kind in MAY_FAIL and not issued and self.haste.random() < self.rules.failures):
                self.fail(op)
            else:
                self.end(op)
        self.collect()
        return True

    def next_of(self, lane: list[Operation]) -> Operation | None:
        """The operation of a lane that comes further next: the first or the second. Where ranks agree, a FETCH begins
        after the one before, and when the weights are there."""
        first, second = lane[0], lane[1] if len(lane) > 1 and self.haste.random() < 0.3 else None
        if first.kind is Kind.SHARE:
            return first if self.scheduler.versions.failed or self.is_written(first) else None
        if self.plan.ranks_fetch_alike and first.kind is Kind.FETCH:
            if second is not None and self.stages.get(first) and self.has_begun(second):
                return second
            return first if self.has_begun(first) else None
        return second or first

    def is_written(self, share: Operation) -> bool:
        """Whether this rank's part of what a SHARE brings is there."""
        step = share.steps[-1]
        return step in self.truths[share.unit].applied and (share.unit, step) in self.final

    def next_ready(self, lane: list[Operation]) -> Operation | None:
        """The operation of a lane that comes further next, if the lane is not stuck."""
        op = self.next_of(lane) if self.has_room(lane[0]) else None
        return op if op is None or self.has_room(op) else lane[0]

    def has_room(self, op: Operation) -> bool:
        """Whether an operation can go on: where SSD is tight, the updates that follow a checkpoint cannot write before
        that is complete."""
        if self.checkpoint is None or not self.rules.tight or len(self.saved) == len(self.checkpoint):
            return True
        return op.kind is not Kind.UPDATE or op.version <= self.checkpoint[op.unit]

    def kept(self, op: Operation) -> bool:
        """Whether an UPDATE has kept what it was to keep."""
        return op.run is None or self.copied.get(op.unit) is op

    def advance_update(self, op: Operation) -> None:
        self.stages[op] += 1
        infinite = any((op.unit, step) in self.infinite for step in op.steps)
        if infinite and (self.stages[op] == 2 or self.haste.random() < 0.5):
            self.refuse(op)
        elif self.haste.random() < self.rules.failures:
            self.lanes[self.lane(op)].remove(op)
            self.fail(op)
        elif self.stages[op] == 1:
            self.use_gradients(op)
        else:
            home, truth = self.homes[op.unit], self.truths[op.unit]
            home.newest = op.version
            if not self.plan.units[op.unit].shared:
                home.extents[self.written(op)] = op.version
            truth.applied += op.steps
            self.scheduler.weights_written(op)

    def use_gradients(self, op: Operation) -> None:
        """An operation reads its gradients for the last time."""
        self.check_gradients_are_as_found(op)
        self.truths[op.unit].consumed.update(op.steps)
        self.scheduler.gradient_used(op)

    def check_gradients_are_as_found(self, op: Operation) -> None:
        for step in op.steps:
            found = self.gradients.get((op.unit, step))
            dropped = step not in self.truths[op.unit].passes or (self.lost and step == self.steps)
            unchanged = dropped or found == self.found[op, step]
            require(unchanged, f"the gradient {step} of unit {op.unit} changed in use")

    def refuse(self, op: Operation) -> None:
        """An UPDATE has found a gradient that is not finite."""
        self.note("  refused", op.unit)
        self.lanes[self.lane(op)].remove(op)
        del self.stages[op]
        home, truth, (step,) = self.homes[op.unit], self.truths[op.unit], op.steps
        home.extents[0] = home.newest = home.states = op.version - 1
        home.undo = None
        if op.run is not None and not self.kept(op):
            self.give_back(op.unit)
        truth.consumed.discard(step)
        self.begun_early.discard(op.unit)
        if self.plan.during_backward:
            truth.asked -= step < self.steps
            truth.shown = truth.asked
            truth.passes.pop(step, None)
            if self.checkpoint is not None and self.checkpoint[op.unit] >= op.version:
                self.checkpoint[op.unit] -= 1
        self.scheduler.refused(op)
        for share in [each for each in self.lanes["collective"] if each.gradients == op.gradients]:
            self.lanes["collective"].remove(share)
            self.scheduler.ended(share)

    def fill(self, op: Operation) -> None:
        """What comes later in the device's queue finds the weights in their frames."""
        now = self.readings[op] if self.readings[op][1] == self.homes[op.unit].edition else None
        if self.leases.get(op.run.start) is op:  # else others have the frames, and their weights come later
            for frame in self.span(op):
                self.frames[frame] = TORN if now is None else (op.unit, *now)

    def end(self, op: Operation) -> None:
        self.note("  ended", op.kind, op.unit)
        home = self.homes[op.unit]
        if op.kind is Kind.RECLAIM:
            self.answer(op)
            return
        if op.kind is Kind.FETCH:
            now = home.extents[self.read_from[op]]
            require(now == op.version, f"unit {op.unit} was changed to {now} while it was fetched")
            if not self.stages.pop(op):
                self.fill(op)
            home.readers[self.read_from[op]] -= 1
            del self.readings[op]
        elif op.kind in (Kind.OFFLOAD, Kind.SPILL, Kind.RELOAD):
            self.end_move(op, (op.unit, op.steps[0]))
        elif op.kind is Kind.UPDATE:
            home.states = op.version
            del self.stages[op]
        elif op.kind is Kind.UNDO:
            truth = self.truths[op.unit]
            truth.consumed -= {*truth.applied[home.undo :]}
            del truth.applied[home.undo :]
            home.extents[0] = home.newest = home.states = home.undo
            home.undo = None
        elif op.kind is Kind.SHARE:
            home.extents[self.written(op)] = op.version
        elif op.kind is Kind.SAVE:
            version, edition = self.readings.pop(op)
            same = self.kept_or_now(op, home) == version and home.edition == edition
            require(same, f"unit {op.unit} changed while it was saved")
            self.save_ended(op, version)
        self.scheduler.ended(op)

    def end_move(self, op: Operation, key: tuple[int, int]) -> None:
        """A gradient has moved."""
        if op.kind is Kind.OFFLOAD:
            self.gradients.setdefault(key, Counter())[self.queued[key].popleft()] += 1
            self.on_ssd.pop(key, None)
            return
        require({self.pages[page] for page in self.span(op)} == {key}, f"{op.kind} of {key} in another's pages")
        if op.kind is Kind.SPILL and key in self.gradients:  # else it was dropped
            self.on_ssd[key] = Counter(self.gradients[key])
        elif op.kind is Kind.RELOAD and self.needed(*key):  # else it was dropped, or will be
            require(key in self.on_ssd, f"RELOAD of {key}, of which SSD has no or old values")
            self.gradients[key] = Counter(self.on_ssd[key])

    def save_ended(self, op: Operation, version: int) -> None:
        self.homes[op.unit].state_readers -= op.run is None
        self.give_back(op.unit)
        self.saved[op.unit] = version

    def fail(self, op: Operation) -> None:
        self.note("  failed", op.kind, op.unit)
        home = self.homes[op.unit]
        if op.kind is Kind.UPDATE:
            self.fail_update(op)
            return
        if op.kind is Kind.FETCH:
            home.readers[self.read_from[op]] -= 1
            del self.stages[op], self.readings[op]
        elif op.kind is Kind.OFFLOAD:
            self.queued[op.unit, op.steps[0]].popleft()
            self.lost = self.lost or op.steps[0] == self.steps
        elif op.kind is Kind.SPILL:
            self.spill_failed = True
        elif op.kind is Kind.RELOAD:
            self.lost = self.lost or op.steps[0] == self.steps
        elif op.kind is Kind.SAVE:
            del self.readings[op]
            self.save_ended(op, self.checkpoint[op.unit])  # the checkpoint has failed, which concerns nobody else
        self.scheduler.failed(op)

    def fail_update(self, op: Operation) -> None:
        """It may have changed anything. One that is not known to stand is undone."""
        home, truth = self.homes[op.unit], self.truths[op.unit]
        if self.stages.pop(op) < 2:
            home.extents[self.written(op)] = TORN
        home.newest = home.states = TORN
        step = op.steps[-1]
        stands = self.plan.during_backward or (step < self.steps and truth.used_rules[step] == truth.rules.get(step))
        if not stands:
            truth.consumed -= {*op.steps}
        self.scheduler.failed(op)
        require(
            self.scheduler.versions.failed or not stands, f"an UPDATE of unit {op.unit} has failed, and nobody cares"
        )
        require(stands or home.undo is not None, f"a failed UPDATE of unit {op.unit} cannot be undone")

    def lend(self, new: bool = True) -> bool:
        """Another rank, which has not come to the end of the step, asks for weights, begins to read them, or has read
        them. Returns whether anything came about."""
        waiting = [unit for unit, version in self.lent.items() if version is None]
        begun = [unit for unit in waiting if not self.scheduler.versions.undoing(unit)]
        read = [unit for unit in self.lent if unit not in waiting]
        askable = [unit for unit in range(len(self.homes)) if new and unit not in self.lent and self.may_ask(unit)]
        unit = self.haste.choice([*begun, *read, *askable] or [-1])
        if unit in askable:
            self.note("  another rank asks for unit", unit)
            self.lent[unit] = None
            self.scheduler.others_read(unit)
        elif unit in begun:
            self.lent[unit] = self.truths[unit].asked
            self.homes[unit].readers[0] += 1
        elif unit in read:
            found = self.homes[unit].weights
            require(found == self.lent[unit], f"another rank reads {found} of unit {unit}, not {self.lent[unit]}")
            del self.lent[unit]
            self.homes[unit].readers[0] -= 1
            self.scheduler.others_have_read(unit)
        self.collect()
        return unit >= 0

    def take_part(self) -> bool:
        """Take part in the reduction of a gradient that other ranks have, if there is one."""
        if not self.theirs:
            return False
        unit = self.theirs.pop(self.haste.randrange(len(self.theirs)))
        passes = self.truths[unit].passes
        self.note("  another rank's gradient of unit", unit)
        fetched = len(self.fetched)
        passes.setdefault(self.steps, Counter())[OTHERS] += 1
        self.queued.setdefault((unit, self.steps), deque()).append(OTHERS)
        self.scheduler.reduce(unit, here=False)
        self.collect()
        require(len(self.fetched) == fetched, f"another rank's gradient of unit {unit} starts a fetch")
        return True

    def may_ask(self, unit: int) -> bool:
        """Whether another rank may need a unit's weights from this one: each has a slice, and what steps before have
        asked for is there."""
        early = self.plan.during_backward or self.plan.max_staleness is not None
        truth = self.truths[unit]
        last = self.homes[unit].undo if self.scheduler.versions.undoing(unit) else None
        stand = [
            step
            for step in truth.applied[:last]
            if step < self.steps and truth.used_rules[step] == truth.rules.get(step)
        ]
        there = len(stand) == truth.asked
        return there and not (early or self.plan.units[unit].shared or self.scheduler.versions.failed)

    def let_go_of_something(self) -> bool:
        free = [op for op in self.held if not self.referred_to(op)]
        if not free:
            return False
        op = free[0] if self.plan.ranks_fetch_alike else self.haste.choice(free)
        del self.held[op]
        if op.run is not None:
            self.free_frames(op)
        self.note("  let go", op.unit)
        self.scheduler.let_go(op)
        self.collect()
        return True

    def dropped_a_reference(self) -> None:
        """Where ranks agree, that is known at the same point of all programs."""
        while self.plan.ranks_fetch_alike and self.let_go_of_something():
            pass
