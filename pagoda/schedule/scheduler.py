"""The scheduler: told what happens in a step, it says what is to be done."""

from collections.abc import Collection, Sequence

from pagoda.plan.trace import Access, Trace
from pagoda.schedule.gradients import Gradients, Record
from pagoda.schedule.leases import Lease, Leases
from pagoda.schedule.operations import Kind, Operation, SchedulePlan
from pagoda.schedule.order import Order
from pagoda.schedule.updates import Updates


class Scheduler:
    """Events in (the methods), operations out (`take`). Deterministic: the same events give the same operations.

    Its caller holds a lock, reports events, and executes operations after it has let go of the lock.
    """

    def __init__(self, plan: SchedulePlan) -> None:
        self.plan = plan
        self._out: list[Operation] = []
        routed = frozenset(unit for unit, of in enumerate(plan.units) if of.routed)
        self._order = Order(plan.trace, len(plan.units), routed)
        self._gradients = Gradients(plan, self._issue)
        self._updates = Updates(
            plan, self._order, self._gradients, self._in_use, self._weights_changed, self._weights_readable, self._issue
        )
        self._leases = Leases(plan, self._order, self._fetchable, self._updates.awaited, self._issue)
        self.frames, self.buffers = self._leases.frames, self._gradients.pages
        """Of leases, and of the gradients that share pages: how many are in use, and were at most."""
        self._owner: dict[Operation, Lease | Record | None] = {}
        """What each operation under way is about, besides its unit."""
        self._held: dict[Operation, Lease | Record | None] = {}
        """The same of each RECLAIM whose weights something refers to."""
        self._waiting: dict[int, int] = {}
        """unit -> accesses of it that cannot read it yet."""
        self.found: bool | None = None
        """What the latest access came upon: True for the weights, False where their update or fetch was to come or
        under way, None where nothing had been done for them."""
        self.steps = 0
        """Steps that were taken, skipped or dropped."""

    # --- events of compute ---

    def access(self, access: Access, recorded: bool = True) -> None:
        """Compute begins to use a unit: it must wait until `ready`. What is `recorded` is part of the step, of which
        the next trace is made; evaluation is not."""
        unit = access.unit
        self.found = False if self.awaits_update(unit) else self._leases.found(unit)
        announced = self._order.access(access, recorded)
        self._updates.undo(unit)
        self._leases.access(unit)
        self._leases.expect(announced)
        self._waiting[unit] = self._waiting.get(unit, 0) + 1
        self._updates.publish(unit)
        self._updates.wanted(unit)
        self._pump()

    def expect(self, units: Sequence[int]) -> None:
        """A router has chosen units of experts, which compute uses next, in this order."""
        self._order.expect(units)
        self._leases.expect(units)
        self._pump()

    def release(self, unit: int) -> None:
        """One use of a unit by compute has ended."""
        self._leases.release(unit)
        if unit in self._waiting:
            self._waiting[unit] = min(self._waiting[unit], self._leases.users[unit])
            if not self._waiting[unit]:
                del self._waiting[unit]
        self._updates.retry(unit)
        self._updates.ask_again(unit)
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
        if complete and last:
            if self.plan.under_backward:
                self._updates.ask_early(record, speculative=False)
            elif self._updates.may_speculate(unit):
                self._updates.ask_early(record, speculative=True)
        self._pump()

    def scale_known(self, clipped: bool = False, skipped: bool = False, changed: Collection[int] = ()) -> None:
        """`step()` has decided: whether gradients are clipped, or the step is skipped. OFFLOADs may still be under way.

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
                updates.call_off_early(unit)
                gradients.drop(record)
            elif not updates.stands(unit):
                updates.queue(record)
        self.steps += 1
        if self._order.end_step():
            self._leases.retraced()
        updates.end_step(clipped or skipped)
        self._leases.end_step()
        self._pump()

    def drop_gradients(self) -> None:
        """The gradients of this step are dropped: `zero_grad()`, or an exception before `step()`."""
        self._updates.drop_step()
        for unit in self._gradients.units():
            record = self._gradients.take(unit)
            assert record is not None
            self._updates.call_off_early(unit)
            self._gradients.drop(record)
        self.steps += 1
        self._pump()

    def drain(self, draining: bool) -> None:
        """Everything that was asked for shall end; until then `drained` is False."""
        self._updates.drain(draining)
        self._pump()

    def overwritten(self, unit: int) -> None:
        """The weights of a unit were written in their home by other means than an update. No update is queued or under
        way, and the executor has dropped what it had read ahead."""
        self._weights_changed(unit)
        self._weights_readable(unit)
        self._pump()

    def restored(self) -> None:
        """Every state has been replaced, also after an update has failed. Nothing is under way."""
        self._updates.restored()
        for unit in range(len(self.plan.units)):
            self._weights_changed(unit)
            self._weights_readable(unit)
        self._pump()

    def prepare_checkpoint(self) -> None:
        """A checkpoint is to begin: it can once `prepared`, and once asynchronous updates are drained."""
        self._updates.undo_all()
        self._pump()

    def begin_checkpoint(self, in_place: Collection[int] = ()) -> None:
        """A checkpoint is to have every state as the last `step()` leaves it. Since it was prepared, compute has used
        nothing. The states of units `in_place` can only be read in their home: their next updates wait for that."""
        self._updates.begin_checkpoint(in_place)
        self._pump()

    def end_checkpoint(self) -> None:
        """The checkpoint is complete, or given up: it needs no more room."""
        self._updates.checkpoint.under_way = False

    # --- events of the executor ---

    def issued(self, operation: Operation) -> None:
        """All of a FETCH is in a device's queue: compute can be told to go on behind it. `ended` follows."""
        about = self._owner[operation]
        assert isinstance(about, Lease)
        self._leases.issued(about)
        self._pump(ranks_agree=False)

    def ended(self, operation: Operation) -> None:
        """An operation has ended."""
        unit, about = operation.unit, self._owner.pop(operation)
        if operation.kind is Kind.FETCH:
            assert isinstance(about, Lease)
            self._leases.ended(about)
            self._updates.publish(unit)
            self._updates.retry(unit)
        elif operation.kind is Kind.OFFLOAD:
            assert isinstance(about, Record)
            self._gradients.offloaded(about)
            self._updates.retry(unit)
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
        self._pump(ranks_agree=False)

    def failed(self, operation: Operation) -> None:
        """An operation has failed. The executor raises its error where it matters.

        Nothing is lost by a failed FETCH, SPILL or SAVE. A FETCH is tried again for as long as compute waits for it, a
        SPILL when compute next makes a gradient. After a failed OFFLOAD the step must be dropped. A failed UPDATE that
        was speculative is undone. After any other, no state can be used until all are `restored`.
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
            self._updates.retry(unit)
        elif operation.kind is Kind.SAVE:
            self._updates.save_ended(unit)
        elif operation.kind is Kind.UPDATE:
            self._updates.update_failed(unit)
        else:
            self._updates.failed = True
        self._pump(ranks_agree=False)

    def refused(self, operation: Operation) -> None:
        """An UPDATE has found a gradient that is not finite, and has changed nothing. It is over."""
        self._owner.pop(operation)
        self._updates.refused(operation.unit)
        self._pump(ranks_agree=False)

    def old_states_kept(self, operation: Operation) -> None:
        """An UPDATE under way has copied the old states to the reserve, for the checkpoint."""
        self._updates.checkpoint.copied(operation.unit)
        self._pump(ranks_agree=False)

    def gradient_used(self, operation: Operation) -> None:
        """An UPDATE under way has read its gradients for the last time."""
        self._updates.gradient_used(operation.unit)
        self._pump(ranks_agree=False)

    def weights_written(self, operation: Operation) -> None:
        """An UPDATE under way has written the new weights; other states may follow."""
        self._updates.weights_written(operation.unit)
        self._pump(ranks_agree=False)

    def reclaimed(self, operation: Operation, freed: bool) -> None:
        """The answer to RECLAIM. If something still refers to the weights, `let_go` follows when nothing does."""
        about = self._owner.pop(operation)
        if not freed:
            self._held[operation] = about
        if isinstance(about, Lease):
            self._leases.reclaimed(about, freed)
        else:
            self._updates.answered(operation, freed and not self._used(operation.unit))
        self._pump()

    def let_go(self, operation: Operation) -> None:
        """Nothing refers any more to what a RECLAIM asked for."""
        about = self._held.pop(operation)
        if isinstance(about, Lease):
            self._leases.let_go(about)
        else:
            self._updates.ask_again(operation.unit)
        self._pump()

    # --- what the caller asks ---

    def take(self) -> list[Operation]:
        """The operations since the last call, in the order in which they are to be given to their lanes."""
        out, self._out = self._out, []
        return out

    def ready(self, unit: int) -> bool:
        """Whether compute can read the weights of a unit that it has accessed."""
        return unit not in self._waiting

    def awaits_update(self, unit: int) -> bool:
        """Whether it is an update that the weights of a unit wait for."""
        return self._updates.readable(unit) is None

    def lag(self, unit: int) -> int:
        """How many steps the weights of a unit that are read lack, of those that `step()` has asked for."""
        weights = self._updates.weights[unit]
        return weights.due - weights.version

    def began_early(self, unit: int) -> bool:
        """Whether an update of a unit that stands was queued in this step before `step()`."""
        return self._updates.began_early(unit)

    @property
    def trace(self) -> Trace:
        """What steps are expected to be."""
        return self._order.trace

    @property
    def position(self) -> int:
        """Accesses of the trace that the step has come past."""
        return self._order.position

    def holders(self) -> list[int]:
        """Units whose lease cannot make room now."""
        return self._leases.holders()

    @property
    def speculations(self) -> tuple[int, int]:
        """Updates before `step()` that stood, and that were undone, so far."""
        return self._updates.times_kept, self._updates.times_undone

    def speculates(self, unit: int) -> bool:
        """Whether a speculative update of a unit is queued, under way, or waits for `step()`, or is being undone."""
        return self._updates.speculates(unit)

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
    def has_failed(self) -> bool:
        """Whether an update has failed, so that states are those of no step."""
        return self._updates.failed

    @property
    def saved(self) -> bool:
        """Whether every SAVE of the checkpoint has ended, well or not."""
        return self._updates.checkpoint.left == 0

    @property
    def checkpoint_lost(self) -> bool:
        """Whether the checkpoint still waits for an update after one has failed: it may wait for ever."""
        return self._updates.failed and self._updates.checkpoint.lost

    # --- parts ---

    def _pump(self, ranks_agree: bool = True) -> None:
        """Let each part start what it can. `ranks_agree`: the event is one that every rank has at this point."""
        if self._gradients.changes:
            self._gradients.pump()
        self._updates.pump()
        if self._gradients.changes:  # updates may have asked for gradients
            self._gradients.pump()
        # Where ranks must fetch alike, whether something has changed here does not count: lanes may have changed it.
        if ranks_agree if self.plan.agreed else self._leases.changes:
            self._leases.pump()
        for unit in [*self._waiting] if self._waiting else ():
            version = self._updates.readable(unit)
            if version is not None and self._leases.ready(unit):
                del self._waiting[unit]
                self._leases.served(unit)
                self._updates.weights[unit].read = True

    def _issue(self, operation: Operation, about: Lease | Record | None = None) -> None:
        if operation.kind is not Kind.READ_AHEAD:
            self._owner[operation] = about
        self._out.append(operation)

    def _in_use(self, unit: int) -> bool:
        """Whether compute, or a FETCH, reads a unit's weights in their home; or compute uses a lease."""
        return self._used(unit) or self._leases.reads(unit, self._updates.weights[unit].version)

    def _used(self, unit: int) -> bool:
        """Whether compute uses a unit."""
        return self._leases.users[unit] > self._waiting.get(unit, 0)

    def _fetchable(self, unit: int) -> int | None:
        """The version of a unit's weights that a FETCH can be issued for. Where ranks must agree on fetches, that does
        not depend on whether its update has ended: the FETCH waits for that."""
        return self._updates.weights[unit].due if self.plan.agreed else self._updates.readable(unit)

    def _weights_changed(self, unit: int) -> None:
        self._leases.changed(unit)

    def _weights_readable(self, unit: int) -> None:
        if not self.plan.agreed:  # else that does not count, and it was listed when its lease has ended
            self._leases.note_missing(unit)
