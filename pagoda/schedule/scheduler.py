"""The scheduler: told what happens in a step, it says what is to be done."""

from collections.abc import Collection

from pagoda.plan.trace import Access
from pagoda.schedule.gradients import Gradients, Record
from pagoda.schedule.leases import Lease, Leases
from pagoda.schedule.operations import Kind, Operation, SchedulePlan
from pagoda.schedule.order import Order
from pagoda.schedule.updates import Updates


class Scheduler:
    """Events in (the methods), operations out (`take`). Deterministic: the same events give the same operations.

    It knows no tensor, thread, stream or clock. Its caller holds a lock, reports events, and executes operations after
    it has let go of the lock. Each operation is reported once, by `ended` or `failed`; a RECLAIM by `reclaimed`.
    """

    def __init__(self, plan: SchedulePlan) -> None:
        self.plan = plan
        self._out: list[Operation] = []
        self._order = Order(plan.trace)
        self._gradients = Gradients(plan, self._issue)
        self._updates = Updates(
            plan, self._order, self._gradients, self._in_use, self._weights_changed, self._weights_readable, self._issue
        )
        self._leases = Leases(plan, self._order, self._updates.readable, self._issue)
        self._owner: dict[Operation, Lease | Record | None] = {}
        """What each operation under way is about, besides its unit."""
        self._held: dict[Operation, Lease | Record | None] = {}
        """The same of each RECLAIM whose weights something refers to."""
        self._waiting: dict[int, int] = {}
        """unit -> accesses of it that cannot read it yet."""
        self.steps = 0
        """Steps that were taken, skipped or dropped."""
        self._deciding = False
        """From `step_asked` to `scale_known`."""

    # --- events of compute ---

    def access(self, access: Access) -> None:
        """Compute begins to use a unit: it must wait until `ready`."""
        unit = access.unit
        self._order.access(access)
        self._updates.undo(unit)
        self._leases.access(unit)
        self._waiting[unit] = self._waiting.get(unit, 0) + 1
        self._updates.publish(unit)
        self._updates.wanted(unit)
        self._pump()

    def release(self, unit: int) -> None:
        """One use of a unit by compute has ended."""
        self._leases.release(unit)
        if unit in self._waiting:
            self._waiting[unit] = min(self._waiting[unit], self._leases.users[unit])
            if not self._waiting[unit]:
                del self._waiting[unit]
        self._updates.retry(unit)
        self._pump()

    def gradient(self, unit: int, complete: bool, last: bool) -> None:
        """Autograd has made a gradient of a unit.

        `complete`: this backward is through with the unit; `last`: no other backward precedes `step()`, as far as is
        known. Compute must wait while `gradients_held_back`.
        """
        self._updates.undo(unit)
        self._gradients.add(unit, self.steps, complete)
        record = self._gradients.get(unit)
        assert record is not None
        record.last = record.last or (complete and last)
        self._pump()

    def step_asked(self) -> None:
        """`step()` was called. Wait until `gradients_settled`; then call `scale_known`."""
        self._deciding = True

    def scale_known(self, clipped: bool = False, skipped: bool = False, changed: Collection[int] = ()) -> None:
        """The step is decided: whether gradients are clipped, or the step is skipped.

        `changed`: units whose hyperparameters are others than those that a speculative update began with.
        """
        updates, gradients = self._updates, self._gradients
        if clipped or skipped:
            updates.undo_all()
        for unit in changed:
            updates.undo(unit)
        for unit in gradients.units():
            record = gradients.take(unit)
            assert record is not None
            if skipped:
                gradients.drop(record)
            elif not updates.stands(unit):
                updates.queue(record)
        self.steps += 1
        self._deciding = False
        self._order.end_step()
        updates.end_step(clipped or skipped)
        self._leases.end_step()
        self._pump()

    def drop_gradients(self) -> None:
        """The gradients of this step are dropped: `zero_grad()`, or an exception before `step()`."""
        self._updates.undo_all()
        for unit in self._gradients.units():
            record = self._gradients.take(unit)
            assert record is not None
            self._gradients.drop(record)
        self.steps += 1
        self._deciding = False
        self._pump()

    def drain(self, draining: bool) -> None:
        """Everything that was asked for shall end; until then `drained` is False."""
        self._updates.draining = draining
        if draining:
            self._updates.undo_all()
            for unit in range(len(self.plan.units)):
                self._updates.retry(unit)
        self._pump()

    def prepare_checkpoint(self) -> None:
        """A checkpoint is about to begin: it can once `prepared`, and once asynchronous updates are drained."""
        self._updates.prepare_checkpoint()
        self._pump()

    def begin_checkpoint(self) -> None:
        """A checkpoint is to have every state as the last `step()` leaves it; one at a time."""
        self._updates.begin_checkpoint()
        self._pump()

    # --- events of the executor ---

    def ended(self, operation: Operation) -> None:
        """An operation has ended. A FETCH to a device with a queue of its own has ended once it is in that queue."""
        unit, about = operation.unit, self._owner.pop(operation)
        if operation.kind is Kind.FETCH:
            assert isinstance(about, Lease)
            self._leases.ended(about)
            self._updates.publish(unit)
            self._updates.retry(unit)
        elif operation.kind is Kind.OFFLOAD:
            assert isinstance(about, Record)
            self._gradients.offloaded(about)
            self._update_under_backward(about)
        elif operation.kind in (Kind.SPILL, Kind.RELOAD):
            assert isinstance(about, Record)
            self._gradients.transferred(about)
            self._updates.gradient_there(unit)
        elif operation.kind is Kind.UPDATE:
            self._updates.ended(unit)
        elif operation.kind is Kind.PUBLISH:
            self._updates.publish_ended(unit)
        elif operation.kind is Kind.UNDO:
            self._updates.undone(unit)
        elif operation.kind is Kind.SAVE:
            self._updates.save_ended(unit)
        self._pump()

    def failed(self, operation: Operation) -> None:
        """An operation has failed. The executor raises its error where it matters.

        Nothing is lost by a failed FETCH, SPILL or SAVE; the first two are tried again while somebody waits for them.
        After a failed OFFLOAD the step must be dropped. After any other, no state can be used any more.
        """
        unit, about = operation.unit, self._owner.pop(operation)
        assert operation.kind is not Kind.RECLAIM, "a RECLAIM is answered"
        if isinstance(about, Lease):
            self._leases.ended(about, failed=True)
            self._updates.publish(unit)
            self._updates.retry(unit)
        elif isinstance(about, Record):
            about.lost = about.lost or operation.kind is not Kind.SPILL
            if operation.kind is Kind.OFFLOAD:
                self._gradients.offloaded(about)
            else:
                self._gradients.transferred(about, failed=operation.kind is Kind.SPILL)
            self._updates.gradient_there(unit)
        elif operation.kind is Kind.SAVE:
            self._updates.save_ended(unit)
        else:
            self._updates.failed = True
        self._pump()

    def gradient_used(self, operation: Operation) -> None:
        """An UPDATE under way has read its gradients for the last time."""
        self._updates.gradient_used(operation.unit)
        self._pump()

    def weights_written(self, operation: Operation) -> None:
        """An UPDATE under way has written the new weights; other states may follow."""
        self._updates.weights_written(operation.unit)
        self._pump()

    def reclaimed(self, operation: Operation, freed: bool) -> None:
        """The answer to RECLAIM. If something still refers to the weights, `let_go` follows when nothing does."""
        about = self._owner.pop(operation)
        if not freed:
            self._held[operation] = about
        if isinstance(about, Lease):
            self._leases.reclaimed(about, freed)
        else:
            self._updates.answered(operation, freed)
        self._pump()

    def let_go(self, operation: Operation) -> None:
        """Nothing refers any more to what a RECLAIM asked for."""
        about = self._held.pop(operation)
        if isinstance(about, Lease):
            self._leases.let_go(about)
        else:
            self._updates.retry(operation.unit)
        self._pump()

    # --- what the caller asks ---

    def take(self) -> list[Operation]:
        """The operations since the last call, in the order in which they are to be given to their lanes."""
        out, self._out = self._out, []
        return out

    def ready(self, unit: int) -> bool:
        """Whether compute can read the weights of a unit that it has accessed."""
        return unit not in self._waiting

    @property
    def gradients_held_back(self) -> bool:
        """Whether compute must wait before it makes more gradients: one has no buffer yet."""
        return self._gradients.held_back

    @property
    def gradients_settled(self) -> bool:
        """Whether every gradient of this step lies where it stays."""
        return self._gradients.unsettled == 0

    @property
    def drained(self) -> bool:
        return self._updates.pending == 0

    @property
    def idle(self) -> bool:
        """Whether nothing is under way: if compute waits now, it waits for ever, and there is too little memory."""
        return not self._owner

    @property
    def prepared(self) -> bool:
        """Whether a checkpoint can begin."""
        return self._updates.prepared

    @property
    def saved(self) -> bool:
        """Whether the checkpoint has read everything."""
        return self._updates.left_to_save == 0

    # --- parts ---

    def _pump(self) -> None:
        self._gradients.pump()
        self._updates.pump()
        self._gradients.pump()  # updates may have asked for gradients
        self._leases.pump()
        for unit in [*self._waiting]:
            version = self._updates.readable(unit)
            if version is not None and self._leases.ready(unit):
                del self._waiting[unit]
                self._leases.served(unit)
                self._updates.weights[unit].read = True

    def _issue(self, operation: Operation, about: Lease | Record | None = None) -> None:
        self._owner[operation] = about
        self._out.append(operation)

    def _update_under_backward(self, record: Record) -> None:
        """A gradient has arrived: update its unit now, if backward is through with it for this step."""
        unit = record.unit
        if not (record.last and record.settled) or self._gradients.get(unit) is not record:
            return
        if self.plan.under_backward:
            self._gradients.take(unit)
            self._updates.queue(record)
        elif not (self._deciding or record.lost or self._leases.users[unit]) and self._updates.may_speculate(unit):
            self._updates.queue(record, speculative=True)

    def _in_use(self, unit: int) -> bool:
        """Whether compute, or a FETCH, reads a unit's weights in their home; or compute uses a lease."""
        return self._leases.users[unit] > self._waiting.get(unit, 0) or self._leases.fetching[unit] > 0

    def _weights_changed(self, unit: int) -> None:
        self._leases.changed(unit)

    def _weights_readable(self, unit: int) -> None:
        self._leases.fetchable(unit)
