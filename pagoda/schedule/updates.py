"""Updates: which runs next, what it may overwrite, and which version of the weights that makes.

A version counts the steps whose gradients a unit's weights contain. `due` counts those that `step()` has asked for.

    QUEUED [-> ASKING -> QUEUED] -> LOADING -> RUNNING [-> UNDOING] -> over

A speculative update that is called off before it runs is over at once.

An update in place destroys what it reads. So it waits while compute uses the unit or a FETCH reads it, and until a
checkpoint has read the unit. Or it keeps the old states in the reserve, if there is room: for that checkpoint, or for
an UNDO, if it was begun before it was known whether gradients are clipped. A checkpoint waits for a later update only
while that update runs.

An asynchronous update does not overwrite the weights that are read: it writes the newest ones beside them, and PUBLISH
makes them those that are read once nothing of this step has read the old ones.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from heapq import heappop, heappush

from pagoda.schedule.gradients import Gradients, Record
from pagoda.schedule.operations import Kind, Operation, SchedulePlan
from pagoda.schedule.order import Order

MOST_ADMITTED = 2
"""Updates under way at once, so that the executor's ring of buffers does not run empty between two units."""
MOST_SAVES = 2
"""Units that a checkpoint reads at once."""
CALM_STEPS = 4
"""After a step that was clipped, as many in a row must not have been before the next speculative update."""


class State(Enum):
    QUEUED = auto()
    ASKING = auto()
    """RECLAIM is under way: does anything still refer to the weights that the update would overwrite?"""
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
    unreferenced: bool = False
    """Whether the answer was that nothing refers to the weights that it overwrites."""
    keeps_old: bool = False
    """Whether it keeps the old states in the reserve."""
    for_undo: bool = False
    """Whether they are kept for an UNDO; the room is free again when the update stands."""
    has_read: bool = False
    """Whether it has read its gradient for the last time."""
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
    later: list[Record] = field(default_factory=list)
    """Gradients of steps after that update, which wait for it to end."""
    publishing: bool = False
    read: bool = False
    """Whether this step has read the weights: then all of it must read this version."""
    to_save: int | None = None
    """The version that a checkpoint has yet to read."""
    saving: bool = False
    kept_for_checkpoint: bool = False
    """Whether the reserve holds the states of `to_save`, because the home has others by now, or is about to."""


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
        self._queue: list[tuple[float, int, Update]] = []
        """(urgency, sequence, update): a heap. An update may be in it more than once; its state says if it counts."""
        self._sequence = 0
        self._admitted = 0
        self._reserve = plan.reserve_pages
        """Pages that are free."""
        self._speculative: dict[int, Update] = {}
        self._early: dict[Record, None] = {}
        """Gradients that were queued before `step()`: backward may not be through with the weights of their units."""
        self._calm = CALM_STEPS
        """Steps since one was clipped."""
        self._saves: list[tuple[float, int]] = []
        """(urgency, unit) of what a checkpoint has yet to read: a heap, with entries that no longer count."""
        self._saving = 0
        self.left_to_save = 0
        """Units that the checkpoint has yet to read."""
        self.preparing = False
        """A checkpoint is about to begin: no update may be speculative."""
        self.pending = 0
        """Updates that are queued or under way."""
        self.draining = False
        """Nothing is to be left. An update may then start before the weights of the last one are published."""
        self.failed = False
        """An update has failed: states are those of no step. Once all are replaced, a new scheduler begins."""

    # --- events ---

    def queue(self, record: Record, speculative: bool = False) -> None:
        """A unit is to be updated by a gradient that has arrived; unless it is `speculative`, `step()` has said so."""
        weights = self.weights[record.unit]
        weights.due += not speculative
        if speculative or self._plan.under_backward:
            self._early[record] = None
        if not self._asynchronous:
            self._weights_changed(record.unit)
        if weights.update is not None:
            weights.later.append(record)
            if self._asynchronous and weights.update.state is State.QUEUED:
                weights.update.records += weights.later
                weights.later.clear()
            return
        weights.update = Update(record.unit, [record], speculative)
        self.pending += 1
        if speculative:
            self._speculative[record.unit] = weights.update
        self.retry(record.unit)

    def may_speculate(self, unit: int) -> bool:
        """Whether an update may begin before `step()`: there is room to undo it, and recent steps were not clipped."""
        of_unit = self._plan.units[unit]
        stopped = self.left_to_save or self.preparing or self.draining or self.failed
        free = self.weights[unit].update is None and not stopped
        return of_unit.speculated and free and self._calm >= CALM_STEPS and self._reserve >= of_unit.old_state_pages

    def stands(self, unit: int) -> bool:
        """`step()` asks for the update of a unit that a speculative one has begun; False if there is none."""
        update = self._speculative.get(unit)
        if update is None or update.withdrawn:
            return False
        del self._speculative[unit]
        update.speculative = False
        self.weights[unit].due += 1
        for record in update.records if update.has_read else ():
            self._gradients.drop(record)
        ended = self.weights[unit].update is not update
        if ended or update.state is not State.RUNNING:
            self._give_back(update)  # nothing is kept for an undo any more
        self.retry(unit)
        if self.readable(unit) is not None:
            self._weights_readable(unit)
        return True

    def undo(self, unit: int) -> None:
        """A speculative update of a unit must not show."""
        update = self._speculative.get(unit)
        if update is None or update.withdrawn:
            return
        update.withdrawn = True
        if update.state in (State.QUEUED, State.ASKING, State.LOADING):
            if update.state is State.LOADING:
                self._admitted -= 1
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

    def end_step(self, clipped: bool) -> None:
        """`step()` has said what it updates."""
        self._calm = 0 if clipped else self._calm + 1
        early, self._early = self._early, {}
        for record in early:
            self.retry(record.unit)
        for unit, weights in enumerate(self.weights) if self._asynchronous else ():
            weights.read = False
            self.publish(unit)

    def gradient_used(self, unit: int) -> None:
        """An UPDATE has read its gradient for the last time."""
        update = self._running(unit)
        update.has_read = True
        for record in update.records:
            self._gradients.used(record, last=not update.speculative)

    def weights_written(self, unit: int) -> None:
        """An UPDATE has written the new weights."""
        update, weights = self._running(unit), self.weights[unit]
        weights.newest += len(update.records)
        if not self._asynchronous:
            weights.version = weights.newest
            if self.readable(unit) is not None:
                self._weights_readable(unit)

    def ended(self, unit: int) -> None:
        """An UPDATE has written every state."""
        update, weights = self._running(unit), self.weights[unit]
        self._admitted -= 1
        if update.withdrawn:
            self._begin_undo(update)
            return
        if not update.speculative:
            self._give_back(update)
        self._finish(weights)
        self.publish(unit)
        self._retry_save(unit)

    def undone(self, unit: int) -> None:
        """An UNDO has ended: the states are as before the update."""
        update = self._running(unit)
        weights = self.weights[unit]
        weights.newest = weights.version = weights.version - len(update.records)
        self._over(update)

    def publish_ended(self, unit: int) -> None:
        """A PUBLISH has ended."""
        weights = self.weights[unit]
        weights.publishing, weights.version = False, weights.newest
        self._weights_readable(unit)
        self.retry(unit)

    def prepare_checkpoint(self) -> None:
        """A checkpoint is about to begin. It can once `prepared`."""
        self.preparing = True
        self.undo_all()

    @property
    def prepared(self) -> bool:
        """Whether nothing but updates that `step()` has asked for is under way."""
        return not self._speculative

    def begin_checkpoint(self) -> None:
        """A checkpoint is to have every state as the last `step()` leaves it."""
        self.preparing = False
        self.left_to_save = len(self.weights)
        for unit, weights in enumerate(self.weights):
            weights.to_save = weights.due
            self._retry_save(unit)

    def save_ended(self, unit: int) -> None:
        """A SAVE has ended, well or not."""
        weights = self.weights[unit]
        self._saving -= 1
        self.left_to_save -= 1
        if weights.kept_for_checkpoint:
            self._reserve += self._plan.units[unit].old_state_pages
        weights.to_save, weights.saving, weights.kept_for_checkpoint = None, False, False
        self.retry(unit)

    def answered(self, asked: Operation, free: bool) -> None:
        """The answer to a RECLAIM of weights in their home. Where something refers to them, `retry` comes later."""
        update = self.weights[asked.unit].update
        if update is not None and update.query is asked:
            update.state, update.query, update.unreferenced = State.QUEUED, None, free
            if free or not self._is_early(update):
                self.retry(asked.unit)

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
        while self._admitted < MOST_ADMITTED and self._queue and not self.failed:
            update = heappop(self._queue)[-1]
            if self.weights[update.unit].update is update and update.state is State.QUEUED:
                self._admit(update)
        self._pump_saves()

    def _admit(self, update: Update) -> None:
        """Begin an update, unless it has to wait; `retry` then comes when that may have changed."""
        unit, weights, of_unit = update.unit, self.weights[update.unit], self._plan.units[update.unit]
        if self._asynchronous:
            if weights.publishing or (weights.newest != weights.version and not self.draining):
                return
        else:
            if self._in_use(unit):
                return
            if not of_unit.lease_frames and not update.unreferenced and self._is_early(update):
                update.state, update.query = State.ASKING, Operation(Kind.RECLAIM, unit)
                self._issue(update.query)
                return
        keeps = self._keeps_old(update)
        if keeps is None:
            return
        update.keeps_old = keeps
        update.state = State.LOADING
        self._admitted += 1
        for record in update.records:
            self._gradients.use(record)
        self.gradient_there(unit)

    def gradient_there(self, unit: int) -> None:
        """A gradient that an update may have waited for is in RAM."""
        weights = self.weights[unit]
        update = weights.update
        if update is None or update.state is not State.LOADING or self.failed:
            return
        if any(record.lost for record in update.records):
            self.failed = True
            return
        if False in [self._gradients.usable(record) for record in update.records]:
            return
        update.state = State.RUNNING
        steps = tuple(record.step for record in update.records)
        self._issue(
            Operation(Kind.UPDATE, unit, version=weights.newest + len(steps), steps=steps, keeps_old=update.keeps_old)
        )

    def _keeps_old(self, update: Update) -> bool | None:
        """Whether an update is to keep the old states, and has room for them; None if it has to wait for that."""
        weights, pages = self.weights[update.unit], self._plan.units[update.unit].old_state_pages
        for_checkpoint = weights.newest == weights.to_save and not weights.kept_for_checkpoint
        if for_checkpoint:
            heappush(self._saves, (-1.0, update.unit))  # the sooner it is read, the sooner the update may begin
        if not (for_checkpoint or update.speculative):
            return False
        if (for_checkpoint and weights.saving) or self._reserve < pages:
            return None
        self._reserve -= pages
        weights.kept_for_checkpoint = weights.kept_for_checkpoint or for_checkpoint
        update.for_undo = update.speculative
        return True

    def _pump_saves(self) -> None:
        while self._saving < MOST_SAVES and self._saves:
            unit = heappop(self._saves)[-1]
            weights = self.weights[unit]
            busy = weights.update is not None and weights.update.state in (State.LOADING, State.RUNNING, State.UNDOING)
            there = weights.newest == weights.to_save or weights.kept_for_checkpoint
            if weights.to_save is None or weights.saving or busy or not there:
                continue  # it has been read, or comes back when an update has ended
            weights.saving = True
            self._saving += 1
            self._issue(Operation(Kind.SAVE, unit, version=weights.to_save, keeps_old=weights.kept_for_checkpoint))

    def _retry_save(self, unit: int) -> None:
        if self.weights[unit].to_save is not None:
            heappush(self._saves, (self._order.next_use(unit), unit))

    def _push(self, update: Update) -> None:
        self._sequence += 1
        urgency = -1.0 if update.urgent else self._order.next_use(update.unit)
        heappush(self._queue, (urgency, self._sequence, update))

    def _is_early(self, update: Update) -> bool:
        return any(record in self._early for record in update.records)

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
        self._give_back(update)
        self._finish(self.weights[update.unit])

    def _give_back(self, update: Update) -> None:
        if update.for_undo:
            self._reserve += self._plan.units[update.unit].old_state_pages
            update.for_undo = update.keeps_old = False

    def _finish(self, weights: Weights) -> None:
        """The update of a unit is over: the next one can begin, or its weights can be read."""
        assert weights.update is not None
        unit, weights.update = weights.update.unit, None
        self.pending -= 1
        if weights.later:
            records, weights.later = weights.later, []
            weights.update = Update(unit, records if self._asynchronous else records[:1])
            weights.later = [] if self._asynchronous else records[1:]
            self.pending += 1
            self.retry(unit)
        elif self.readable(unit) is not None:
            self._weights_readable(unit)
