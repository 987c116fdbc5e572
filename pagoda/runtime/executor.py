"""The executor: carries out the scheduler's operations on real memory, and reports how each ended."""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from pagoda.errors import BudgetError, NonFiniteGradientError, PagodaError, StorageError
from pagoda.memory.page import PageRun
from pagoda.parameters.unit import LiveUnit
from pagoda.plan.layout import WEIGHT, WEIGHT_BACK
from pagoda.plan.tiers import HOST
from pagoda.runtime.capture import Capture
from pagoda.runtime.damage import Damage
from pagoda.runtime.device import Device
from pagoda.runtime.driver import Driver
from pagoda.runtime.gradients import GradientBuffers, UnitGradient
from pagoda.runtime.lanes import Handle, Lane, all_of
from pagoda.runtime.leases import Fetcher
from pagoda.runtime.store import Store
from pagoda.runtime.updates import Extents, RunningUpdate, UpdateStream
from pagoda.schedule.operations import (
    Adopt,
    Ask,
    Confirm,
    Evict,
    Fetch,
    Free,
    Offload,
    Operation,
    Outdate,
    Question,
    ReadAhead,
    Reload,
    Request,
    Save,
    Share,
    Spill,
    Update,
)
from pagoda.schedule.records import UpdateRecord
from pagoda.schedule.scheduler import Scheduler

_log = logging.getLogger("pagoda")


@dataclass(eq=False, repr=False)
class Executor:
    """Passes each operation to its lanes. Operations start under the driver's lock. Their ends are reported on the
    threads of lanes."""

    _scheduler: Scheduler
    _store: Store
    _units: Sequence[LiveUnit]
    _leases: Fetcher
    _gradients: GradientBuffers
    updates: UpdateStream
    _update_lane: Lane
    _device: Device
    _share_weights: Callable[[UnitGradient], Handle] | None
    """With several ranks: gathers the slices of a unit's weights that the update of a gradient writes."""
    damage: Damage = field(default_factory=Damage)
    _held: dict[object, Question] = field(default_factory=dict)
    """Questions about weights to which something still referred. Of a unit, the latest ASK is enough."""
    spill_failure: BaseException | None = None
    """The error of a SPILL since compute last asked."""
    suspended_by: BaseException | None = None
    """The error after which an update or a read of a gradient waits to be tried again, when compute waits next."""
    capture: Capture | None = None
    """The checkpoint that is being written, if any."""

    def __post_init__(self) -> None:
        gradients = self._gradients
        self.driver = Driver(self._scheduler, self._execute, self.damage, gradients.meter.hold, self.abandon)
        self._asynchronous = self._store.plan.options.asynchronous
        self._do: dict[type[Operation], Callable[[Any], None]] = {
            Fetch: self._fetch,
            Evict: self._reclaim,
            Outdate: self._reclaim,
            Ask: self._reclaim,
            Adopt: self._adopt,
            Free: lambda op: self._store.free(op.unit, op.state, op.run),
            Save: self._save,
            Offload: lambda op: self._follow(op, gradients.offload(op)),
            Spill: lambda op: self._follow(op, gradients.transfer(op)),
            Reload: lambda op: self._follow(op, gradients.transfer(op)),
            Update: self._update,
            Request: self._request,
            Confirm: lambda op: self._end_gradient_with(op.update),
            ReadAhead: lambda op: self.updates.read_ahead(op.unit),
            Share: self._share,
        }

    def _execute(self, operation: Operation) -> None:
        with torch.inference_mode(False):  # else leases that begin during an inference could not train
            self._do[type(operation)](operation)

    # --- what compute asks ---

    def poll(self) -> None:
        """Tell the scheduler about weights to which nothing refers any more. torch tells nobody that the last view of a
        storage is gone, nor autograd that a graph is. So an event of compute that is no part of another one begins with
        this question. It takes no time while nothing is held."""
        for key, operation in [*self._held.items()]:
            if self._leases.is_free(operation, self._units[operation.unit]) and key in self._held:
                del self._held[key]
                self.driver.tell(self._let_go, operation)

    def try_again(self) -> None:
        """Try again what has failed of updates, and of moves of gradients."""
        if self.suspended_by is not None:
            self.suspended_by = None
            self.driver.tell(self._scheduler.try_again)
            self.updates.try_again()

    def raise_failure(self) -> None:
        """Raise the error for which compute waits no longer."""
        if self._scheduler.broken:
            self.damage.raise_cause()
        if self.suspended_by is not None:
            cause = self.suspended_by
            said = str(cause) if isinstance(cause, PagodaError) else f"{type(cause).__name__}: {cause}"
            kind = StorageError if isinstance(cause, OSError) else PagodaError
            raise kind(
                f"{said} -- An update needs this. Nothing is lost: Pagoda tries again when it is used "
                "next. If it cannot be mended, load a checkpoint."
            ) from cause

    def raise_spill_failure(self) -> None:
        """If a SPILL has failed and is not tried again, raise its error, and try it again."""
        error, self.spill_failure = self.spill_failure, None
        if error is not None and self._scheduler.spilling_fails:
            self.driver.tell(self._scheduler.try_again)
            raise error

    def refuse_gradient(self, unit: LiveUnit) -> None:
        """Raise the error for a gradient without a buffer."""
        self.raise_spill_failure()
        raise BudgetError(self._gradients.exhausted(unit), tier=HOST)

    def end_step(self, clipped: bool, changed: Collection[int], unused: Collection[int]) -> None:
        """`step()` was called. Call it only through `driver.tell`."""
        self._scheduler.end_step(clipped, changed=changed, unused=unused)
        self._end_pending()

    def restored(self, lags: Sequence[int]) -> None:
        """Every state has been replaced, by weights with these `lags`. Call it only through `driver.tell`."""
        self._scheduler.restored(lags)
        self.suspended_by = None
        self.damage.cause = None

    def updated(self, unit: LiveUnit) -> Handle | None:
        """A handle that ends when the unit's latest announced update has written its weights."""
        gradient = self._announced(unit)
        return None if gradient is None else gradient.updated

    def newest(self, unit: LiveUnit) -> PageRun:
        """Where the unit's newest weights are, after all updates that have ended."""
        return self.driver.ask(partial(self._store.newest, unit.index, WEIGHT))

    def is_to_come(self, unit: LiveUnit) -> bool:
        """Whether the unit's latest announced update has not begun yet. False with asynchronous updates, whose weights
        compute does not wait for."""
        gradient = self._announced(unit)
        queued = not self._asynchronous and self._scheduler.is_to_come(unit.index)
        return queued and gradient is not None and not gradient.updated.done

    def _announced(self, unit: LiveUnit) -> UnitGradient | None:
        """The gradient of the unit's latest announced update."""
        record = self._scheduler.weights(unit.index).announced
        return None if record is None else record.payload

    def begin_checkpoint(self, capture: Capture) -> None:
        """Start a checkpoint that reads every unit. Call it only through `driver.tell`."""
        self.capture = capture
        self._scheduler.begin_checkpoint(capture.one_version)
        self.try_again()
        self._end_lost_capture()

    def end_checkpoint(self) -> None:
        """The checkpoint is complete or was given up. Call it only through `driver.tell`."""
        self.capture = None
        self._scheduler.end_checkpoint()

    def abandon(self, error: BaseException) -> None:
        """The driver has stopped. Let all work fail that waits for other work."""
        if self.capture is not None:
            self.capture.end(error)
        self.updates.refuse(error)

    def close(self) -> bool:
        """Release all memory. Every lane must have ended. Returns whether someone still holds weights of a lease."""
        self._gradients.close()
        return self.let_go()

    def let_go(self) -> bool:
        """Let go of all leases and gradients. No operation is under way. Returns whether someone still holds weights of
        a lease."""
        for unit in self._units:  # the scheduler outlives this, with its records
            weights = self._scheduler.weights(unit.index)
            one_each = [weights.update, weights.asking, weights.speculative, weights.unannounced]
            records = [weights.announced, self._scheduler.gradient_of(unit.index)]
            for update in filter(None, (*one_each, *weights.later, *weights.sharing)):
                update.payload = None
                records.append(update.gradient)
            for record in filter(None, records):
                record.payload = None
        self._held.clear()
        self._gradients.let_go()
        return self._leases.close()

    # --- operations ---

    def _follow(self, operation: Operation, handle: Handle) -> None:
        """Report the end of an operation."""
        handle.then(partial(self._ended, operation))

    def _ended(self, operation: Operation, error: BaseException | None) -> None:
        if error is None:
            self.driver.tell(self._scheduler.ended, operation)
            if self.spill_failure is not None:
                self.driver.tell(self._end_lost_capture)
        elif isinstance(operation, Fetch):
            # It is tried again as long as compute waits. Ended operations must be reported first, for example that the
            # update failed which makes the weights. Otherwise each try would fail at once.
            self._update_lane.submit(lambda: self.driver.tell(self._failed, operation, error))
        else:
            self.driver.tell(self._failed, operation, error)

    def _failed(self, operation: Operation, error: BaseException) -> None:
        if isinstance(operation, Fetch):
            self._units[operation.unit].fetch_error = error
        elif isinstance(operation, Spill):
            self.spill_failure = self.spill_failure or error
        elif isinstance(operation, Reload):
            self._suspend(error)
        self._scheduler.failed(operation)
        if self._scheduler.broken:
            self.damage.note(error)
        self._end_pending()
        self._end_lost_capture()

    def _end_pending(self) -> None:
        """After an update has failed, no other begins. End the handles of the pending ones with the error."""
        if not self._scheduler.broken:
            return
        for unit in self._units:
            gradient = self._announced(unit) if self._scheduler.is_to_come(unit.index) else None
            if gradient is not None and not gradient.written.done:
                gradient.updated.finish(self.damage.cause)
                gradient.written.finish(self.damage.cause)

    def _end_lost_capture(self) -> None:
        if self.capture is not None and self._scheduler.checkpoint_lost:
            self.capture.end(self.damage.cause or self.spill_failure)

    def _fetch(self, operation: Fetch) -> None:
        index, waits = operation.unit, operation.awaited
        after: tuple[Handle, ...] = ()
        source = partial(self._store.newest, index, WEIGHT_BACK)
        if waits is not None:  # where the update for which it waits has written them
            gradient: UnitGradient = waits.payload
            after, source = (gradient.shown,), partial(getattr, gradient, "weights")
        handle = self._leases.fetch(operation.lease, self._units[index], after, source)
        self._follow(operation, handle)
        handle.when_issued(lambda: self.driver.tell(self._issued, operation, handle))

    def _issued(self, operation: Fetch, handle: Handle) -> None:
        if not handle.done:  # else it has been reported as ended, or is about to be
            self._scheduler.issued(operation)

    def _reclaim(self, operation: Question) -> None:
        free = self._leases.reclaim(operation, self._units[operation.unit])
        if not free:
            self._held[operation.unit if isinstance(operation, Ask) else operation] = operation
        self.driver.tell(self._scheduler.reclaimed, operation, free)

    def _let_go(self, operation: Question) -> None:
        self._leases.reclaim(operation, self._units[operation.unit])
        self._scheduler.let_go(operation)

    def _update(self, operation: Update) -> None:
        update = operation.update
        gradient: UnitGradient = update.gradient.payload
        updated, written = update.payload = Handle(), Handle()
        store, unit = self._store, operation.unit
        extents = Extents(store.newest_runs(unit), store.named(unit, update.runs))
        gradient.weights = extents.write[WEIGHT]
        tell, scheduler = self.driver.tell, self._scheduler
        if operation.unit in store.plan.placement.on_device:
            gradient.issued = self._device.fence()

        def weights_written(error: BaseException | None) -> None:
            if error is None:
                tell(scheduler.weights_written, operation)

        def ended(error: BaseException | None) -> None:
            if isinstance(error, NonFiniteGradientError):
                tell(scheduler.refused, operation)
            else:
                self._ended(operation, error)

        updated.then(weights_written)
        all_of([written, updated]).then(ended)
        if not update.speculative:
            self._end_gradient_with(update)
        used = partial(tell, scheduler.gradient_used, operation)

        def suspended(error: BaseException) -> bool:
            tell(scheduler.cannot_go_on, operation)
            waits = not update.speculative and self._share_weights is None  # other ranks would wait
            if waits:
                tell(self._suspend, error)
            return waits

        self.updates.submit(RunningUpdate(gradient, gradient.segments, extents, updated, written, used, suspended))

    def _suspend(self, error: BaseException) -> None:
        _log.warning("An update, or the read of its gradient, has failed, and is tried again: %s", error)
        self.suspended_by = error
        if self.capture is not None and self._scheduler.checkpoint_reads:
            self.capture.end(error)  # it may wait for this update

    def _request(self, operation: Request) -> None:
        gradient: UnitGradient = operation.gradient.payload
        gradient.unit.updated = True
        gradient.request()

    def _end_gradient_with(self, update: UpdateRecord) -> None:
        """An update is final: when its handles end, so do those of its gradient, for which others wait."""
        gradient: UnitGradient = update.gradient.payload
        updated, written = update.payload
        updated.then(gradient.updated.finish)
        written.then(gradient.written.finish)

    def _adopt(self, operation: Adopt) -> None:
        unit = self._units[operation.unit]
        if self._leases.in_place(unit):
            self._leases.lease_in_place(unit)

    def _share(self, operation: Share) -> None:
        assert self._share_weights is not None, "only ranks share"
        gradient: UnitGradient = operation.update.gradient.payload
        handle = self._share_weights(gradient)
        handle.then(gradient.shown.finish)
        handle.then(partial(self._shared, operation))

    def _shared(self, operation: Share, error: BaseException | None) -> None:
        refused = isinstance(error, NonFiniteGradientError)  # on every rank
        self._ended(operation, None if refused else error)

    def _save(self, operation: Save) -> None:
        if self.capture is None:  # it was given up
            self.driver.tell(self._scheduler.ended, operation)
        else:
            self._follow(operation, self.capture.read(operation.unit, operation.runs))
