"""The stepper: collects the gradients of a step, and asks for the updates."""

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch

from pagoda.autograd.accesses import LET_UPDATES_WAIT, Accesses, event
from pagoda.autograd.clipping import Clipping, Norms
from pagoda.autograd.gradient_values import GradientValues
from pagoda.autograd.loss_scale import LossScaler, not_scaled
from pagoda.autograd.markers import MarkedGradient, marker
from pagoda.errors import BudgetError, NonFiniteGradientError, UsageError
from pagoda.optim.rule import Rule
from pagoda.parameters.hidden import unseen
from pagoda.parameters.unit import LiveUnit
from pagoda.plan.lanes import LaneName
from pagoda.ranks.one_rank import OneRank
from pagoda.ranks.rank_group import RankGroup
from pagoda.ranks.stages import Stages
from pagoda.runtime.executor import Executor
from pagoda.runtime.gradients import Delivery, GradientBuffers, UnitGradient
from pagoda.runtime.next_update import Groups, NextHypers, check_frozen, segments_of

_APPLIED = (
    "Gradients were applied during backward, so they cannot be dropped. Call optimizer.step() after every announced "
    f"backward, or {LET_UPDATES_WAIT}."
)


@dataclass(eq=False, repr=False)
class Stepper:
    """The gradients of one step, their norm, and the updates that follow from them. Only the compute thread calls
    it."""

    _units: list[LiveUnit]
    _groups: Groups
    _clip_grad_norm: float | None
    _rule: Rule
    gradients: GradientBuffers
    _executor: Executor
    accesses: Accesses
    scaler: LossScaler
    rank_group: RankGroup | OneRank
    _stages: Stages | None

    def __post_init__(self) -> None:
        self.compute_lock = self.accesses.compute_lock
        self._options = self.accesses.plan.options
        self.scheduler = self._executor.driver.scheduler
        self.queued = 0
        """Number of updates queued so far. Each is of one unit."""
        self._early_hypers: NextHypers | None = None
        """The hyperparameters at the time when the first update before this `step()` was prepared."""
        self.values = GradientValues(self, self._executor)
        """The gradients of this step as tensors."""
        self.clipping = Clipping(self, self._groups, self._stages)

    def on_gradient(self, unit: LiveUnit, slot: int, grad: torch.Tensor, accumulate: bool) -> None:
        """Autograd has finished one parameter's gradient."""
        announced = self._options.gradient_accumulation_steps
        if not unit.used:
            raise UsageError(unseen(unit.name(slot), "received a gradient"))
        if unit.updated:
            raise UsageError(
                f"{unit.name(slot)!r} received a gradient after its update during backward: more backward passes than "
                f"the {announced} announced by wrap(gradient_accumulation_steps=...) ran before optimizer.step(), or a "
                "reentrant checkpoint delivers gradients in parts (use use_reentrant=False)."
            )
        if self.scaler.active and not self.scaler.used and self._stages is None:  # only the last stage has the loss
            raise not_scaled(repr(unit.name(slot)))
        if accumulate:
            self.values.apply_factor(unit, slot)
        self.values.factors.pop((unit.index, slot), None)
        self.values.changed()
        gradient = self.begin(unit)
        if any(made.slot == slot for made in gradient.made):
            self._offload(gradient, last=False)
        self.rank_group.arrivals.add(gradient, slot, grad, accumulate)
        if announced is not None and gradient.arrivals[slot] > announced:
            raise UsageError(
                f"{unit.name(slot)!r} received {gradient.arrivals[slot]} gradients since the last optimizer.step(), "
                f"but wrap(gradient_accumulation_steps={announced}) announced {announced}. Announce as many as you "
                "run, or None "
                "if their number varies. With a Trainer, that is Paging(backward_passes=...)."
            )
        last = gradient.complete and gradient.arrivals[slot] == announced
        if last and (self._options.update_during_backward or self._options.may_speculate):
            self._prepare_early(gradient)
            last = bool(gradient.segments)
        if gradient.is_due:
            self._offload(gradient, last)
        else:
            self.rank_group.arrived(gradient, last)

    def begin(self, unit: LiveUnit) -> UnitGradient:
        """The unit's gradient of this step, which begins here if there is none."""
        gradient = self.gradients.get(unit)
        if gradient is None:
            gradient = self.gradients.new(unit)
            self._executor.driver.tell(self.scheduler.begin_gradient, unit.index, gradient)
        return self.gradients.get(unit) or gradient  # another rank may have begun it meanwhile

    def _offload(self, gradient: UnitGradient, last: bool) -> None:
        """Copy a unit's gradients from autograd to its buffer, and wait while too many bytes are on their way."""
        self.request_buffer(gradient, last, self.gradients.gather(gradient))
        self.accesses.compute_lock.waiting(self.gradients.hold_back)

    def request_buffer(self, gradient: UnitGradient, last: bool, delivery: Delivery) -> None:
        """Tell the scheduler about a gradient, and wait until it has a buffer. `last`: no other gradient of the unit
        comes before `step()`."""
        self.accesses.tell(self.scheduler.gradient, gradient.unit.index, gradient.complete, last, delivery)
        self._await_buffers(gradient)

    def _await_buffers(self, gradient: UnitGradient) -> None:
        """Wait until every gradient that autograd has made has a buffer. `gradient` is named if there is no room."""
        refuse = partial(self._executor.refuse_gradient, gradient.unit)
        self.accesses.wait(lambda: not self.scheduler.buffer_awaited, LaneName.D2H, refuse)

    def _prepare_early(self, gradient: UnitGradient) -> None:
        """Prepare the update of a unit before `step()`. It is right if `step()` clips nothing and no hyperparameter
        changes until then."""
        if self._early_hypers is None:
            for group in self._groups.all:
                self._rule.after_step(group)  # raises before a unit is updated if a step cannot be taken
            self._early_hypers = NextHypers(self._groups, self._rule)
        gradient.hypers = self._early_hypers.of(gradient.unit, lambda _: 1.0 / self.scaler.scale)
        gradient.segments = segments_of(gradient.unit, gradient.hypers)

    @event
    def updates_have_begun(self) -> bool:
        """Whether some unit has begun its update of this step during backward."""
        self.accesses.end_read()
        return any(unit.updated for unit in self._units)

    def zero_grad(self) -> None:
        """Drop the gradients of this step."""
        if self.updates_have_begun():
            raise UsageError(_APPLIED)
        self._drop_with_others()

    def _drop_with_others(self) -> None:
        """Drop the gradients of this step, on every rank."""
        if self.rank_group.drop_gradients():
            self._drop_gradients()
        self._forget_gradients()

    def _drop_gradients(self) -> None:
        dropped = self.gradients.untaken()
        if self.gradients.of_step():
            self.accesses.tell(self.scheduler.drop_gradients)
        for handle in [handle for gradient in dropped for handle in gradient.pending]:
            handle.wait_until_done()

    def _forget_gradients(self) -> None:
        """Forget what is known of gradients that are gone."""
        self._early_hypers = None
        self.values.forget()
        for unit in self._units:
            unit.marked.clear()

    def drop_step(self) -> None:
        """Forget the step that has begun, which no `step()` will end. What it has updated is damaged."""
        if self.updates_have_begun():
            self._executor.damage.note(UsageError("A load was broken off that had dropped updates during backward"))
        for unit in self._units:
            for param in unit.params:
                param.grad = None
        self._drop_with_others()
        self._clear_step()

    def step(self, late: bool = True) -> Norms | None:
        """Queue the update of every unit whose gradients have arrived. Updates run ahead of the next forward. If
        asynchronous updates will not be `late`, they predict no weights.

        Returns the norms of the gradients, or None if a scaled gradient was not finite and the step is skipped.
        """
        self.updates_have_begun()
        hypers = NextHypers(self._groups, self._rule if late else self._rule.on_time())
        self._check_kept(hypers)
        check_frozen(self._units)
        for unit in self._units:
            self.values.adopt(unit)
        try:
            norms = self.clipping.norms("optimizer.step()")
        except NonFiniteGradientError as error:
            applied = self._abandon()
            if applied or not self.scaler.skips:
                raise NonFiniteGradientError(f"{error} {self._told(applied)}") from None
            if self.scaler.skips_always:
                warnings.warn(f"A step is skipped. {error}", stacklevel=4)
            self.accesses.tell(self.scheduler.end_step, True)
            self.scaler.end_step(skipped=True)
            return None
        except Exception as error:
            if self._is_lost(error) and any(unit.updated for unit in self._units):  # it cannot be dropped either
                self._executor.damage.note(error)
            raise
        if self._clip_grad_norm is not None and norms.total is not None:
            self.clipping.clip_to(self._clip_grad_norm, norms.total)
        factors = self.clipping.factors()
        if not all(map(math.isfinite, factors)):
            raise UsageError(
                "Gradients were multiplied by NaN or infinity, so no step can be taken with them. Clip with a max_norm "
                "that is a number."
            )
        self._queue_updates(hypers, clipped=any(factor != 1.0 for factor in factors))
        if norms.total is not None:
            self.scaler.end_step(skipped=False)
        self._clear_step()
        return norms

    def _is_lost(self, error: Exception) -> bool:
        """Whether a step whose norms have raised `error` can never be taken."""
        handles = (handle for gradient in self.gradients.of_step().values() for handle in gradient.pending)
        failed = any(handle.done and not handle.succeeded for handle in handles)
        return failed or self.rank_group.mesh.size > 1 or isinstance(error, BudgetError)

    def _check_kept(self, hypers: NextHypers) -> None:
        """Raises UsageError if hyperparameters differ from those that updates during backward have used, or if the user
        has dropped gradients that these have applied. Calling `step()` again keeps the latter."""
        applied = [(gradient.unit, slot) for gradient in self.gradients.taken() for slot in gradient.hypers]
        dropped = [(unit, slot) for unit, slot in applied if unit.params[slot].grad is None]
        for unit, slot in dropped:
            unit.params[slot].grad = unit.markers[slot]
        if dropped:
            raise UsageError(_APPLIED)
        for gradient in self.gradients.taken():
            if any(used.rule != hypers.rule(gradient.unit, slot) for slot, used in gradient.hypers.items()):
                raise UsageError(
                    "param_groups changed between backward and step(), but units were updated during backward "
                    "with the old values. Change them before backward or after step(), or leave out "
                    "wrap(gradient_accumulation_steps=...)."
                )

    def _queue_updates(self, hypers: NextHypers, clipped: bool) -> None:
        """Ask for the update of every unit with a gradient, with the current hyperparameters."""
        changed, unused = [], []
        for gradient in self.gradients.untaken():
            unit = gradient.unit
            gradient.hypers = hypers.of(unit, partial(self._scale_of, unit))
            segments = segments_of(unit, gradient.hypers)
            if clipped or segments != gradient.segments:
                changed.append(unit.index)
            gradient.segments = segments
            if not segments:
                unused.append(unit.index)
            gradient.request()
        self.queued += sum(bool(gradient.segments) for gradient in self.gradients.of_step().values())
        self.accesses.tell(self._executor.end_step, clipped, changed, unused)

    def _scale_of(self, unit: LiveUnit, slot: int) -> float:
        """The factor for a parameter's gradient."""
        return self.values.factor(unit, slot) / self.scaler.scale

    def mark(self, unit: LiveUnit, slot: int) -> None:
        """A parameter has a new gradient. Whoever keeps the marker of an older one cannot use it any more."""
        marked, name = MarkedGradient(unit, slot, self), f"{unit.name(slot)}.grad"
        unit.markers[slot] = marker(unit.blanks[slot].detach(), unit.forms[slot], name, marked)
        unit.mark(slot)

    def settle(self, gradients: Iterable[UnitGradient]) -> None:
        """Copy gradients from autograd to their buffers, and wait until they are there."""
        gradients = [*gradients]
        for gradient in gradients:
            if gradient.made:
                self._offload(gradient, last=False)
        if gradients:  # after an error in backward, some may still have no buffer
            self._await_buffers(gradients[0])
        with self.accesses.meter.waiting(LaneName.D2H):
            for gradient in gradients:
                self.accesses.compute_lock.waiting(gradient.settle)

    def _clear_step(self) -> None:
        self._forget_gradients()
        for unit in self._units:
            unit.used = unit.updated = False

    def _abandon(self) -> list[LiveUnit]:
        """Drop a step whose gradients are not finite. None of it stays queued. Returns the units that were updated
        during backward."""
        self.accesses.drain()  # first: an exception ends it with nothing changed
        for unit in self._units:
            for param in unit.params:
                param.grad = None
        self._drop_gradients()
        applied = []
        for gradient in self.gradients.taken():
            if gradient.updated.succeeded:
                applied.append(gradient.unit)
            else:  # the update was refused
                for slot in gradient.hypers:
                    gradient.unit.steps[slot] -= 1
        self._clear_step()
        return applied

    def _told(self, applied: list[LiveUnit]) -> str:
        """What the error for a gradient that is not finite says about weights. `applied`: units that were updated."""
        trained = sum(bool(unit.grouped) for unit in self._units)
        if not applied:
            return "No weight was changed."
        return (
            f"But {len(applied)} of {trained} units, such as {applied[0].spec.name!r}, were updated during backward, "
            "before that gradient was seen, and keep this update; the others do not have it. To undo it, load a "
            "checkpoint. To update all units or none, leave out wrap(gradient_accumulation_steps=...), or give "
            "max_grad_norm."
        )
