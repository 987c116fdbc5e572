"""ActiveForwards: the forwards that are running now, and the leases that each keeps until it ends.

A block of `resident` is like one long forward: it keeps its leases until it ends, and forwards inside it find them.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from pagoda.autograd.accesses import Accesses
from pagoda.autograd.activations.packing import Packing
from pagoda.errors import UsageError
from pagoda.interrupts import holding_signals, look
from pagoda.parameters.unit import LiveUnit, written_in_forward
from pagoda.plan.trace import Phase


@dataclass(eq=False, slots=True)
class _Forward:
    """A running forward."""

    phase: Phase
    thread: int = field(default_factory=threading.get_ident)
    entered: list[LiveUnit] = field(default_factory=list)
    """The units that it has entered."""
    read: list[LiveUnit] = field(default_factory=list)
    """Those of `entered` of which it only reads a parameter of another module."""
    written: list[str] = field(default_factory=list)
    """Parameters that it has written to."""
    packs: bool = False
    """Whether packing began with it."""


@dataclass(eq=False, repr=False)
class ActiveForwards:
    """All running forwards of hooked modules, outermost first.

    Invariant: `unit.active` is the number of forwards that have entered the unit. Above zero, its parameters point into
    a pinned lease. One thread at a time runs forwards, because all threads see the same parameters.
    """

    _packing: Packing
    _accesses: Accesses
    _running: list[_Forward] = field(default_factory=list)
    _one_thread: threading.RLock = field(default_factory=threading.RLock)
    _outermost: threading.Lock = field(default_factory=threading.Lock)
    """Held during an outermost forward."""
    _resident: set[LiveUnit] = field(default_factory=set)
    """Units that a block of `resident` keeps."""

    @property
    def in_forward(self) -> bool:
        """Whether a forward is running."""
        return bool(self._running)

    def alone(self) -> AbstractContextManager[object]:
        """Inside, no other thread runs a forward. Waits for the outermost forward of another thread.

        A thread that Python did not start is one of autograd's. The thread for which it works waits in backward, and
        may be inside a forward, so there is nothing to wait for.
        """
        if isinstance(threading.current_thread(), threading._DummyThread):
            return nullcontext()
        self._accesses.check_not_forked()  # the thread that holds it may be one of the process that was forked
        return self._one_thread

    def run(self, units: Sequence[LiveUnit], call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a forward with `units` leased and their parameters pointing into the leases.

        Raises UsageError if the forward writes to a parameter, and inside a transform of torch.func or a trace, which
        would have to transform leases too.
        """
        with self.alone():
            if self._outermost.locked() or torch._C._current_graph_task_id() != -1:
                return self._run(units, call, *args, **kwargs)
            with self._outermost:
                self._begin_outermost()
                return self._run(units, call, *args, **kwargs)

    def _begin_outermost(self) -> None:
        """End what a signal has kept from ending."""
        look()
        if self._resident:
            return
        if self._running:
            self._accesses.compute_lock.run(self._close, self._running[0])
        if self._packing.is_left_over:
            self._accesses.compute_lock.run(self._packing.end_leftovers)

    def _run(self, units: Sequence[LiveUnit], call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self._resident and torch.is_grad_enabled():
            raise UsageError(
                "A forward with gradients was called inside `with pagoda.resident(...)`, where no step can be taken: "
                "call it after the block, or under torch.no_grad()."
            )
        if self._resident.issuperset(units) and self.runs_here and self._packing.is_innermost:
            self._accesses.computing()
            return call(*args, **kwargs)  # what it uses is leased for the forward around it
        return self._run_leased(units, call, *args, **kwargs)

    @contextmanager
    def resident(self, units: Collection[LiveUnit]) -> Iterator[None]:
        """Inside, `units` stay leased, for forwards without gradients. Other threads wait with theirs.

        Raises UsageError inside a forward, and at the end of the block if a parameter was written to.
        """
        if self.runs_here and not self._resident:
            raise UsageError("pagoda.resident(...) cannot begin inside a forward.")
        new, forward = {*units} - self._resident, _Forward(Phase.FORWARD)
        with self.alone():
            try:
                with holding_signals(), torch.no_grad():  # so that its accesses belong to no step
                    self._accesses.end_read()
                    self._accesses.compute_lock.run(self._open, forward, new)
                    self._resident |= new
                yield
            finally:
                self._resident -= new
                self._end(forward)
            _check_written(forward)

    def check_not_resident(self, what: str) -> None:
        """Raises UsageError inside a block of `resident`, because `what` changes weights."""
        if self._resident:
            raise UsageError(
                f"{what} was called inside `with pagoda.resident(...)`, which keeps the present weights: end the block "
                "first."
            )

    def use(self, units: Sequence[LiveUnit]) -> bool:
        """Lease units for one function of torch, and then until the innermost running forward ends or other units need
        room. That forward reads parameters of other modules.

        Returns False if no forward runs in this thread.
        """
        if not self.runs_here:
            return False
        self._accesses.compute_lock.run(self._read, self._running[-1], units)
        return True

    def _read(self, forward: _Forward, units: Sequence[LiveUnit]) -> None:
        for unit in units:
            self._enter(forward, unit, keep=units)
            forward.read.append(unit)

    def make_room(self, units: Collection[LiveUnit]) -> None:
        """Hide what running forwards have read, if a function is about to read `units` and may need room for them. So
        nothing that it uses is hidden while it begins."""
        if self.runs_here and (len(units) > 1 or not all(map(self._accesses.is_leased, units))):
            self._accesses.compute_lock.run(self._give_back, ())

    @contextmanager
    def around_function(self) -> Iterator[None]:
        """Around a function of torch that uses hidden parameters.

        Outside forwards it is like a forward of its own: other threads wait, and what a graph saves is packed. But in
        backward, what runs may repeat a part of a forward, whose graph is packed already.
        """
        if self.runs_here:
            yield
            return
        _refuse_transforms()
        with self.alone():
            in_backward = torch._C._current_graph_task_id() != -1
            starts_packing = not in_backward and torch.is_grad_enabled() and self._packing.enter()
            try:
                yield
            finally:
                if starts_packing:
                    self._packing.leave()

    def _give_back(self, keep: Sequence[LiveUnit]) -> None:
        """Hide what running forwards have read of other modules, except the units `keep`. They lease it again if they
        read it again."""
        for forward in self._running:
            given, forward.read = [u for u in forward.read if u not in keep], [u for u in forward.read if u in keep]
            for unit in given:
                forward.entered.remove(unit)
                self._leave(forward, unit)

    @property
    def runs_here(self) -> bool:
        """Whether a forward runs in this thread."""
        return bool(self._running) and self._running[-1].thread == threading.get_ident()

    def _run_leased(self, units: Iterable[LiveUnit], call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        _refuse_transforms()
        in_backward = torch._C._current_graph_task_id() != -1
        if not self._running and not in_backward:
            self._accesses.end_read()
        forward = _Forward(Phase.BACKWARD if in_backward else Phase.FORWARD)
        try:
            self._accesses.compute_lock.run(self._open, forward, units)
            result = call(*args, **kwargs)
        finally:
            self._end(forward)
        _check_written(forward)
        return result

    def _end(self, forward: _Forward) -> None:
        """End a forward, also if a signal's handler raises before that has begun."""
        try:
            self._accesses.compute_lock.run(self._close, forward)
        finally:
            if forward in self._running:
                self._accesses.compute_lock.run(self._close, forward)

    def _open(self, forward: _Forward, units: Iterable[LiveUnit]) -> None:
        forward.packs = self._packing.enter()
        self._running.append(forward)
        for unit in units:
            self._enter(forward, unit)

    def _close(self, forward: _Forward) -> None:
        """End a forward, and those inside it that an exception has kept from ending."""
        while forward in self._running:
            last = self._running.pop()
            for unit in last.entered:
                self._leave(last, unit)
            if last.packs:
                self._packing.leave()

    def _enter(self, forward: _Forward, unit: LiveUnit, keep: Sequence[LiveUnit] = ()) -> None:
        if unit.gathered:
            raise UsageError(f"{unit.spec.name!r} cannot run inside `with pagoda.gathered(...)` of its parameters.")
        if not self._accesses.is_leased(unit):  # it needs room
            self._give_back(keep)
        lease = self._accesses.begin(unit, forward.phase)
        unit.active += 1
        forward.entered.append(unit)
        if unit.active == 1:
            unit.show(lease.base)

    def _leave(self, forward: _Forward, unit: LiveUnit) -> None:
        """End the use of a unit, and note if a parameter was written to meanwhile."""
        unit.active -= 1
        written = unit.hide() if unit.active == 0 else None
        self._accesses.end(unit, forward.phase)
        if written is not None:
            self._accesses.overwritten(unit)
            forward.written.append(written)


def _check_written(forward: _Forward) -> None:
    """Raises UsageError if a forward has written to a parameter."""
    if forward.written:
        raise UsageError(written_in_forward(forward.written[0]))


def _refuse_transforms() -> None:
    traced = any(torch._C._get_dispatch_mode(mode) is not None for mode in _TRACING)
    if traced or torch._C._functorch.peek_interpreter_stack() is not None:
        raise UsageError(
            "Neither the transforms of torch.func (vmap, grad, jvp, ...) nor tracing (torch.export, make_fx, fake "
            "tensors) can run a wrapped model, because its weights come and go around each forward. For derivatives, "
            "use torch.autograd (grad, functional, forward_ad). Otherwise transform or trace a model that is not "
            "wrapped, with the state_dict() of this one."
        )


_TRACING = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY)
"""Modes in which functions are recorded, or have no values."""
