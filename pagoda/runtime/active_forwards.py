"""ActiveForwards: the forwards that are running now, and what each keeps in place until it ends."""

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn

from pagoda.errors import UsageError
from pagoda.plan.trace import Phase
from pagoda.runtime.accesses import Accesses
from pagoda.runtime.packing import Packing
from pagoda.runtime.unit import LiveUnit, written_in_forward


class _Bracket:
    """One running forward of a module: the units it has entered, and whether it started the packing."""

    __slots__ = ("entered", "is_method", "module", "packing", "phase", "thread")

    def __init__(self, module: nn.Module, packing: bool, is_method: bool) -> None:
        self.module = module
        self.is_method = is_method
        """Whether another method of the module runs, in place of its forward."""
        self.packing = packing
        self.phase = Phase.FORWARD if torch._C._current_graph_task_id() == -1 else Phase.BACKWARD
        self.thread = threading.get_ident()
        self.entered: list[LiveUnit] = []


class ActiveForwards:
    """Every forward of a hooked module that is running, outermost first.

    Invariant: `unit.active` is the number of forwards that have entered the unit; above zero its parameters point
    into a pinned lease.
    """

    def __init__(
        self,
        packing: Packing,
        accesses: Accesses,
    ) -> None:
        self._packing = packing
        self._accesses = accesses
        self._open: list[_Bracket] = []
        self._written: str | None = None
        """A parameter that a forward has written to, until that is raised."""

    @property
    def in_forward(self) -> bool:
        """Whether a forward is running."""
        return any(not bracket.is_method for bracket in self._open)

    def run(
        self, module: nn.Module, units: list[LiveUnit], call: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run what no hook of the module sees as its forward."""
        self.open(module, units)
        try:
            return call(*args, **kwargs)
        finally:
            self.close(module)

    def run_method(
        self, module: nn.Module, units: list[LiveUnit], method: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a method of a module other than its forward. What is gathered is there already."""
        self.drop_interrupted(calling=module)
        self.open(module, [unit for unit in units if not unit.gathered], is_method=True)
        try:
            return method(*args, **kwargs)
        finally:
            self.close(module)

    def use(self, unit: LiveUnit) -> bool:
        """Lease a unit until the innermost running forward ends, which has come to a parameter of another module.

        Returns False where no forward runs in this thread.
        """
        self.drop_interrupted()
        if not self._open or self._open[-1].thread != threading.get_ident():
            return False
        self._enter(self._open[-1], unit)
        return True

    def open(self, module: nn.Module, units: list[LiveUnit], is_method: bool = False) -> None:
        """A module's forward starts: lease its units and point their parameters into the leases.

        Raises UsageError inside a transform of torch.func, which would have to transform leases too.
        """
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise UsageError(
                "The transforms of torch.func (vmap, grad, jvp, ...) cannot run a wrapped model: use autograd's own "
                "functions, or transform only what holds no parameters."
            )
        if not self._open and not torch.is_grad_enabled():
            self._accesses.before_evaluation()
        bracket = _Bracket(module, self._packing.enter(), is_method)
        self._open.append(bracket)
        for unit in units:
            self._enter(bracket, unit)

    def _enter(self, bracket: _Bracket, unit: LiveUnit) -> None:
        if unit.gathered:
            raise UsageError(f"{unit.spec.name!r} cannot run inside `with pagoda.gathered(...)` of its parameters.")
        lease = self._accesses.begin(unit, bracket.phase)
        unit.active += 1
        bracket.entered.append(unit)
        if unit.active == 1:
            unit.show(lease.base)

    def close(self, module: nn.Module) -> None:
        """A module's forward has ended, and with it whatever it called.

        Raises UsageError if one of their parameters was written to.
        """
        if any(bracket.module is module for bracket in self._open):
            while self._close_innermost() is not module:
                pass
        self._check_unwritten()

    def drop_interrupted(self, calling: nn.Module | None = None) -> None:
        """Close what a KeyboardInterrupt left open: torch calls no forward hook after one.

        A bracket is real as long as its module's call is on the stack. `calling` is a module whose call has begun but
        whose bracket is not open yet.
        """
        if not self._open or self._open[0].thread != threading.get_ident():
            return
        outermost = self._open[0].module
        expected = sum(bracket.module is outermost for bracket in self._open) + (calling is outermost)
        if _calls_on_stack(outermost) < expected:
            while self._open:
                self._close_innermost()
            self._check_unwritten()

    def _check_unwritten(self) -> None:
        name, self._written = self._written, None
        if name is not None:
            raise UsageError(written_in_forward(name))

    def _close_innermost(self) -> nn.Module:
        bracket = self._open.pop()
        for unit in bracket.entered:
            unit.active -= 1
            name = unit.hide() if unit.active == 0 else None
            self._accesses.end(unit, bracket.phase)
            if name is not None:
                self._written = name
                self._accesses.overwritten(unit)
        if bracket.packing:
            self._packing.leave()
        return bracket.module


_RUNS = (ActiveForwards.run.__code__, ActiveForwards.run_method.__code__)


def _calls_on_stack(module: nn.Module) -> int:
    """How many calls of `module` that open a bracket this thread is in."""
    calls = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__:
            calls += frame.f_locals["self"] is module
        elif frame.f_code in _RUNS:
            calls += frame.f_locals["module"] is module
        frame = frame.f_back
    return calls
