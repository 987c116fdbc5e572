"""Values of gradients: what a program asks of `param.grad` between backward and `step()`, and what it writes there."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pagoda.autograd.accesses import LET_UPDATES_WAIT, event
from pagoda.errors import UsageError
from pagoda.parameters.hidden import as_plain
from pagoda.parameters.unit import LiveUnit
from pagoda.plan.lanes import LaneName
from pagoda.plan.layout import GRAD
from pagoda.ranks.one_rank import OneRank
from pagoda.runtime.executor import Executor
from pagoda.runtime.gradients import UnitGradient

if TYPE_CHECKING:
    from pagoda.autograd.stepper import Stepper

TOO_LATE = (
    "{} comes too late: wrap(gradient_accumulation_steps=...) was given without clipping, so units are updated during "
    "backward. "
    f"Pass wrap(max_grad_norm=...) too, or {LET_UPDATES_WAIT}."
)


class ValuesCopy(NamedTuple):
    """A copy of what a marker stands for."""

    values: torch.Tensor
    """As they are in plain PyTorch. They may be changed."""
    before: tuple[torch.Tensor, torch.Tensor] | None
    """None if pages have the gradient in this form. Otherwise `values` again, not to be changed, and the same with the
    precision that pages have, flat, in fp32."""


class GradientValues:
    """Reads and writes the gradients of one step as tensors.

    Each function on a gradient gets a copy of it in the parameter's dtype. What a function writes replaces the gradient
    in its buffer, as if it had arrived from autograd, and its norm is taken anew. But a 2-norm comes from the sum of
    squares, and multiplying by one number sets a factor, which the update uses. So clipping reads no gradient.

    On several ranks, all read and write at the same point of their programs, and read the mean over ranks. Where ranks
    divide experts, each reads and writes the gradients of its own experts, at the same point, too.
    """

    def __init__(self, stepper: "Stepper", executor: Executor) -> None:
        self._stepper, self._executor = stepper, executor
        self._accesses, self._gradients = stepper.accesses, stepper.gradients
        self.compute_lock = stepper.accesses.compute_lock
        self._rank_group, self._scaler = stepper.rank_group, stepper.scaler
        self._late = self._accesses.plan.options.update_during_backward
        self.factors: dict[tuple[int, int], float] = {}
        """(unit, slot) -> the factor for a gradient of this step on its way into the update. Present if clipping or the
        user set one, even if it is 1."""
        self._of_ranks: dict[int, list[float]] | None = None
        """Sums of squares of this step's gradients, by unit and slot, once several ranks have asked for them."""

    def factor(self, unit: LiveUnit, slot: int) -> float:
        """The factor for a gradient."""
        return self.factors.get((unit.index, slot), 1.0)

    def changed(self) -> None:
        """A gradient has arrived or was written."""
        self._of_ranks = None

    def forget(self) -> None:
        """The gradients of this step are gone."""
        self.factors.clear()
        self.changed()

    # --- without values ---

    @event
    def norm(self, unit: LiveUnit, slot: int) -> float:
        """2-norm, over all ranks, of the gradient that `param.grad` shows. Waits until it is in its buffer.

        With several ranks, every rank must ask at the same point of its program. The first such call computes the norms
        of all parameters.
        """
        gradient = self._gradients.latest(unit)
        if gradient is None:
            raise UsageError(f"The gradient of {unit.name(slot)!r} is gone: its optimizer is closed.")
        if isinstance(self._rank_group, OneRank):
            self._stepper.settle([gradient])
            square_sum = gradient.square_sums[slot]
        else:
            if self._of_ranks is None:
                self._rank_group.flush()
                self._stepper.settle(self._gradients.of_step().values())
                self._of_ranks = self._rank_group.parameter_square_sums("asking param.grad for its norm")
            square_sum = self._of_ranks[unit.index][slot]
        return abs(self.factor(unit, slot)) * math.sqrt(square_sum) / self._scaler.scale

    def scale(self, unit: LiveUnit, slot: int, factor: float) -> bool:
        """Let the update multiply a gradient by a factor, the same on every rank. Returns False, and does nothing, if
        the gradient has a factor already, and the product of both would round differently from one after the other."""
        if self._late and factor != 1.0:
            raise UsageError(TOO_LATE.format("Clipping, or multiplying param.grad,"))
        before = self.factor(unit, slot)
        exact = is_power_of_two(factor) or is_power_of_two(before) or not math.isfinite(factor * before)
        if exact and not self._late:
            self.factors[unit.index, slot] = before * factor
        return exact

    # --- with values ---

    @event
    def read(self, unit: LiveUnit, slot: int, asked_by: str) -> ValuesCopy:
        """A copy of a gradient, as plain PyTorch has it."""
        with self._together(unit, slot, asked_by), torch.inference_mode(False), torch.no_grad():
            gradient = self._gradients.get(unit)
            assert gradient is not None, "a marker stands for it"
            with self._lent(gradient):
                kept = self._gradients.copy_of(gradient, slot)
            start = unit.spec.slots[slot].offset
            kept = self._accesses.collectives.completed(unit.spec, GRAD, start, kept)
            return self._shown(unit, slot, kept.to(unit.blanks[slot].device))

    @event
    def write(
        self, unit: LiveUnit, slot: int, values: torch.Tensor, asked_by: str, reading: ValuesCopy | None = None
    ) -> None:
        """Let `values`, in the shape and dtype of the parameter, be its gradient. `reading`: what they were made of.
        Elements that have not changed since keep the precision that pages have."""
        dtype, scale = self._gradients.dtype(unit), self._scaler.scale
        with self._together(unit, slot, asked_by), torch.inference_mode(False), torch.no_grad():
            values = values.detach() if values.layout is torch.strided else values.detach().to_dense()
            flat = unit.stored(slot, values).reshape(-1)
            if flat.dtype is not dtype or scale != 1:
                flat = flat.float() * scale
            if reading is not None and reading.before is not None:
                shown, precise = reading.before
                flat = torch.where(unit.stored(slot, values == shown).reshape(-1), precise, flat)
            gradient = self._stepper.begin(unit)
            delivery = self._gradients.replace(gradient, slot, flat.to(dtype).contiguous())
            self.factors.pop((unit.index, slot), None)  # before waits, which an exception may end
            self.changed()
            self._stepper.request_buffer(gradient, False, delivery)
            self._accesses.compute_lock.waiting(gradient.settle)

    def assign(self, unit: LiveUnit, slot: int, value: Any) -> None:
        """`param.grad` is set to a tensor. A parameter that no step updates keeps that tensor."""
        param: Any = unit.params[slot]
        with as_plain():
            own = slot in unit.grouped and value is unit.markers[slot]
            if not own or slot in unit.marked:
                param.grad = value  # torch refuses a tensor of another shape, dtype or device
            if slot not in unit.grouped or (own and slot in unit.marked):
                return
            param.grad = None
        self.write(unit, slot, value.detach().clone(), "param.grad = ...")
        self._stepper.mark(unit, slot)

    def adopt(self, unit: LiveUnit) -> None:
        """Take the gradients that were set while their parameters were not hidden, of which nothing was told."""
        for slot in unit.grouped:
            grad = unit.params[slot].grad
            if grad is not None and grad is not unit.markers[slot]:
                self.assign(unit, slot, grad)

    def apply_factor(self, unit: LiveUnit, slot: int) -> None:
        """Multiply a gradient by its factor now, because another gradient will be added to it."""
        if self.factor(unit, slot) != 1.0:
            reading = self.read(unit, slot, "a backward after a multiplication of param.grad")
            self.write(unit, slot, reading.values, "a backward after a multiplication of param.grad", reading)

    def _shown(self, unit: LiveUnit, slot: int, kept: torch.Tensor) -> ValuesCopy:
        dtype, scale, factor = unit.blanks[slot].dtype, self._scaler.scale, self.factor(unit, slot)
        in_pages = kept.dtype is dtype and scale == 1
        flat = kept if in_pages else (kept.float() / scale).to(dtype)
        if factor != 1:
            flat.mul_(factor)
        stored = flat.view(unit.spec.slots[slot].param.shape)
        values = unit.as_param(slot, unit.shown(slot, stored))
        if in_pages:
            return ValuesCopy(values, None)
        return ValuesCopy(values, (values.clone(), kept.float() * factor))

    @contextmanager
    def _together(self, unit: LiveUnit, slot: int, asked_by: str) -> Iterator[None]:
        """Inside, all ranks are at this point of their programs, and no gradient of the unit is on its way."""
        if self._late:
            raise UsageError(TOO_LATE.format(f"{asked_by} on the gradient of {unit.name(slot)!r}"))
        self._accesses.check_usable()
        collectives, what = self._accesses.collectives, f"{asked_by} on the gradient of {unit.name(slot)!r}"
        if collectives.mesh.ranks.expert_parallel > 1 and unit.index in self._accesses.plan.layout.expert_units:
            what = f"{asked_by} on the gradient of parameter {slot} of unit {unit.index}, an expert of each rank"
        self._rank_group.flush()
        collectives.announce(what, None)
        gradient = self._gradients.get(unit)
        if gradient is not None:
            self._stepper.settle([gradient])
        yield
        collectives.announce(what, None)  # no rank goes on before all have read or written

    @contextmanager
    def _lent(self, gradient: UnitGradient) -> Iterator[None]:
        """Inside, compute can read the buffer of a gradient."""
        unit, scheduler = gradient.unit.index, self._stepper.scheduler
        self._accesses.tell(scheduler.lend_gradient, unit, True)
        try:
            refuse = partial(self._executor.refuse_gradient, gradient.unit)
            self._accesses.wait(partial(scheduler.gradient_is_here, unit), LaneName.SSD_READ, refuse)
            self._accesses.check_usable()
            yield
        finally:
            self._accesses.tell(scheduler.lend_gradient, unit, False)


def is_power_of_two(factor: float) -> bool:
    """Whether multiplying by a factor only changes exponents."""
    return abs(math.frexp(factor)[0]) == 0.5
