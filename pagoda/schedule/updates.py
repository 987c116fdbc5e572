"""Updates: which runs next, what it may overwrite, and which version of the weights that makes.

A version counts the steps whose gradients a unit's weights contain. `due` counts those that `step()` has asked for.

    [ASKING ->] QUEUED -> LOADING -> RUNNING [-> UNDOING] -> over

An update before `step()` is early: because nothing will be clipped, or as a guess. It asks first whether anything still
refers to the weights, since backward may read them again. A speculative one, the guess, is called off when compute uses
the unit again; if it does not run yet, it is over at once.

An update in place destroys what it reads. So it waits while compute uses the unit or a FETCH reads it, and until a
checkpoint has read the unit or the old states can be kept for it. A speculative one
keeps the old states, so that an UNDO can bring them back; the plan has room for that.

An asynchronous update does not overwrite the weights that are read: it writes the newest ones beside them, and PUBLISH
makes them those that are read once nothing of this step has read the old ones.
"""

from collections.abc import Callable, Collection
from heapq import heappop, heappush

from pagoda.schedule.checkpoints import Checkpoint
from pagoda.schedule.gradients import Gradients, Record
from pagoda.schedule.operations import Kind, Operation, SchedulePlan
from pagoda.schedule.order import Order
from pagoda.schedule.versions import State, Update, Weights

MOST_ADMITTED = 2
"""Updates under way at once, so that the executor's ring of buffers does not run empty between two units."""
CALM_STEPS = 4
"""Speculation resumes after as many steps in a row without clipping."""


class Updates:
    """Every update, and the versions that they make.

    Invariants: a unit has at most one update under way; each record is used by one update that stands, or dropped with
    its step; weights are readable only while nothing writes them; a checkpoint reads the version that it asked for.
    """

    def __init__(
        self,
        plan: SchedulePlan,
        order: Order,
        gradients: Gradients,
        in_use: Callable[[int], bool],
        weights_changed: Callable[[int], None],
        weights_readable: Callable[[int], None],
        issue: Callable[[Operation], None],
    ) -> None:
        """`in_use` says whether compute, or a FETCH, reads weights in their home now. `weights_changed` is told
        that a unit's weights are about to be others, and `weights_readable` that they can be read again."""
        self._plan = plan
        self._order = order
        self._gradients = gradients
        self._in_use = in_use
        self._weights_changed = weights_changed
        self._weights_readable = weights_readable
        self._issue = issue
        self.weights = [Weights() for _ in plan.units]
        self._queues: tuple[list[tuple[float, int, Update]], ...] = ([], [])
        """By updater, (urgency, sequence, update): heaps. An update may be there more than once; its state says if it
        counts."""
        self._sequence = 0
        self._admitted = [0, 0]
        """Updates under way, by updater."""
        self._before = -1
        """The unit whose UPDATE was issued last."""
        self._after: dict[int, int] = {}
        """unit -> the one whose UPDATE followed its own the last time."""
        self._ahead = -1
        """The unit that is being read ahead, if any."""
        self._speculative: dict[int, Update] = {}
        self._early: set[int] = set()
        """Units whose update was queued in this step before `step()`, for good."""
        self.times_kept = self.times_undone = 0
        """Speculative updates that stood, and that were undone or called off."""
        self._calm = CALM_STEPS
        """Steps since one was clipped."""
        self.checkpoint = Checkpoint(plan, order, self._settled, issue)
        self.pending = 0
        """Updates that are queued or under way."""
        self.draining = False
        """Nothing is to be left. An update may then start before the weights of the last one are published."""
        self.failed = False
        """An update has failed: states are those of no step, until all are `restored`."""

    # --- events ---

    def queue(self, record: Record) -> None:
        """`step()` asks for a unit's update, by a gradient that has arrived."""
        weights = self.weights[record.unit]
        self.call_off_early(record.unit)
        weights.due += 1
        if not self._asynchronous:
            self._weights_changed(record.unit)
        if weights.update is None:
            self._queue(Update(record.unit, [record]))
            return
        weights.later.append(record)
        if self._asynchronous and weights.update.state is State.QUEUED:
            weights.update.records += weights.later
            weights.later.clear()

    def ask_early(self, record: Record, speculative: bool) -> None:
        """Backward is through with a unit: it is to be updated as soon as nothing refers to its weights."""
        weights = self.weights[record.unit]
        if weights.asking is not None or (speculative and weights.update is not None):
            return  # what was asked for stands first
        weights.asking = Update(record.unit, [record], speculative, State.ASKING)
        if speculative:
            self._speculative[record.unit] = weights.asking
        self._ask(weights.asking)

    def ask_again(self, unit: int) -> None:
        """Something that an early update of a unit has waited for may have come about."""
        asking = self.weights[unit].asking
        if asking is not None and asking.query is None:
            self._ask(asking)

    def answered(self, asked: Operation, free: bool) -> None:
        """The answer to a RECLAIM of an early update. If something uses the weights, `ask_again` comes later."""
        weights = self.weights[asked.unit]
        update = weights.asking
        if update is None or update.query is not asked:
            return
        update.query = None
        if not free:
            return
        if update.speculative:
            weights.asking = None
            self._weights_changed(asked.unit)
            self._queue(update)
        else:
            self.queue(update.records[0])
            self._gradients.take(asked.unit)
            self._early.add(asked.unit)

    def call_off_early(self, unit: int) -> None:
        """An early update of a unit that has not been queued is not to be."""
        weights = self.weights[unit]
        if weights.asking is not None:
            weights.asking = None
            self._speculative.pop(unit, None)

    def may_speculate(self, unit: int) -> bool:
        """Whether an update may begin before `step()`: there is room to undo it, which a checkpoint does not need
        meanwhile, and recent steps were not clipped."""
        stopped = self.checkpoint.under_way or self.draining or self.failed
        return self._plan.units[unit].speculated and self._calm >= CALM_STEPS and not stopped

    def awaited(self, unit: int) -> tuple[int, ...]:
        """The step whose gradient makes the newest version that `step()` has asked for, if that is yet to come."""
        weights = self.weights[unit]
        if not self._plan.agreed or weights.version == weights.due or weights.update is None:
            return ()  # elsewhere a FETCH is not issued before its update has ended
        return ((weights.later or weights.update.records)[-1].step,)

    def speculates(self, unit: int) -> bool:
        """Whether a speculative update of a unit is queued, under way, or waits for `step()`, or is being undone."""
        return unit in self._speculative and self._speculative[unit].state is not State.ASKING

    def began_early(self, unit: int) -> bool:
        """Whether an update of a unit that stands was queued in this step before `step()`."""
        return unit in self._early

    def stands(self, unit: int) -> bool:
        """`step()` asks for the update of a unit that a speculative one has begun; False if there is none."""
        self.call_off_early(unit)
        update = self._speculative.get(unit)
        if update is None or update.withdrawn:
            return False
        del self._speculative[unit]
        self.times_kept += 1
        update.speculative = False
        self.weights[unit].due += 1
        for record in update.records if update.has_read else ():
            self._gradients.drop(record)
        self.retry(unit)
        if self.readable(unit) is not None:
            self._weights_readable(unit)
        return True

    def undo(self, unit: int) -> None:
        """A speculative update of a unit must not show."""
        update = self._speculative.get(unit)
        if update is None or update.withdrawn:
            return
        if update.state is State.ASKING:
            self.call_off_early(unit)
            return
        update.withdrawn = True
        self.times_undone += 1
        if update.state in (State.QUEUED, State.LOADING):
            if update.state is State.LOADING:
                self._release(update)
                for record in update.records:
                    self._gradients.used(record, last=False)
            self._over(update)
        elif self.weights[unit].update is not update:  # it has ended
            self.weights[unit].update = update
            self.pending += 1
            self._begin_undo(update)

    def undo_all(self) -> None:
        """No speculative update must show."""
        for unit in [*self._speculative]:
            self.undo(unit)

    def drop_step(self) -> None:
        """The gradients of this step are dropped: what has begun for good stands, and the next step begins."""
        self.undo_all()
        self._step_over()

    def end_step(self, clipped: bool) -> None:
        """`step()` has said what it updates."""
        self._calm = 0 if clipped else self._calm + 1
        self._step_over()

    def _step_over(self) -> None:
        self._early.clear()
        for unit, weights in enumerate(self.weights) if self._asynchronous else ():
            weights.read = False
            self.publish(unit)

    def gradient_used(self, unit: int) -> None:
        """An UPDATE has read its gradient for the last time."""
        update = self._running(unit)
        update.has_read = True
        for record in update.records:
            self._gradients.used(record, last=not update.speculative)
        if self._plan.agreed:
            # Its end waits for those of the other ranks, in an order that is not the order of updates here.
            self._release(update)

    def weights_written(self, unit: int) -> None:
        """An UPDATE has written the new weights."""
        update, weights = self._running(unit), self.weights[unit]
        update.has_written = True
        weights.newest += len(update.records)
        if not self._asynchronous:
            weights.version = weights.newest
            if self.readable(unit) is not None:
                self._weights_readable(unit)

    def ended(self, unit: int) -> None:
        """An UPDATE has written every state."""
        update, weights = self._running(unit), self.weights[unit]
        self._release(update)
        if update.withdrawn:
            self._begin_undo(update)
            return
        self._finish(weights)
        self.publish(unit)

    def update_failed(self, unit: int) -> None:
        """An UPDATE has failed, and may have changed anything. A speculative one is undone: `step()` asks again."""
        update = self._running(unit)
        if not update.speculative:
            self.failed = True
            return
        self.times_undone += not update.withdrawn
        update.withdrawn, self._calm = True, 0
        if not update.has_read:
            self.gradient_used(unit)
        self.ended(unit)

    def refused(self, unit: int) -> None:
        """An UPDATE has found a gradient that is not finite, and has changed nothing."""
        update, weights = self._running(unit), self.weights[unit]
        self._release(update)
        self.gradient_used(unit)
        if update.speculative:
            self.times_undone += 1
            self._calm = 0
            self._over(update)
            return
        self._early.discard(unit)
        weights.due -= len(update.records)
        newest = weights.newest + len(update.records)
        self.checkpoint.refused(unit, weights.newest, newest, kept=update.keeps is not None)
        self._finish(weights)

    def restored(self) -> None:
        """Every state has been replaced, whatever has become of updates. Nothing is under way."""
        for weights in self.weights:
            of_unit = [] if weights.update is None else weights.update.records
            for record in (*of_unit, *weights.later):
                self._gradients.used(record, last=True)
        self.weights = [Weights() for _ in self._plan.units]
        for queue in self._queues:
            queue.clear()
        self.checkpoint = Checkpoint(self._plan, self._order, self._settled, self._issue)
        self._speculative.clear()
        self._early.clear()
        self._admitted, self.pending, self.failed, self._ahead = [0, 0], 0, False, -1

    def undone(self, unit: int) -> None:
        """An UNDO has ended: the states are as before the update."""
        update = self._running(unit)
        weights = self.weights[unit]
        if update.has_written:
            weights.newest = weights.version = weights.version - len(update.records)
        self._over(update)

    def publish_ended(self, unit: int) -> None:
        """A PUBLISH has ended."""
        weights = self.weights[unit]
        weights.publishing, weights.version = False, weights.newest
        self._weights_readable(unit)
        self.retry(unit)

    def drain(self, draining: bool) -> None:
        """Begin or cease to drain. Meanwhile nothing is speculative, and updates do not wait for PUBLISH."""
        self.draining, self._ahead = draining, -1
        if draining:
            self.undo_all()
            for unit in range(len(self.weights)):
                self.retry(unit)

    @property
    def prepared(self) -> bool:
        """Whether a checkpoint can begin: the one before has read everything, and no update is speculative."""
        return not self._speculative and not self.checkpoint.left

    def begin_checkpoint(self, in_place: Collection[int]) -> None:
        """A checkpoint is to have every state as the last `step()` leaves it."""
        self.checkpoint.begin([weights.due for weights in self.weights], in_place)

    def save_ended(self, unit: int) -> None:
        """A SAVE has ended, well or not."""
        self.checkpoint.ended(unit)
        self.retry(unit)
        self.gradient_there(unit)

    def retry(self, unit: int) -> None:
        """Something that an update of a unit may have waited for has come about."""
        update = self.weights[unit].update
        if update is not None and update.state is State.QUEUED:
            self._push(update)

    def wanted(self, unit: int) -> None:
        """Compute waits for a unit: its update comes first."""
        update = self.weights[unit].update
        if update is not None and not update.urgent:
            update.urgent = True
            self.retry(unit)

    def publish(self, unit: int) -> None:
        """Make the newest weights those that are read, if nothing of this step has read others."""
        weights = self.weights[unit]
        updating = weights.update is not None and weights.update.state in (State.LOADING, State.RUNNING)
        if weights.newest == weights.version or weights.read or weights.publishing or updating or self._in_use(unit):
            return
        weights.publishing = True
        self._weights_changed(unit)
        self._issue(Operation(Kind.PUBLISH, unit, version=weights.newest))

    # --- questions ---

    def readable(self, unit: int) -> int | None:
        """The version of a unit's weights that can be read now; None where something must come first."""
        weights = self.weights[unit]
        if self.failed or weights.publishing:
            return None
        if self._plan.max_staleness is not None:
            return weights.version if weights.version >= weights.due - self._plan.max_staleness else None
        if unit in self._speculative or weights.version != weights.due:
            return None
        return weights.version

    @property
    def _asynchronous(self) -> bool:
        return self._plan.max_staleness is not None

    # --- decisions ---

    def pump(self) -> None:
        """Start every update, and every read of a checkpoint, that can start now."""
        for updater, queue in enumerate(self._queues):
            while self._admitted[updater] < MOST_ADMITTED and queue and not self.failed:
                update = heappop(queue)[-1]
                if self.weights[update.unit].update is update and update.state is State.QUEUED:
                    self._admit(update)
        if not any(self._queues):
            self._read_ahead()
        self.checkpoint.pump()

    def _read_ahead(self) -> None:
        """While no update waits to be started: read ahead the unit whose update followed the last one before."""
        unit = self._after.get(self._before, -1)
        if unit in (-1, self._ahead) or self._asynchronous or self.draining or self.failed:
            return
        if self._plan.units[unit].streamed and self.weights[unit].update is None and unit not in self._speculative:
            self._ahead = unit
            self._issue(Operation(Kind.READ_AHEAD, unit))

    def _admit(self, update: Update) -> None:
        """Begin an update, unless it has to wait; `retry` then comes when that may have changed."""
        unit, weights = update.unit, self.weights[update.unit]
        if self._asynchronous:
            if weights.publishing or (weights.newest != weights.version and not self.draining):
                return
        elif self._in_use(unit):
            return
        if not all(record.arrived for record in update.records):
            return
        if self.checkpoint.holds_back(unit):
            return
        if self.checkpoint.would_destroy(unit, weights.newest) and not self.checkpoint.can_keep(unit):
            return
        update.state = State.LOADING
        update.admitted = True
        self._admitted[self._plan.units[unit].updater] += 1
        for record in update.records:
            self._gradients.use(record)
        self.gradient_there(unit)

    def gradient_there(self, unit: int) -> None:
        """A gradient that an update may have waited for is in RAM, or a checkpoint has read what it destroys."""
        weights = self.weights[unit]
        update = weights.update
        if update is None or update.state is not State.LOADING or self.failed:
            return
        if any(record.lost for record in update.records):
            self.failed = not update.speculative
            self.undo(unit)
            return
        if False in [self._gradients.usable(record) for record in update.records]:
            return
        if self.checkpoint.would_destroy(unit, weights.newest):
            update.keeps = self.checkpoint.keep(unit)
            if update.keeps is None:
                return
        update.state = State.RUNNING
        if not self._plan.units[unit].updater:
            self._after[self._before] = unit
            self._before, self._ahead = unit, -1
        steps = tuple(record.step for record in update.records)
        version, undoable = weights.newest + len(steps), update.speculative
        self._issue(Operation(Kind.UPDATE, unit, update.keeps, version, steps, undoable=undoable))

    def _settled(self, unit: int) -> int | None:
        """The version of a unit's states; None while they change."""
        update = self.weights[unit].update
        busy = update is not None and update.state in (State.RUNNING, State.UNDOING)
        return None if busy else self.weights[unit].newest

    def _ask(self, update: Update) -> None:
        update.query = Operation(Kind.RECLAIM, update.unit)
        self._issue(update.query)

    def _queue(self, update: Update) -> None:
        self.weights[update.unit].update = update
        update.state = State.QUEUED
        self.pending += 1
        self._push(update)

    def _push(self, update: Update) -> None:
        self._sequence += 1
        urgency = -1.0 if update.urgent else self._order.next_use(update.unit)
        heappush(self._queues[self._plan.units[update.unit].updater], (urgency, self._sequence, update))

    def _release(self, update: Update) -> None:
        """An update makes room for another one."""
        if update.admitted:
            update.admitted = False
            self._admitted[self._plan.units[update.unit].updater] -= 1

    def _running(self, unit: int) -> Update:
        update = self.weights[unit].update
        assert update is not None, "only an update under way reports"
        return update

    def _begin_undo(self, update: Update) -> None:
        update.state = State.UNDOING
        self._issue(Operation(Kind.UNDO, update.unit))

    def _over(self, update: Update) -> None:
        """A speculative update was called off, or undone: its gradient is needed again."""
        del self._speculative[update.unit]
        self._finish(self.weights[update.unit])

    def _finish(self, weights: Weights) -> None:
        """The update of a unit is over: the next one can begin, or its weights can be read."""
        assert weights.update is not None
        unit, weights.update = weights.update.unit, None
        self.pending -= 1
        held_back = self.checkpoint.holds_back(-1)
        self.checkpoint.retry(unit)
        if held_back and not self.checkpoint.holds_back(-1):
            for other in range(len(self.weights)):
                self.retry(other)
        if weights.later:
            records, weights.later = weights.later, []
            weights.later = [] if self._asynchronous else records[1:]
            self._queue(Update(unit, records if self._asynchronous else records[:1]))
        elif self.readable(unit) is not None:
            self._weights_readable(unit)
