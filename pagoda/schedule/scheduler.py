"""The scheduler: receives the events of a step and decides which operations to start. The package's docstring has an
overview."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from pagoda.plan.trace import Access, Trace
from pagoda.schedule.checkpoints import Checkpoint
from pagoda.schedule.gradients import Gradients
from pagoda.schedule.leases import Leases
from pagoda.schedule.operations import (
    Ask,
    Evict,
    Fetch,
    GradientMove,
    Operation,
    Outdate,
    Question,
    Save,
    SchedulePlan,
    Share,
    Update,
)
from pagoda.schedule.order import Order
from pagoda.schedule.records import GradientRecord, Lease, UpdateState, Weights
from pagoda.schedule.served import Found
from pagoda.schedule.staleness import StalenessSchedule
from pagoda.schedule.updates import UpdateSchedule
from pagoda.schedule.versions import Versions


class Usage(NamedTuple):
    """What a scheduler's operations have used so far."""

    frames: int
    """Frames that leases hold now."""
    most_frames: int
    pages: int
    """Pages that gradient buffers hold now."""
    most_pages: int
    kept: int
    """Speculative updates that were confirmed."""
    called_off: int
    """Speculative updates that were called off."""


class Scheduler:
    """Turns events into operations (`take`). Deterministic: the same events give the same operations.

    Events are the public methods that return nothing. The caller reports them one at a time (`runtime/driver.py` holds
    a lock for that) and passes operations to lanes. All other public methods but `take` are questions, and change
    nothing.
    """

    def __init__(self, plan: SchedulePlan) -> None:
        self.steps = 0
        """The number of steps that were taken, skipped or dropped."""
        self._out: list[Operation] = []
        self.versions = Versions(plan, self._issue)
        self._under_way = 0
        """The number of operations that have not been reported as over."""
        routed = frozenset(unit for unit, of in enumerate(plan.units) if of.routed)
        self.order = Order(plan.trace, len(plan.units), routed)
        self._make_parts(plan)

    def moved(self, plan: SchedulePlan) -> None:
        """States have moved to their homes in another plan of the same units, and no lease is left. Nothing is queued
        or under way, and no gradient waits."""
        self.versions.moved(plan)
        self._make_parts(plan)

    def _make_parts(self, plan: SchedulePlan) -> None:
        """Create the parts that follow a plan."""
        self.plan = plan
        self.gradients = Gradients(plan, self._issue)
        self.leases = Leases(plan, self.order, self.versions, self._issue)
        self.checkpoint = Checkpoint(plan, self.order, self.versions, self._issue)
        self.updates = UpdateSchedule(
            plan, self.order, self.versions, self.gradients, self.leases, self.checkpoint, self._issue
        )
        self.staleness = StalenessSchedule(self.versions, self.leases, self.updates)

    # --- events of compute ---

    def access(self, access: Access, recorded: bool = True) -> None:
        """Compute begins to use a unit, and must wait until it is `ready`. `recorded`: the access belongs to a training
        step, and so to the step's trace. Accesses of an evaluation do not."""
        unit = access.unit
        announced = self.order.access(access, recorded)
        self.updates.call_off(unit)
        self.leases.access(unit)
        self._fetch(self.leases.expect(announced))
        self.staleness.step_begun |= recorded
        self.updates.wanted(unit)
        self._pump()

    def expect(self, units: Sequence[int]) -> None:
        """A router has chosen units of experts. Compute uses them next, in this order."""
        self.order.expect(units)
        self._fetch(self.leases.expect(units))
        self._pump()

    def release(self, unit: int) -> None:
        """One use of a unit by compute has ended."""
        self.leases.release(unit)
        self.updates.ask_again(unit)
        self._pump()

    def begin_gradient(self, unit: int, payload: Any = None) -> None:
        """Autograd makes a part of a unit's gradient of this step, of which `gradient` will tell. If it is the first,
        the gradient begins. `payload` is then what the executor knows of it."""
        self.gradients.begin(unit, self.steps, payload)

    def gradient(self, unit: int, complete: bool, last: bool, delivery: Any = None, reduced: bool = False) -> None:
        """Autograd has made a gradient of a unit.

        `complete`: this backward has made all gradients of the unit. `last`: it is the last one before `step()` of
        those that `wrap(gradient_accumulation_steps=...)` has announced. `delivery`: what the executor knows of this
        part of the unit's gradient of this step. Compute must wait while `buffer_awaited`. `reduced`: ranks add it up
        first, so `reduce` follows.
        """
        self.updates.call_off(unit)
        if reduced:
            record = self.gradients.expect(unit, self.steps, complete)
        else:
            record = self.gradients.add(unit, self.steps, complete, delivery)
        if complete and last:
            self.updates.ask_early(record)
        self._pump()

    def lend_gradient(self, unit: int, lent: bool) -> None:
        """Compute reads a unit's gradient of this step, once `gradient_is_here`, until it is not `lent` any more."""
        self.gradients.lend(unit, lent)
        self._pump(ranks_agree=False)

    def end_step(self, clipped: bool = False, changed: Collection[int] = (), unused: Collection[int] = ()) -> None:
        """`step()` was called: queue an update of each unit that has a gradient. OFFLOADs may still be under way.

        `clipped`: gradients are clipped, or were dropped because one is not finite, so speculative updates are called
        off first. `changed`: units whose hyperparameters differ from those that their speculative update used. Their
        updates are called off too. `unused`: units whose gradients were dropped.
        """
        if clipped:
            self.updates.call_off_all()
        for unit in (*changed, *unused):
            self.updates.call_off(unit)
        self.staleness.end_step()
        for record in self.gradients.take_all():
            if record.unit in unused:
                self._drop(record)
            elif not self.updates.confirm(record.unit):
                self.updates.request(record)
        self.steps += 1
        retraced = self.order.end_step()
        self.updates.end_step(clipped)
        self.leases.end_step(retraced)
        self._pump()

    def drop_gradients(self) -> None:
        """The gradients of this step are dropped: by `zero_grad()`, because one is not finite, or because a checkpoint
        is loaded. An exception of the user's program drops none."""
        self.updates.call_off_all()
        for record in self.gradients.take_all():
            self._drop(record)
        self.steps += 1
        self._pump()

    def drain(self, draining: bool, show: bool = True) -> None:
        """Begin or stop draining. While draining, every queued update must end, and no speculative update begins.
        Compute waits until `drained`. `show`: later steps see all updates, also asynchronous ones."""
        if draining and show:
            self.staleness.show_all()
        elif draining:
            self.staleness.announce_all()
        self.updates.drain(draining)
        self._pump()

    def overwritten(self, unit: int) -> None:
        """Something other than an update has written a unit's weights in their home. No update is queued or under
        way."""
        self.versions.of[unit].edition += 1
        self.leases.outdate(unit)
        self._pump()

    def replaced(self, lags: Sequence[int] = ()) -> None:
        """Every state is about to be replaced, and a checkpoint under way is given up. Nothing is under way. `lags`: by
        unit, how far its new weights lag, if any do."""
        self.checkpoint.restored()
        self.versions.replaced(lags)

    def restored(self, lags: Sequence[int] = ()) -> None:
        """Every state has been replaced, possibly after an update has failed, and nothing has happened since `replaced`
        with the same `lags`."""
        self.updates.restored(lags)
        for unit, weights in enumerate(self.versions.of):  # with the new edition, other ranks may read them
            weights.edition += 1
            self.leases.outdate(unit)
        self.staleness.restored()
        self._pump()

    def try_again(self) -> None:
        """Compute was told that a SPILL or RELOAD has failed, so it is tried again."""
        self.gradients.try_again()
        self._pump(ranks_agree=False)

    def prepare_checkpoint(self) -> None:
        """A checkpoint is requested. It can begin once `checkpoint_prepared` is true, and with asynchronous updates
        after a drain."""
        self.updates.call_off_all()
        self._pump()

    def begin_checkpoint(self, one_version: Collection[int] = ()) -> None:
        """Begin a checkpoint of every state as the last `step()` left it. Compute has used nothing since the checkpoint
        was prepared. SSD has no room for another version of the units in `one_version`, so their next updates wait
        until they are read."""
        self.checkpoint.begin(one_version)
        self._pump()

    def end_checkpoint(self) -> None:
        """The checkpoint is complete, or was given up."""
        self.checkpoint.under_way = False

    # --- events of other ranks ---

    def reduce(self, unit: int, here: bool, payload: Any = None, delivery: Any = None) -> None:
        """Ranks add up gradients of a unit now, and the mean needs its buffer. `here`: autograd has made one of them
        here, of which `gradient` has told. `payload`: as for `begin_gradient`. `delivery`: as for `gradient`."""
        if not here:
            self.updates.call_off(unit)
        self.gradients.reduce(unit, self.steps, here, payload, delivery)
        self._pump(ranks_agree=False)

    def others_read(self, unit: int, begin: bool) -> None:
        """Another rank begins or ends a read of a unit's weights in their home. No update of the unit begins
        meanwhile."""
        if begin:
            self.updates.call_off(unit)
        self.leases.others_read(unit, begin)
        if not begin:
            self.updates.wake(unit)
        self._pump(ranks_agree=False)

    # --- events of the executor ---

    def issued(self, operation: Fetch) -> None:
        """A FETCH is completely in a device's queue, so all later work in that queue finds the weights. `ended`
        follows."""
        self.leases.issued(operation.lease)
        self._pump(ranks_agree=False)

    def ended(self, operation: Operation) -> None:
        """An operation has ended."""
        if isinstance(operation, Update):
            self.updates.ended(operation.update)
        elif isinstance(operation, Share):
            self.updates.shared(operation.update)
        else:
            self._transfer_ended(operation, failed=False)
        self._over()

    def failed(self, operation: Operation) -> None:
        """An operation has failed. The executor raises its error where it matters. A read or write of an UPDATE that
        fails is no such failure: `schedule/stream.py` repeats it.

        A failed FETCH, SPILL, RELOAD or SAVE loses nothing. A FETCH is tried again as long as compute waits for it, a
        SPILL when compute next makes a gradient, and both SPILL and RELOAD once it has been told (`try_again`). After a
        failed OFFLOAD the step must be dropped. A failed speculative UPDATE is given up. After any other failure, no
        state can be used until all are `restored`.
        """
        if isinstance(operation, Update):
            self.updates.update_failed(operation.update)
        elif isinstance(operation, Share):
            self.versions.failed = True
        else:
            self._transfer_ended(operation, failed=True)
        self._over()

    def cannot_go_on(self, operation: Update) -> None:
        """Something of a running UPDATE has failed that could be done again. A speculative one is called off, so that
        `step()` does not confirm it before it ends."""
        if operation.update.speculative:
            self.updates.call_off(operation.unit)
        self._pump(ranks_agree=False)

    def refused(self, operation: Update) -> None:
        """An UPDATE has found a gradient that is not finite, and has changed nothing. It is over."""
        self.updates.refused(operation.update)
        self._over()

    def gradient_used(self, operation: Update) -> None:
        """A running UPDATE has read its gradients for the last time."""
        self.updates.gradient_used(operation.update)
        self._pump(ranks_agree=False)

    def weights_written(self, operation: Update) -> None:
        """A running UPDATE has written the new weights. Other states may follow."""
        self.updates.weights_written(operation.update)
        self._pump(ranks_agree=False)

    def reclaimed(self, operation: Question, freed: bool) -> None:
        """The answer to a question. If something refers to the weights, `let_go` follows later."""
        if isinstance(operation, Ask):
            self.updates.answered(operation, freed)
        elif isinstance(operation, Evict | Outdate):
            self.leases.reclaimed(operation.lease, freed)
        self._over(ranks_agree=True)

    def let_go(self, operation: Question) -> None:
        """Nothing refers any more to the weights of a question."""
        if isinstance(operation, Ask):
            self.updates.ask_again(operation.unit)
        elif isinstance(operation, Evict | Outdate):
            self.leases.free(operation.lease)
        self._pump()

    # --- questions ---

    def take(self) -> list[Operation]:
        """The operations since the last call, in the order in which lanes must receive them."""
        out, self._out = self._out, []
        return out

    def weights(self, unit: int) -> Weights:
        """The record of a unit's weights: its versions, updates and runs."""
        return self.versions.of[unit]

    def lease(self, unit: int) -> Lease | None:
        """A unit's lease that has not ended, which may not be filled yet. None if it has none."""
        return self.leases.of(unit)

    def finds(self, unit: int, arrived: Callable[[Lease], bool]) -> Found:
        """What compute finds if it accesses a unit now. `arrived`: whether the weights of a lease have arrived."""
        lease = self.leases.of(unit)
        if self.versions.of[unit].await_update:
            return Found.LATE
        if lease is None:
            return Found.FAULT
        return Found.HIT if arrived(lease) else Found.LATE

    def ready(self, unit: int) -> bool:
        """Whether compute can read the weights of a unit that it has accessed."""
        return not self.leases.waits(unit)

    @property
    def idle(self) -> bool:
        """Whether nothing is under way. If compute waits now, it waits forever, because there is too little memory."""
        return self._under_way == 0

    def gradient_of(self, unit: int) -> GradientRecord | None:
        """A unit's gradient of this step. None if it has none, or an update has taken it."""
        return self.gradients.of(unit)

    def is_to_come(self, unit: int) -> bool:
        """Whether the latest update of a unit that accesses see or wait for has not begun."""
        weights, waiting = self.versions.of[unit], (UpdateState.QUEUED, UpdateState.LOADING)
        updates = [update for update in (weights.update, *weights.later) if update and update.state in waiting]
        return any(update.gradient is weights.announced for update in updates)

    def gradient_is_here(self, unit: int) -> bool:
        """Whether compute can read the gradient that it was lent."""
        return self.gradients.is_here(unit)

    @property
    def buffer_awaited(self) -> bool:
        """Whether a gradient has no buffer yet, so that compute must make no more."""
        return self.gradients.buffer_awaited

    @property
    def spilling_fails(self) -> bool:
        """Whether a SPILL has failed and none is tried."""
        return self.gradients.spilling_fails

    @property
    def buffers_exhausted(self) -> bool:
        """Whether a gradient has no buffer, and neither a transfer nor an update will free one."""
        return self.gradients.exhausted and not self.updates.may_begin

    @property
    def drained(self) -> bool:
        """Whether no update is queued or under way."""
        return self.updates.drained

    @property
    def checkpoint_prepared(self) -> bool:
        """Whether a checkpoint can begin: the previous checkpoint has read everything, and no update is speculative."""
        return self.updates.prepared

    @property
    def checkpoint_reads(self) -> bool:
        """Whether a checkpoint has not read every state yet."""
        return self.checkpoint.left > 0

    @property
    def checkpoint_lost(self) -> bool:
        """Whether the checkpoint waits for an update that may never come: one has failed, or one needs the buffer of a
        gradient that could not be written to SSD."""
        return self.checkpoint.lost or (self.spilling_fails and self.idle and self.checkpoint_reads)

    @property
    def broken(self) -> bool:
        """Whether an update has failed. States are then damaged until all are `restored`."""
        return self.versions.failed

    @property
    def trace(self) -> Trace:
        """The step that is expected next."""
        return self.order.trace

    @property
    def position(self) -> int:
        """The number of accesses of this step so far, as the trace counts them."""
        return self.order.position

    @property
    def usage(self) -> Usage:
        """What leases, gradient buffers and speculative updates have used so far."""
        frames, pages, updates = self.leases.frames, self.gradients.pages, self.updates
        return Usage(frames.in_use, frames.peak, pages.in_use, pages.peak, updates.times_kept, updates.times_called_off)

    def holders(self) -> list[int]:
        """Units whose frames cannot be taken now."""
        return self.leases.holders()

    # --- parts ---

    def _transfer_ended(self, operation: Operation, failed: bool) -> None:
        """An operation that copies weights, gradients or states has ended."""
        if isinstance(operation, Fetch):
            self.leases.ended(operation.lease, failed)
        elif isinstance(operation, Save):
            self.checkpoint.ended(operation.unit)
        elif isinstance(operation, GradientMove):
            self.gradients.moved(operation, failed)
            if operation.gradient.lost:
                self.updates.lose(operation.gradient)
        self.updates.wake(operation.unit)

    def _fetch(self, leases: Iterable[Lease]) -> None:
        """Fill leases. A speculative update of what they read is called off first."""
        for lease in leases:
            self.updates.call_off(lease.unit)
            self._issue(Fetch(lease.unit, lease, self.versions.awaited(lease.unit, lease.version)))

    def _drop(self, record: GradientRecord) -> None:
        self.updates.cancel_early(record.unit)
        self.gradients.drop(record)

    def _over(self, ranks_agree: bool = False) -> None:
        self._under_way -= 1
        self._pump(ranks_agree)

    def _pump(self, ranks_agree: bool = True) -> None:
        """Let each part start what it can. `ranks_agree`: every rank has this event at the same point of its
        program."""
        if self.gradients.changes:
            self.gradients.pump()
        self.updates.pump()
        self.checkpoint.pump()
        if self.gradients.changes:  # updates may have requested gradients
            self.gradients.pump()
        # If ranks must fetch alike, events of lanes must not start a fetch.
        if self.leases.changes and (ranks_agree or not self.plan.ranks_fetch_alike):
            self._fetch(self.leases.pump())
        self.leases.serve()

    def _issue(self, operation: Operation) -> None:
        self._under_way += operation.reported
        self._out.append(operation)
