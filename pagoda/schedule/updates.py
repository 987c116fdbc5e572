"""Updates: which update runs next, what it may overwrite, and which version of the weights it makes.

    [ASKING ->] QUEUED -> LOADING -> RUNNING -> over

An update that starts before `step()` is early. It is either final, because nothing will be clipped, or speculative. It
first asks whether anything still refers to the weights, because backward may read them again. A speculative update is
called off if compute uses the unit again. It writes all states to other runs, so calling it off moves no bytes, and
compute can read the old states at once. Ranks may speculate differently: a speculative update affects only what this
rank updates, and nothing that ranks must agree on. If each rank has all weights, SHARE follows once the update is
confirmed.

`versions.py` says where an update writes. Every update waits while compute uses the unit or a FETCH reads it, because
an update in place destroys what it reads. If there is no room for a version that a checkpoint does not let it
overwrite, it waits until the checkpoint has read the unit. Weights that compute reads where they are can move only
while nothing refers to them, so the update asks first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from pagoda.schedule.checkpoints import Checkpoint
from pagoda.schedule.gradients import Gradients
from pagoda.schedule.leases import Leases
from pagoda.schedule.operations import Ask, Confirm, Operation, ReadAhead, Request, SchedulePlan, Share, Update
from pagoda.schedule.order import Order
from pagoda.schedule.records import GradientRecord, UpdateRecord, UpdateState
from pagoda.schedule.versions import Versions

MOST_ADMITTED = 2
"""Updates of one updater under way at once. With two, the ring of buffers does not run empty between units."""
CALM_STEPS = 4
"""Speculation resumes after this number of consecutive steps without clipping."""


@dataclass(eq=False, repr=False)
class UpdateSchedule:
    """All updates, and the versions that they make.

    Invariants: a unit has at most one update under way; each record is used by one confirmed update, or dropped with
    its step; weights are readable only while nothing writes them; a checkpoint reads the version that it requested.
    """

    _plan: SchedulePlan
    _order: Order
    _versions: Versions
    _gradients: Gradients
    _leases: Leases
    _checkpoint: Checkpoint
    _issue: Callable[[Operation], None]

    def __post_init__(self) -> None:
        self._queues: tuple[list[tuple[float, int, UpdateRecord]], ...] = ([], [])
        """By updater: heaps of (urgency, sequence, update). An update may have several entries. Its state says whether
        they count."""
        self._sequence = count()
        self._admitted = [0, 0]
        """By updater, the number of updates under way."""
        self._latest = -1
        """The unit whose UPDATE was issued last, among those that the CPU updates or that read states from SSD."""
        self._followed_by: dict[int, int] = {}
        """unit -> the unit among these whose UPDATE followed it the last time."""
        self._ahead = -1
        """The unit that is being read ahead, or -1."""
        self._may_read_ahead = True
        """False between a drain and compute's next access, because the program may then write states in their homes."""
        self.times_kept = self.times_called_off = 0
        """The number of speculative updates so far that were confirmed, and that were called off."""
        self._calm = CALM_STEPS
        """The number of steps since gradients were last clipped."""
        self._pending = 0
        """The number of updates that are queued or under way."""
        self._lacking: set[int] = set()
        """Units whose updates wait for a free run."""
        self._draining = False
        """Whether all updates must end."""

    # --- updates requested by `step()` ---

    def request(self, record: GradientRecord) -> None:
        """`step()` requests a unit's update with a gradient that has arrived."""
        weights = self._versions.of[record.unit]
        weights.asking = None
        weights.due += 1
        update = UpdateRecord(record.unit, record)
        if self._plan.asynchronous:
            weights.lag, weights.unannounced = 1, update
        else:
            self._show(update)
        self.queue(update)

    def queue(self, update: UpdateRecord) -> None:
        """Queue an update after the earlier updates of its unit."""
        weights = self._versions.of[update.unit]
        update.state = UpdateState.QUEUED
        self._pending += 1
        if weights.update is not None:
            weights.later.append(update)
            return
        weights.update = update
        self._push(update)

    def confirm(self, unit: int) -> bool:
        """`step()` makes the speculative update of a unit final. Returns False if there is none."""
        self.cancel_early(unit)
        weights = self._versions.of[unit]
        update, weights.speculative = weights.speculative, None
        if update is None:
            return False
        self.times_kept += 1
        update.speculative = False
        weights.due += 1
        if update.state is UpdateState.RUNNING:
            self._issue(Confirm(unit, update))
        if update.has_written:
            self._versions.adopt(update)
        self._show(update)
        if update.has_read:
            self._gradients.drop(update.gradient)
        self.wake(unit)
        self._leases.changes = True
        return True

    def end_step(self, clipped: bool) -> None:
        """`step()` has requested its updates."""
        self._calm = 0 if clipped else self._calm + 1

    def _show(self, update: UpdateRecord) -> None:
        """From now on, accesses see an update, and wait for it."""
        weights = self._versions.of[update.unit]
        weights.announced = update.gradient
        weights.edition += 1
        self._leases.outdate(update.unit)
        self.share(update)

    def share(self, update: UpdateRecord) -> None:
        """Bring the parts of an update that other ranks make, if each rank makes a part."""
        unit = update.unit
        weights = self._versions.of[unit]
        if self._plan.units[unit].shared:
            weights.sharing.append(update)
            self._pending += 1
            self._issue(Share(unit, update, weights.due))

    # --- early updates ---

    def ask_early(self, record: GradientRecord) -> None:
        """Backward has finished with a unit. Update it as soon as nothing refers to its weights: for good if nothing
        will be clipped, otherwise speculatively."""
        weights, speculative = self._versions.of[record.unit], not self._plan.during_backward
        if speculative and not self._may_speculate(record.unit):
            return
        if weights.asking is not None or (speculative and weights.update is not None):
            return  # earlier requests come first
        weights.asking = UpdateRecord(record.unit, record, speculative, UpdateState.ASKING)
        if speculative:
            weights.speculative = weights.asking
        self._ask(weights.asking)

    def ask_again(self, unit: int) -> None:
        """Nothing may refer to the weights of a unit any more. Ask for the update that waits for that."""
        asking = self._versions.of[unit].asking
        if asking is not None and asking.query is None:
            self._ask(asking)
        self.wake(unit)

    def answered(self, asked: Ask, free: bool) -> None:
        """The answer to an ASK. If something uses the weights, `ask_again` is called later."""
        update = asked.update
        weights = self._versions.of[asked.unit]
        if update.query is not asked:
            return
        update.query = None
        if not free or self._leases.uses(asked.unit) or update.gradient.lost:
            return
        if weights.update is update:
            update.may_move = True
            self.wake(asked.unit)
        elif weights.asking is not update:
            return
        elif update.speculative:
            weights.asking, update.may_move = None, True
            self.queue(update)
        else:
            self._issue(Request(asked.unit, update.gradient))
            self.request(update.gradient)
            self._gradients.take(asked.unit)

    def cancel_early(self, unit: int) -> None:
        """Cancel the early update of a unit if it has not been queued."""
        weights = self._versions.of[unit]
        if weights.speculative is weights.asking:
            weights.speculative = None
        weights.asking = None

    def call_off(self, unit: int) -> None:
        """Call off the speculative update of a unit, so that nothing sees its result."""
        weights = self._versions.of[unit]
        update = weights.speculative
        if update is None:
            return
        if update.state is UpdateState.ASKING:
            self.cancel_early(unit)
            return
        weights.speculative = None
        self.times_called_off += 1
        if weights.update is not update:  # it has ended
            self._versions.give_up(update)
        elif update.state is UpdateState.RUNNING:
            update.called_off = True
        else:
            if update.state is UpdateState.LOADING:
                self._release(update)
                self._gradients.used(update.gradient, last=False)
            self._give_up(update)

    def call_off_all(self) -> None:
        """Call off all speculative updates."""
        for unit in range(len(self._versions.of)):
            self.call_off(unit)

    def lose(self, record: GradientRecord) -> None:
        """A gradient was lost. If its update is final, no state can be used until all are restored."""
        weights = self._versions.of[record.unit]
        for update in filter(None, (weights.update, *weights.later)):
            if record is update.gradient and not update.speculative:
                self._versions.failed = True

    def _may_speculate(self, unit: int) -> bool:
        """Whether an update may begin before `step()`: there is room for another version, no checkpoint needs that
        room, and recent steps were not clipped."""
        stopped = self._checkpoint.under_way or self._draining or self._versions.failed
        return self._plan.units[unit].speculated and self._calm >= CALM_STEPS and not stopped

    def _ask(self, update: UpdateRecord) -> None:
        update.query = Ask(update.unit, update)
        self._issue(update.query)

    def _give_up(self, update: UpdateRecord) -> None:
        """A speculative update is given up. Its gradient is needed again."""
        weights = self._versions.of[update.unit]
        if weights.speculative is update:
            weights.speculative = None
        self._versions.give_up(update)
        self._finish(update)

    # --- reports of an UPDATE ---

    def gradient_used(self, update: UpdateRecord) -> None:
        """An update has read its gradient for the last time. It may say so again after it has failed."""
        if update.has_read:
            return
        update.has_read = True
        self._gradients.used(update.gradient, last=not update.speculative)

    def weights_written(self, update: UpdateRecord) -> None:
        """An update has written the new weights."""
        update.has_written = True
        if not update.speculative:
            self._versions.adopt(update)
        self._leases.changes = True

    def ended(self, update: UpdateRecord) -> None:
        """An update has written all states."""
        self._release(update)
        self._versions.end_read(update.unit, update)
        if update.called_off:
            self._give_up(update)
        else:
            self._finish(update)

    def shared(self, update: UpdateRecord) -> None:
        """The parts of an update that other ranks make are here."""
        self._versions.of[update.unit].sharing.remove(update)
        self._pending -= 1
        self._settled(update.unit)
        self.wake(update.unit)

    def update_failed(self, update: UpdateRecord) -> None:
        """An update has failed and may have changed anything. A speculative update is called off, and `step()`
        requests it again."""
        if not update.speculative:
            self._versions.failed = True
            self._versions.end_read(update.unit, update)
            if not update.has_written:
                self._versions.give_up(update)
            return
        self.times_called_off += not update.called_off
        update.called_off, self._calm = True, 0
        if not update.has_read:
            self.gradient_used(update)
        self.ended(update)

    def refused(self, update: UpdateRecord) -> None:
        """An update has found a gradient that is not finite, and has changed nothing."""
        unit = update.unit
        self._release(update)
        self.gradient_used(update)
        self._versions.end_read(unit, update)
        if update.speculative:
            self.times_called_off += not update.called_off
            self._calm = 0
            self._give_up(update)
            return
        self._versions.give_up(update)
        self._versions.of[unit].due -= 1
        self._checkpoint.refused(unit)
        self._finish(update)

    # --- waiting for updates ---

    @property
    def drained(self) -> bool:
        """Whether no update is queued or under way."""
        return self._pending == 0

    @property
    def may_begin(self) -> bool:
        """Whether an update is queued or under way, or will be once nothing refers to the weights."""
        return self._pending > 0 or any(weights.asking is not None for weights in self._versions.of)

    @property
    def prepared(self) -> bool:
        """Whether a checkpoint can begin: the previous checkpoint has read everything, no update is speculative, and
        states are in the runs in which the checkpoint will find them."""
        versions = self._versions
        return not self._checkpoint.left and not any(
            weights.speculative or versions.final_update_moves(unit) for unit, weights in enumerate(versions.of)
        )

    def drain(self, draining: bool) -> None:
        """Begin or stop draining. While draining, no update is speculative."""
        self._draining, self._ahead, self._may_read_ahead = draining, -1, False
        if draining:
            self.call_off_all()
            self._wake_all()

    def restored(self, lags: Sequence[int]) -> None:
        """Every state has been replaced, whatever happened to updates. Nothing is under way."""
        for weights in self._versions.of:
            for update in filter(None, (weights.update, *weights.later)):
                self._gradients.used(update.gradient, last=True)
        self._versions.restored(lags)
        for queue in self._queues:
            queue.clear()
        self._lacking.clear()
        self._admitted, self._pending, self._ahead = [0, 0], 0, -1

    # --- decisions ---

    def wanted(self, unit: int) -> None:
        """Compute begins to use a unit, so its update comes first."""
        self._may_read_ahead = True
        update = self._versions.of[unit].update
        if update is not None:
            update.urgent = True
        self.wake(unit)

    def wake(self, unit: int) -> None:
        """Something has happened for which an update of a unit may have waited."""
        update = self._versions.of[unit].update
        if update is not None and update.state is UpdateState.QUEUED:
            self._push(update)
        elif update is not None and update.state is UpdateState.LOADING:
            self._start(update)

    def pump(self) -> None:
        """Start every update that can start now."""
        if self._versions.changes:
            self._versions.changes = False
            lacking, self._lacking = self._lacking, set()
            for unit in sorted(lacking):
                self.wake(unit)
        for updater, queue in enumerate(self._queues):
            while self._admitted[updater] < MOST_ADMITTED and queue and not self._versions.failed:
                update = heappop(queue)[-1]
                if self._versions.of[update.unit].update is update and update.state is UpdateState.QUEUED:
                    self._admit(update)
        if not any(self._queues):
            self._read_ahead()

    def _read_ahead(self) -> None:
        """If no update waits to start, read ahead the unit whose update followed the current one the last time.

        The unit that backward updates last is the first that the next forward needs. Without reading ahead, that
        forward waits for all of the unit's states.
        """
        unit = self._followed_by.get(self._latest, -1)
        if unit in (-1, self._ahead) or self._plan.asynchronous or not self._may_read_ahead or self._versions.failed:
            return
        weights = self._versions.of[unit]
        if self._plan.units[unit].streamed and weights.update is None and weights.speculative is None:
            self._ahead = unit
            self._issue(ReadAhead(unit))

    def _wake_all(self) -> None:
        for unit in range(len(self._versions.of)):
            self.wake(unit)

    def _push(self, update: UpdateRecord) -> None:
        urgency = -1.0 if update.urgent else self._order.next_use(update.unit)
        heappush(self._queues[self._plan.units[update.unit].updater], (urgency, next(self._sequence), update))

    def _admit(self, update: UpdateRecord) -> None:
        """Begin an update, unless it has to wait. In that case `wake` is called when the reason may have ended."""
        if self._must_wait(update):
            return
        unit = update.unit
        if not self._versions.has_room(update):
            self._wait_for_room(unit)
            return
        update.state = UpdateState.LOADING
        self._admitted[self._plan.units[unit].updater] += 1
        self._gradients.use(update.gradient)
        self._start(update)

    def _must_wait(self, update: UpdateRecord) -> bool:
        """Whether something still uses what an update would change."""
        unit = update.unit
        if self._leases.blocks_update(unit):
            return True
        if any(other is not update for other in self._versions.of[unit].sharing):
            return True
        if not update.gradient.arrived:
            return True
        if self._checkpoint.holds_back(unit):
            return True
        return not self._may_move(update)

    def _may_move(self, update: UpdateRecord) -> bool:
        """Whether an update may write the weights elsewhere, if it has to. If compute reads them where they are, this
        asks whether anything refers to them."""
        unit = update.unit
        leased = self._plan.units[unit].lease_frames or self._plan.asynchronous
        if leased or update.may_move or not self._versions.weights_are_needed(unit):
            return True
        self._checkpoint.hurry(unit)
        if update.query is None:
            self._ask(update)
        return False

    def _start(self, update: UpdateRecord) -> None:
        """Run an update once its gradient is in RAM."""
        if self._versions.failed:
            return
        if update.gradient.lost:
            self.call_off(update.unit)  # it is speculative, else everything has failed with the gradient
            return
        if not self._gradients.usable(update.gradient) or self._leases.blocks_update(update.unit):
            return
        if self._versions.is_retiring(update.unit):
            return
        # Not earlier: the gradient may wait for buffers of later updates, for which the room is enough.
        if not self._versions.choose(update):
            self._wait_for_room(update.unit)
            return
        update.state = UpdateState.RUNNING
        plan = self._plan.units[update.unit]
        if plan.streamed or not plan.updater:
            self._followed_by[self._latest] = update.unit
            self._latest, self._ahead = update.unit, -1
        self._versions.begin_read(update.unit, update)
        self._issue(Update(update.unit, update, self._versions.of[update.unit].newest + 1))

    def _wait_for_room(self, unit: int) -> None:
        """An update waits until a run is free, or until a checkpoint has read the unit."""
        self._lacking.add(unit)
        self._checkpoint.hurry(unit)

    def _release(self, update: UpdateRecord) -> None:
        """An update makes room for another update."""
        self._admitted[self._plan.units[update.unit].updater] -= 1

    def _finish(self, update: UpdateRecord) -> None:
        """The update of a unit is over. The next update can begin, or the weights can be read."""
        weights = self._versions.of[update.unit]
        weights.update = None
        self._pending -= 1
        self._settled(update.unit)
        if weights.later:
            weights.update = weights.later.pop(0)
            self._push(weights.update)

    def _settled(self, unit: int) -> None:
        """A unit's states are those of one step again."""
        if self._checkpoint.wake(unit):
            self._wake_all()
        self._leases.changes = True
